"""Reads the KV of requests from the engines that have it into the blocks of the unit that takes it.

Every member reads by itself what its own blocks are to hold: nothing is sent.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.kv import host_copy
from shoal.runtime.engine.kv.carry_plan import Piece, pieces
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages, Page
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.link.instructions import Arrival, Copied


class Portion(NamedTuple):
    """The pieces of one KV group, and what is needed to copy them."""

    group: int
    pages: KvPages
    insides: tuple[Page, Page]
    """Of the source's pages, and of the target's."""
    pieces: Sequence[tuple[Piece, Mapped]]
    """Each with the buffer that it is read from."""

    @property
    def bytes(self) -> int:
        """Bytes that are read."""
        each = len(self.pages.layers) * self.pages.token_bytes
        return sum(piece.tokens * piece.strip.heads * each for piece, _ in self.pieces)


class Copier(Protocol):
    """Copies KV from mapped buffers to the engine's own."""

    def copy(self, portions: Sequence[Portion], *, beside: bool = False) -> Callable[[], float]:
        """Begin to copy, after all work that the device was given before.

        Args:
            portions: what to copy.
            beside: whether work that the device is given later need not wait for it. Otherwise
                such work finds the KV.

        Returns:
            Waits until the device has copied all; returns the seconds that took.
        """

    def settle(self) -> None:
        """Wait until the device has copied all that it was told to, from any thread."""


class HostCopier:
    """Copies on CPUs, where a call returns once the work is done.

    Args:
        own: the engine's own buffer.
        order: from a KV group and a page of it to where the elements of each token are
            (``host_copy.copy``).
        clock: a monotonic clock.
    """

    def __init__(
        self,
        own: HeldBuffer,
        order: Callable[[int, Page], torch.Tensor],
        clock: Clock = time.monotonic,
    ) -> None:
        self._own, self._order, self._clock = own, order, clock

    def copy(self, portions: Sequence[Portion], *, beside: bool = False) -> Callable[[], float]:
        """See ``Copier.copy``; nothing is done beside it."""
        began = self._clock()
        for portion in portions:
            source, target = portion.insides
            orders = (self._order(portion.group, source), self._order(portion.group, target))
            for piece, mapped in portion.pieces:
                assert isinstance(mapped, HeldBuffer)
                host_copy.copy(
                    self._own.bytes, mapped.bytes, portion.pages, piece, portion.insides, orders
                )
        seconds = self._clock() - began
        return lambda: seconds

    def settle(self) -> None:
        """See ``Copier.settle``: a copy is over when ``copy`` returns."""


class KvReader:
    """Reads KV for one engine.

    Args:
        engine: the engine.
        max_sp: the node's largest SP degree.
        groups: the pages of each KV group.
        own: the engine's own buffer.
        peers: those of the others.
        copier: copies between them.
    """

    def __init__(
        self,
        engine: int,
        max_sp: int,
        groups: Sequence[KvPages],
        own: Mapped,
        peers: PeerBuffers,
        copier: Copier,
    ) -> None:
        self._engine, self._max_sp, self._groups = engine, max_sp, groups
        self._own, self._peers, self._copier = own, peers, copier

    def read(
        self, source: Unit, target: Unit, requests: Sequence[Arrival], *, beside: bool = False
    ) -> Callable[[], Copied]:
        """Begin to read the KV of requests.

        Args:
            source: the unit that has the KV.
            target: the unit that takes it.
            requests: the requests.
            beside: see ``Copier.copy``.

        Returns:
            Waits until all is read, and says what was done.

        Raises:
            NotSharedError: the memory of an engine cannot be read. Nothing was copied.
        """
        with self._peers.reading():
            portions = [
                self._portion(index, pages, source, target, requests)
                for index, pages in enumerate(self._groups)
            ]
            wait = self._copier.copy(portions, beside=beside)
        size = sum(portion.bytes for portion in portions)
        return lambda: Copied(size, wait())

    def _portion(
        self, index: int, pages: KvPages, source: Unit, target: Unit, requests: Sequence[Arrival]
    ) -> Portion:
        found = pieces(source, target, self._engine, requests, index, pages, self._max_sp)
        insides = (pages.page(source.layout), pages.page(target.layout))
        return Portion(index, pages, insides, [(p, self._buffer(p.strip.engine)) for p in found])

    def _buffer(self, engine: int) -> Mapped:
        return self._own if engine == self._engine else self._peers.buffer(engine)
