"""Copies KV from page to page on GPUs, straight from other GPUs' memory.

Importing this module imports Triton; see ``kv_copy_kernel``.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kernels import kv_copy_kernel
from shoal.runtime.engine.kv.carry_plan import Numbers, Piece
from shoal.runtime.engine.kv.kv_memory import Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.portions import Copy, Portion


class Launch(NamedTuple):
    """One launch of the kernel."""

    numbers: Numbers
    """What the kernel's table holds."""
    runs: int
    layers: int
    heads: int
    strides: kv_copy_kernel.Strides
    row_bytes: int


def launches(portion: Portion) -> Iterator[Launch]:
    """Yield the launches for a portion: one, unless strips differ in their heads."""
    source, target = portion.source.page, portion.target.page
    strides = kv_copy_kernel.Strides(
        source.head_stride, source.token_stride, target.head_stride, target.token_stride
    )
    layers = np.array([*portion.source.layers, *portion.target.layers], dtype=np.int64)
    for heads, pieces in groupby(portion.pieces, lambda entry: entry[0].strip.heads):
        runs = np.concatenate([_runs(portion, *entry) for entry in pieces], axis=1)
        if count := runs.shape[1]:
            numbers = np.concatenate([runs.reshape(-1), layers])
            yield Launch(numbers, count, len(layers) // 2, heads, strides, portion.token_bytes)


def _runs(portion: Portion, piece: Piece, mapped: Mapped) -> Numbers:
    """Return addresses in the source and in the target, and rows, of each run."""
    source, target = portion.source.page, portion.target.page
    strip, runs = piece
    found = np.empty((3, len(runs.tokens)), dtype=np.int64)
    found[0] = runs.source_page * source.stride + runs.source_token * source.token_stride
    found[0] += mapped.address + strip.source * source.head_stride
    found[1] = runs.target_page * target.stride + runs.target_token * target.token_stride
    found[1] += portion.memory.address + strip.target * target.head_stride
    found[2] = runs.tokens * strip.heads
    return found


class DeviceCopier:
    """Copies on a GPU.

    It copies on the stream of the steps. So it comes after all steps that the device has been given
    before, of which the last may still write to blocks of requests that have ended, and before all
    that it is given later. What goes on beside later steps is copied on a second stream, which
    waits for the earlier steps. What other engines ask for is copied on a third one, which waits
    for nothing: a step may be in a collective with the very engine that asks.

    Args:
        own: the engine's own buffer.
        groups: the pages of each KV group; kernels for them are compiled.

    Raises:
        NotSharedError: tokens of these pages do not begin where the kernel needs it.
    """

    def __init__(self, own: Mapped, groups: Sequence[KvPages]) -> None:
        self._last: dict[tuple[torch.cuda.Stream | None, int], torch.cuda.Event] = {}
        """The end of the last copy that each thread has begun on each stream; None: the steps'."""
        for pages in groups:
            numbers = (pages.token_bytes, pages.stride, own.address, *pages.layers)
            if any(number % kv_copy_kernel.ALIGNMENT for number in numbers):
                raise NotSharedError(f"a token's KV takes {pages.token_bytes} bytes of a head")
            self._compile(pages)
        self._side, self._apart = torch.cuda.Stream(), torch.cuda.Stream()

    @staticmethod
    def _compile(pages: KvPages) -> None:
        table = torch.zeros(2, dtype=torch.int64, device="cuda")
        strides = kv_copy_kernel.Strides(0, 0, 0, 0)
        kv_copy_kernel.copy(table.data_ptr(), 0, 1, 1, strides, pages.token_bytes)

    def after_steps(self, *, beside: bool) -> Copy:
        """See ``Copier.after_steps``."""
        if not beside:
            return partial(self._copy, None, None)
        steps = torch.cuda.Event()
        steps.record()
        return partial(self._copy, self._side, steps)

    def at_once(self) -> Copy:
        """See ``Copier.at_once``."""
        return partial(self._copy, self._apart, None)

    def _copy(
        self,
        stream: torch.cuda.Stream | None,
        after: torch.cuda.Event | None,
        portions: Sequence[Portion],
        table: Numbers | None = None,
    ) -> Callable[[], float]:
        found = [launch for portion in portions for launch in launches(portion)]
        if not found:
            return lambda: 0.0
        if stream is None:
            return self._launch(stream, found, table)
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            return self._launch(stream, found, table)

    def _launch(
        self, stream: torch.cuda.Stream | None, found: Sequence[Launch], table: Numbers | None
    ) -> Callable[[], float]:
        """Launch the kernel on the current stream; see ``Copy``."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        numbers = np.concatenate([launch.numbers for launch in found])
        in_use, address = [], 0
        if table is None:
            # Pinned, so that the host need not wait until it has been copied.
            pinned = torch.from_numpy(numbers).pin_memory()
        else:
            table[: len(numbers)] = numbers
            address = table.ctypes.data
        began.record()
        if table is None:
            on_device = pinned.to("cuda", non_blocking=True)
            address, in_use = on_device.data_ptr(), [pinned, on_device]
        for launch in found:
            of = (launch.runs, launch.layers, launch.heads, launch.strides, launch.row_bytes)
            kv_copy_kernel.copy(address, *of)
            address += launch.numbers.nbytes
        ended.record()
        self._last[stream, threading.get_ident()] = ended

        def wait() -> float:
            ended.synchronize()
            in_use.clear()
            return float(began.elapsed_time(ended)) / 1e3

        return wait

    def settle(self) -> None:
        """See ``Copier.settle``."""
        for ended in list(self._last.values()):
            ended.synchronize()
