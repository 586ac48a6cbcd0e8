"""Reads KV through memory of the host, from engines whose own memory cannot be read.

GPUs that only PCIe connects often cannot read each other. A reader offers such an engine a region
of the host's memory, asks it to copy KV into the region's slots, and copies it from there
(``staging_plan.py``). So both links are busy at once, and no engine needs more memory for it.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.policies.values.layouts import Layout
from shoal.runtime.clock import Clock
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.carry_plan import Piece
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, HostMemory, Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.portions import Copy
from shoal.runtime.engine.kv.staging_memory import (
    SLOT_BYTES,
    SLOTS,
    Offer,
    Pins,
    Region,
    region_bytes,
)
from shoal.runtime.engine.kv.staging_plan import Ask, chunks, scattered
from shoal.runtime.engine.kv.staging_server import address_of

PATIENCE_SECONDS = 5.0
"""How long an engine may take for one slot: a thousand times as long as it should. The controller
waits longer for an answer about all of them, so that the engine to blame is the one that is late.
"""


class Wanted(NamedTuple):
    """What is to be read of one KV group from one engine."""

    engine: int
    group: int
    piece: Piece


class Lane:
    """A region, and the connections to the engines that copy into it; for one thread at a time.

    After any failure both are given up, and made anew for the next read: an engine that is late may
    still write into the region.

    Args:
        directory: the node's private directory.
        groups: the pages of each KV group.
        own: the engine's own buffer.
        memory: makes regions.
        pins: lets the device reach them.
        patience: seconds that an engine may take for one slot.
    """

    def __init__(
        self,
        directory: Path,
        groups: Sequence[KvPages],
        own: Mapped,
        memory: HostMemory,
        pins: Pins,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._directory, self._groups, self._own = directory, groups, own
        self._memory, self._pins, self._patience = memory, pins, patience
        self.enter = pins.enter
        """To be called in a thread before it reads."""
        self._slot_bytes = max([SLOT_BYTES, *(pages.block_bytes for pages in groups)])
        self._raw: torch.Tensor | None = None
        self._region: Region | None = None
        self._connections: dict[int, Connection[object, str]] = {}

    def connect(self, engine: int) -> None:
        """Let an engine copy into the region.

        Raises:
            NotSharedError: it cannot.
        """
        with self._given_up_on_failure():
            self._connection(engine)

    def read(self, copy: Copy, source: Layout, target: Layout, wanted: Sequence[Wanted]) -> None:
        """Read KV; when this returns, the device has all of it.

        Args:
            copy: copies on this engine's device.
            source: the layout of the unit that has the KV.
            target: the layout of the reader's unit.
            wanted: what to read.

        Raises:
            NotSharedError: an engine has ended, or is late.
        """
        self._forget_ended({each.engine for each in wanted})
        asked = deque[tuple[int, Ask]]()
        with self._given_up_on_failure():
            for number, (engine, group, piece) in enumerate(self._in_chunks(wanted)):
                if len(asked) == SLOTS:
                    self._take(copy, target, *asked.popleft())
                ask = Ask(number % SLOTS, group, source, piece)
                self._ask(engine, ask)
                asked.append((engine, ask))
            for engine, ask in asked:
                self._take(copy, target, engine, ask)

    def _in_chunks(self, wanted: Iterable[Wanted]) -> Iterator[Wanted]:
        for each in wanted:
            for piece in chunks(each.piece, self._groups[each.group], self._slot_bytes):
                yield each._replace(piece=piece)

    def _ask(self, engine: int, ask: Ask) -> None:
        connection = self._connection(engine)
        try:
            connection.send(ask)
        except OSError as error:
            raise NotSharedError(_gone(engine)) from error

    def _take(self, copy: Copy, target: Layout, engine: int, ask: Ask) -> None:
        """Copy out of a slot what an engine has been asked for, once it is there."""
        self._await(engine, self._connections[engine])
        assert self._region is not None
        slot = self._region.slots[ask.slot]
        portion = scattered(ask, self._groups[ask.group], target, slot.memory, self._own)
        copy([portion], slot.table)()

    def _await(self, engine: int, connection: "Connection[object, str]") -> None:
        try:
            if not connection.poll(self._patience):
                raise NotSharedError(f"engine {engine} did not copy its KV in time")
            problem = connection.recv()
        except (EOFError, OSError) as error:
            raise NotSharedError(_gone(engine)) from error
        if problem:
            raise NotSharedError(problem)

    def _connection(self, engine: int) -> "Connection[object, str]":
        if engine not in self._connections:
            offer = self._offer()
            try:
                connection = Client(address_of(self._directory, engine), "AF_UNIX")
                self._connections[engine] = connection
                connection.send(offer)
            except OSError as error:
                raise NotSharedError(_gone(engine)) from error
            self._await(engine, connection)
        return self._connections[engine]

    def _offer(self) -> Offer:
        """Return what lets other engines map the region, which exists from now on."""
        if self._raw is None:
            self._raw = self._memory.allocate(region_bytes(self._slot_bytes))
            self._region = Region(HeldBuffer(self._raw), self._slot_bytes, self._pins)
        return Offer(os.getpid(), self._memory.handle(self._raw), self._slot_bytes)

    def _forget_ended(self, engines: Iterable[int]) -> None:
        """Forget the connections to these engines that have ended; they may have been restarted."""
        for engine in engines:
            connection = self._connections.get(engine)
            # Nothing was asked, so there is nothing to be read but an end.
            if connection is not None and connection.poll(0):
                self._connections.pop(engine).close()

    @contextmanager
    def _given_up_on_failure(self) -> Iterator[None]:
        try:
            yield
        except NotSharedError:
            self.close()
            raise

    def close(self) -> None:
        """Give up the region and all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._region is not None:
            self._region.close()
        if self._raw is not None:
            self._memory.release(self._raw)
        self._region = self._raw = None


