"""An agent that a test plays the controller of."""

import pytest

from tests.runtime.engine.agent.agent_bench import Bench, started


@pytest.fixture
def bench() -> Bench:
    return started()
