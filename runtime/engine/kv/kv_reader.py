"""Reads the KV of requests from the engines that have it into the blocks of the unit that takes it.

Every member reads by itself what its own blocks are to hold: nothing is sent. Where a device cannot
read the memory of another one, the KV goes through memory of the host (``staged_reader.py``).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.carry_plan import Piece, pieces
from shoal.runtime.engine.kv.kv_memory import Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.kv.portions import Copier, Portion
from shoal.runtime.engine.kv.staged_reader import StagedReader, Wanted
from shoal.runtime.engine.kv.tier_memory import Tiers
from shoal.runtime.engine.link.instructions import Arrival, Copied

Plan = Sequence[Sequence[Piece]]
"""What a member reads, for each KV group."""


class KvReader:
    """Reads KV for one engine.

    Args:
        engine: the engine.
        max_sp: the node's largest SP degree.
        groups: the pages of each KV group.
        own: the engine's own buffer.
        peers: those of the others.
        copier: copies between them.
        staged: reads the engines whose buffers cannot be mapped; None: there are none.
        tiers: the tiers of the node's engines; None: they have none.
    """

    def __init__(
        self,
        engine: int,
        max_sp: int,
        groups: Sequence[KvPages],
        own: Mapped,
        peers: PeerBuffers,
        copier: Copier,
        staged: StagedReader | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._engine, self._max_sp, self._groups = engine, max_sp, groups
        self._own, self._peers, self._copier = own, peers, copier
        self._staged, self._tiers = staged, tiers

    def plan(self, source: Unit, target: Unit, requests: Sequence[Arrival]) -> Plan:
        """Return what is to be read of requests, from which engines and to where.

        This takes most of the host's time of a copy, and touches no memory of the device.

        Args:
            source: the unit that has the KV.
            target: the unit that takes it.
            requests: the requests.
        """
        return [
            pieces(
                *(source, target, self._engine, requests, index),
                self._pages(target, index),
                self._max_sp,
                self._pages(source, index),
            )
            for index in range(len(self._groups))
        ]

    def read(
        self,
        source: Unit,
        target: Unit,
        requests: Sequence[Arrival],
        *,
        beside: bool = False,
        plan: Plan | None = None,
    ) -> Callable[[], Copied]:
        """Begin to read the KV of requests.

        Args:
            source: the unit that has the KV.
            target: the unit that takes it.
            requests: the requests.
            beside: whether work that the device is given later need not wait for it.
            plan: what ``plan`` has returned for these; None: it is found out now.

        Returns:
            Waits until all is read, and says what was done.

        Raises:
            NotSharedError: the memory of an engine cannot be read. Nothing of use was copied.
        """
        copy = self._copier.after_steps(beside=beside)
        wanted = list[Wanted]()
        with self._peers.reading(), self._tiers.reading() if self._tiers else nullcontext():
            portions = [
                portion
                for index, of_group in enumerate(plan or self.plan(source, target, requests))
                for portion in self._portions(index, source, target, of_group, wanted)
            ]
            direct = copy(portions)
        of_peers, of_host = sum(portion.bytes for portion in portions), self._bytes(wanted)
        staged = None
        if self._staged is not None and wanted:
            layouts = source.layout, target.layout
            staged = self._staged.read(copy, *layouts, wanted, beside=beside)

        def wait() -> Copied:
            seconds = direct()
            try:
                seconds = max(seconds, staged() if staged is not None else 0.0)
            except NotSharedError as error:
                return Copied(0, 0.0, str(error))
            return Copied(of_peers + of_host, seconds, host_bytes=of_host)

        return wait

    def _portions(
        self,
        index: int,
        source: Unit,
        target: Unit,
        planned: Sequence[Piece],
        wanted: list[Wanted],
    ) -> list[Portion]:
        """Return what is read from buffers of one KV group; put the rest into ``wanted``."""
        found = dict[range, list[tuple[Piece, Mapped]]]()
        held, pages = self._pages(source, index), self._pages(target, index)
        for piece in planned:
            engine, is_far = piece.strip.engine, not source.tier
            if is_far and engine != self._engine and self._is_staged(engine):
                wanted.append(Wanted(engine, index, piece))
            else:
                buffer = self._memory(source, engine)
                found.setdefault(piece.strip.layers, []).append((piece, buffer))
        return [
            Portion(
                index,
                pages.token_bytes,
                held.side(source.layout, layers)._replace(packed=source.tier),
                pages.side(target.layout, layers)._replace(packed=target.tier),
                of_layers,
                self._memory(target, self._engine),
            )
            for layers, of_layers in found.items()
        ]

    def _pages(self, unit: Unit, index: int) -> KvPages:
        """Return the pages of a KV group where a unit has it."""
        if not unit.tier:
            return self._groups[index]
        assert self._tiers is not None
        return self._tiers.pages[index]

    def _memory(self, unit: Unit, engine: int) -> Mapped:
        """Return where a unit has its KV on an engine."""
        if unit.tier:
            assert self._tiers is not None
            return self._tiers.memory(engine)
        return self._own if engine == self._engine else self._peers.buffer(engine)

    def _is_staged(self, engine: int) -> bool:
        return self._staged is not None and self._staged.serves(engine)

    def _bytes(self, wanted: Sequence[Wanted]) -> int:
        return sum(each.piece.size(self._groups[each.group].token_bytes) for each in wanted)
