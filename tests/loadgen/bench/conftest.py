"""What several benchmarks' tests use."""

import subprocess
from types import SimpleNamespace

import pytest

from shoal.loadgen.bench import server_process
from tests.loadgen.bench.preloaded_servers import Started


@pytest.fixture
def preloaded_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers begin with vLLM imported."""
    monkeypatch.setattr(
        server_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Started})
    )
