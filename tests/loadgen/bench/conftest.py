"""What several benchmarks' tests use."""

import asyncio
import subprocess
from types import SimpleNamespace

import pytest

from shoal.loadgen.bench import server_process, vllm_client
from tests.loadgen.bench.preloaded_servers import Started, start_client


@pytest.fixture
def preloaded_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers and vLLM's client begin with vLLM imported."""
    monkeypatch.setattr(
        server_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Started})
    )
    monkeypatch.setattr(
        vllm_client,
        "asyncio",
        SimpleNamespace(**vars(asyncio) | {"create_subprocess_exec": start_client}),
    )
