"""A ``shoal`` whose engines damage their KV caches on demand, for negative controls."""

import os
from pathlib import Path
from typing import Any

from shoal.policies.values.layouts import DP
from tests.server.node import shoal
from tests.server.stock_server import count_ranks_uncompiled

VARIABLE = "SHOAL_TEST_DAMAGE"
"""Environment variable: the file that demands it, as long as it exists."""


def damaging_shoal(arguments: list[str]) -> int:
    """Be the ``shoal`` command; while it is demanded, every bind is the end of all KV before it."""
    import torch

    from shoal.runtime.engine.runner.runner import Runner  # before engines are forked

    bind = Runner._on_bind

    def bind_and_damage(runner: Runner, instruction: Any) -> None:
        bind(runner, instruction)
        if Path(os.environ[VARIABLE]).exists():
            for cache in runner._workers[DP].model_runner.kv_caches:
                cache.copy_(torch.randn(cache.shape))

    count_ranks_uncompiled()
    Runner._on_bind = bind_and_damage  # type: ignore[method-assign]
    return shoal(arguments)
