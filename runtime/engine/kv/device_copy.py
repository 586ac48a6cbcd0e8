"""Copies KV from page to page on GPUs, straight from other GPUs' memory.

Importing this module imports Triton; see ``kv_copy_kernel``.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kernels import kv_copy_kernel
from shoal.runtime.engine.kv.carry_plan import Numbers, Piece
from shoal.runtime.engine.kv.kv_memory import Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.kv_reader import Portion


class Launch(NamedTuple):
    """One launch of the kernel."""

    numbers: Numbers
    """What the kernel's table holds."""
    runs: int
    layers: int
    heads: int
    strides: kv_copy_kernel.Strides
    row_bytes: int


def launches(portion: Portion, own: int) -> Iterator[Launch]:
    """Yield the launches for one KV group: one, unless strips differ in their heads.

    Args:
        portion: what to copy.
        own: address of the engine's own buffer.
    """
    source, target = portion.insides
    strides = kv_copy_kernel.Strides(
        source.head_stride, source.token_stride, target.head_stride, target.token_stride
    )
    layers = np.array(portion.pages.layers, dtype=np.int64)
    for heads, pieces in groupby(portion.pieces, lambda entry: entry[0].strip.heads):
        runs = np.concatenate([_runs(portion, own, *entry) for entry in pieces], axis=1)
        if count := runs.shape[1]:
            numbers = np.concatenate([runs.reshape(-1), layers])
            size = portion.pages.token_bytes
            yield Launch(numbers, count, len(layers), heads, strides, size)


def _runs(portion: Portion, own: int, piece: Piece, mapped: Mapped) -> Numbers:
    """Return addresses in the source and in the target, and rows, of each run."""
    source, target = portion.insides
    strip, runs = piece
    found = np.empty((3, len(runs.tokens)), dtype=np.int64)
    found[0] = runs.source_page * source.stride + runs.source_token * source.token_stride
    found[0] += mapped.address + strip.source * source.head_stride
    found[1] = runs.target_page * target.stride + runs.target_token * target.token_stride
    found[1] += own + strip.target * target.head_stride
    found[2] = runs.tokens * strip.heads
    return found


class DeviceCopier:
    """Copies on a GPU.

    It copies on the stream of the steps. So it comes after all steps that the device has been given
    before, of which the last may still write to blocks of requests that have ended, and before all
    that it is given later. What goes on beside later steps is copied on a second stream, which
    waits for the earlier steps.

    Args:
        own: the engine's own buffer.
        groups: the pages of each KV group; kernels for them are compiled.

    Raises:
        NotSharedError: tokens of these pages do not begin where the kernel needs it.
    """

    def __init__(self, own: Mapped, groups: Sequence[KvPages]) -> None:
        self._own = own
        self._last: dict[bool, torch.cuda.Event] = {}
        """The end of the last copy on the steps' stream, and beside them."""
        for pages in groups:
            numbers = (pages.token_bytes, pages.stride, own.address, *pages.layers)
            if any(number % kv_copy_kernel.ALIGNMENT for number in numbers):
                raise NotSharedError(f"a token's KV takes {pages.token_bytes} bytes of a head")
            self._compile(pages)
        self._side = torch.cuda.Stream()

    @staticmethod
    def _compile(pages: KvPages) -> None:
        table = torch.zeros(1, dtype=torch.int64, device="cuda")
        strides = kv_copy_kernel.Strides(0, 0, 0, 0)
        kv_copy_kernel.copy(table.data_ptr(), 0, 1, 1, strides, pages.token_bytes)

    def copy(self, portions: Sequence[Portion], *, beside: bool = False) -> Callable[[], float]:
        """See ``Copier.copy``."""
        found = [launch for part in portions for launch in launches(part, self._own.address)]
        if not found:
            return lambda: 0.0
        if not beside:
            return self._launch(found, beside)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            return self._launch(found, beside)

    def _launch(self, found: Sequence[Launch], beside: bool) -> Callable[[], float]:
        """Launch the kernel on the current stream; see ``copy``."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Pinned, so that the host need not wait until it has been copied.
        numbers = torch.from_numpy(np.concatenate([launch.numbers for launch in found]))
        pinned = numbers.pin_memory()
        began.record()
        table = pinned.to("cuda", non_blocking=True)
        address = table.data_ptr()
        for launch in found:
            of = (launch.runs, launch.layers, launch.heads, launch.strides, launch.row_bytes)
            kv_copy_kernel.copy(address, *of)
            address += launch.numbers.nbytes
        ended.record()
        self._last[beside] = ended
        in_use = [pinned, table]

        def wait() -> float:
            ended.synchronize()
            in_use.clear()
            return float(began.elapsed_time(ended)) / 1e3

        return wait

    def settle(self) -> None:
        """Wait until the device has copied all that it was told to, from any thread."""
        for ended in list(self._last.values()):
            ended.synchronize()