def _gone(engine: int) -> str:
    return f"the runner of engine {engine} has ended"


class StagedReader:
    """Reads KV through memory of the host, for one engine.

    Args:
        lane: makes a lane.
        reaches: whether this engine's device can read an engine's memory itself.
        clock: a monotonic clock.
    """

    def __init__(
        self,
        lane: Callable[[], Lane],
        reaches: Callable[[int], bool],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        # What goes on beside steps takes its time, and what steps wait for must not wait for it.
        self._lanes = {False: lane(), True: (beside := lane())}
        self._reaches, self._clock = reaches, clock
        self._unmapped: set[int] = set()
        self._beside = ThreadPoolExecutor(1, "staged-reader", beside.enter)

    def connect(self, engine: int) -> None:
        """Read an engine this way from now on.

        Raises:
            NotSharedError: that cannot be done either.
        """
        self._unmapped.add(engine)
        for lane in self._lanes.values():
            lane.connect(engine)

    def serves(self, engine: int) -> bool:
        """Return whether an engine is read this way."""
        return engine in self._unmapped or not self._reaches(engine)

    def read(
        self, copy: Copy, source: Layout, target: Layout, wanted: Sequence[Wanted], *, beside: bool
    ) -> Callable[[], float]:
        """Read KV: now, or if ``beside``, in a thread.

        Args:
            copy: see ``Lane.read``, as the next three.
            source: the layout of the unit that has the KV.
            target: the layout of the reader's unit.
            wanted: what to read.
            beside: whether the caller goes on meanwhile.

        Returns:
            Waits until all is read; returns the seconds that took, and raises what this does.

        Raises:
            NotSharedError: an engine has ended, or is late.
        """
        lane = self._lanes[beside]

        def read() -> float:
            began = self._clock()
            lane.read(copy, source, target, wanted)
            return self._clock() - began

        if beside:
            return self._beside.submit(read).result
        seconds = read()
        return lambda: seconds
