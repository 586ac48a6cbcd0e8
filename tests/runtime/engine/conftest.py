"""Models and nodes that several modules use."""

from pathlib import Path

import pytest

from tests.runtime.engine.prompts import make_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"))
