"""Reads the KV of requests from the engines that have it into the blocks of the unit that takes it.

Every member reads by itself what its own blocks are to hold: nothing is sent. Where a device cannot
read the memory of another one, the KV goes through memory of the host (``staged_reader.py``).
"""

from collections.abc import Callable, Sequence

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.carry_plan import Piece, pieces
from shoal.runtime.engine.kv.kv_memory import Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.kv.portions import Copier, Portion
from shoal.runtime.engine.kv.staged_reader import StagedReader, Wanted
from shoal.runtime.engine.link.instructions import Arrival, Copied


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
    ) -> None:
        self._engine, self._max_sp, self._groups = engine, max_sp, groups
        self._own, self._peers, self._copier = own, peers, copier
        self._staged = staged

    def read(
        self, source: Unit, target: Unit, requests: Sequence[Arrival], *, beside: bool = False
    ) -> Callable[[], Copied]:
        """Begin to read the KV of requests.

        Args:
            source: the unit that has the KV.
            target: the unit that takes it.
            requests: the requests.
            beside: whether work that the device is given later need not wait for it.

        Returns:
            Waits until all is read, and says what was done.

        Raises:
            NotSharedError: the memory of an engine cannot be read. Nothing of use was copied.
        """
        copy = self._copier.after_steps(beside=beside)
        wanted = list[Wanted]()
        with self._peers.reading():
            portions = [
                portion
                for index, pages in enumerate(self._groups)
                for portion in self._portions(index, pages, source, target, requests, wanted)
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
        pages: KvPages,
        source: Unit,
        target: Unit,
        requests: Sequence[Arrival],
        wanted: list[Wanted],
    ) -> list[Portion]:
        """Return what is read from buffers of one KV group; put the rest into ``wanted``."""
        found = dict[range, list[tuple[Piece, Mapped]]]()
        for piece in pieces(source, target, self._engine, requests, index, pages, self._max_sp):
            engine = piece.strip.engine
            if engine == self._engine:
                found.setdefault(piece.strip.layers, []).append((piece, self._own))
            elif self._staged is not None and self._staged.serves(engine):
                wanted.append(Wanted(engine, index, piece))
            else:
                buffer = self._peers.buffer(engine)
                found.setdefault(piece.strip.layers, []).append((piece, buffer))
        return [
            Portion(
                index,
                pages.token_bytes,
                pages.side(source.layout, layers),
                pages.side(target.layout, layers),
                of_layers,
                self._own,
            )
            for layers, of_layers in found.items()
        ]

    def _bytes(self, wanted: Sequence[Wanted]) -> int:
        return sum(each.piece.size(self._groups[each.group].token_bytes) for each in wanted)
