"""Which phase of an engine's start takes how much of its GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.platforms import current_platform

CONTEXT = "context"
"""The phase before all others: what is in use once CUDA is there, whoever uses it."""


def used_bytes() -> int | None:
    """Return the bytes in use on this process's GPU, by the driver; None without a GPU."""
    if not current_platform.is_cuda():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class MemoryPhases:
    """The bytes that each phase took of the device, as the driver sees it.

    What torch's allocator keeps for later counts to the phase that made it do so. One engine runs
    on a device: what another process of it takes meanwhile would count too.

    Args:
        used: the bytes in use now; None: there is nothing to tell.
    """

    def __init__(self, used: Callable[[], int | None] = used_bytes) -> None:
        self.taken: dict[str, int] = {}
        """By phase; empty where there is nothing to tell."""
        self._used = used

    def begin(self) -> None:
        """Take what is in use now for that of ``CONTEXT``."""
        used = self._used()
        if used is not None:
            self.taken[CONTEXT] = used

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the body takes to a phase; less than nothing if it gives some back."""
        before = self._used()
        yield
        after = self._used()
        if before is not None and after is not None:
            self.taken[name] = after - before
