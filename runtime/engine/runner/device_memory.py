"""Which phase of an engine's start takes how much of its GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.platforms import current_platform

CONTEXT = "context"
"""The phase before all others: what any process has in use once CUDA is initialised."""


def used_bytes() -> int | None:
    """Return the bytes in use on this process's GPU, by the driver; None without a GPU."""
    if not current_platform.is_cuda():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def leave_in_use(cache_config: Any) -> None:
    """Take off the share of a GPU that vLLM asks for what is in use there already.

    An engine that was restarted finds in use what peers have kept of its weights. vLLM would refuse
    to start, because it wants all of its share to be free.

    Args:
        cache_config: vLLM's ``CacheConfig``, changed in place.
    """
    if not current_platform.is_cuda():
        return
    free, total = torch.cuda.mem_get_info()
    cache_config.gpu_memory_utilization -= (total - free) / total


class MemoryPhases:
    """The bytes that each phase took of the device, as the driver sees it.

    What torch's allocator keeps for later counts to the phase that made it do so. What another
    process takes meanwhile would count too, but only one engine runs on a device.

    Args:
        used: returns the bytes in use now; None if they are unknown.
    """

    def __init__(self, used: Callable[[], int | None] = used_bytes) -> None:
        self.taken: dict[str, int] = {}
        """Bytes by phase; empty if they are unknown."""
        self._used = used

    def begin(self) -> None:
        """Count what is in use now to ``CONTEXT``."""
        used = self._used()
        if used is not None:
            self.taken[CONTEXT] = used

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the body takes to a phase; negative if it frees more than it takes."""
        before = self._used()
        yield
        after = self._used()
        if before is not None and after is not None:
            self.taken[name] = after - before
