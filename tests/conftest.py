"""Settings of every test: no network, one thread per model, no clock, the same draws each time."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Read by vLLM and PyTorch when they are imported, so they must be set before any test module.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_OFFLINE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)

settings.register_profile("shoal", deadline=None, derandomize=True, database=None)
settings.load_profile("shoal")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep whatever follows XDG inside the test's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
