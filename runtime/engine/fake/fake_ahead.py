"""What a fake core does for pre-copies: it pins blocks, reserves some, and lets members read.

Reading takes its time beside the steps. Blocks that are written to before they were read, and
blocks that are used before something was read into them, give wrong tokens, as on a device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.interface import Copied
from shoal.runtime.engine.fake.fake_kv import first_tokens
from shoal.runtime.engine.fake.fake_scheduler import BlockIds, FakeRequest
from shoal.runtime.engine.fake.step_times import Devices
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest

Physical = Callable[[Sequence[int]], Mapping[int, list[int]]]
"""Turns block ids of a core into the ids of each member."""


class Reservation(msgspec.Struct):
    """Blocks of a core for what a request has filled elsewhere."""

    blocks: list[int]
    is_settled: bool = False
    is_wanted: bool = True
    """Whether the request is still expected."""


class Reading(msgspec.Struct):
    """What members of a unit read beside its steps."""

    carry: int
    target: Unit
    requests: Sequence[AheadRequest]
    before: dict[tuple[int, int], Any]
    """What the memory said of each block that is read into, by engine and block."""
    bytes: int
    seconds: float
    due: float


class FakeAhead:
    """The part of one core in pre-copies.

    Args:
        unit: the core's.
        block_tokens: tokens of each of its blocks.
        settings: tells how long reading takes.
        devices: the node's, as far as this process knows them.
        pool: the core's free blocks.
        physical: what backs its blocks.
    """

    def __init__(
        self,
        unit: Unit,
        block_tokens: int,
        settings: FakeSettings,
        devices: Devices,
        pool: BlockIds,
        physical: Physical,
    ) -> None:
        self._unit = unit
        self._size = block_tokens
        self._settings = settings
        self._devices = devices
        self._memory = devices.memory
        self._sealed = devices.sealed
        self._pool = pool
        self._physical = physical
        self._pins: dict[int, list[int]] = {}
        self._reserved: dict[tuple[int, str], Reservation] = {}
        self._reading: list[Reading] = []

    # --- as the source ------------------------------------------------------------------------

    def pin(self, carry: int, requests: Iterable[FakeRequest]) -> list[CarriedRequest]:
        """See ``Core.pin``."""
        pinned, held = list[CarriedRequest](), self._pins.setdefault(carry, [])
        for request in requests:
            blocks = request.blocks[: request.computed // self._size]
            if blocks:
                self._pool.hold(blocks)
                held += blocks
                pinned.append(self._describe(request, blocks))
        return pinned

    def _describe(self, request: FakeRequest, blocks: list[int]) -> CarriedRequest:
        physical = self._physical(blocks)
        self._sealed.seal(request, physical, self._size)
        tokens, computed = list(request.generated), len(blocks) * self._size
        ids = {engine: [of] for engine, of in physical.items()}
        return CarriedRequest(request.id, tokens, computed, ids, request.tokens)

    def unpin(self, carry: int) -> None:
        """See ``Core.unpin``."""
        self._pool.give(self._pins.pop(carry, []))

    # --- as the destination -------------------------------------------------------------------

    def reserve(self, carry: int, requests: Iterable[CarriedRequest]) -> list[AheadRequest]:
        """See ``Core.reserve``; the requests are expected."""
        taken = []
        for request in sorted(requests, key=lambda each: -each.computed):
            count = request.computed // self._size
            if count and count <= len(self._pool):
                blocks = self._pool.take(count)
                self._reserved[carry, request.request_id] = Reservation(blocks)
                target = {engine: [ids] for engine, ids in self._physical(blocks).items()}
                end = count * self._size
                taken.append(AheadRequest(request.request_id, 0, end, request.blocks, target))
        return taken

    def settle(self, carry: int, *, copied: bool) -> None:
        """See ``Core.settle``."""
        for key, reservation in list(self._reserved.items()):
            if key[0] == carry:
                reservation.is_settled = True
                if not (copied and reservation.is_wanted):
                    self._free(key)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Take note that requests do not come; blocks that are read into are kept until then."""
        gone = set(request_ids)
        for key, reservation in list(self._reserved.items()):
            if key[1] in gone:
                reservation.is_wanted = False
                if reservation.is_settled:
                    self._free(key)

    def _free(self, key: tuple[int, str]) -> None:
        self._pool.give(self._reserved.pop(key).blocks)

    def _ready(self, request_id: str) -> tuple[int, str] | None:
        for key, reservation in self._reserved.items():
            if key[1] == request_id and reservation.is_settled:
                return key
        return None

    def blocks_of(self, request_id: str) -> list[int]:
        """Return the blocks that hold the beginning of a request that comes now."""
        key = self._ready(request_id)
        return [] if key is None else list(self._reserved[key].blocks)

    def take(self, request: FakeRequest, source: Unit) -> None:
        """Let a request have these blocks, which it holds by now. Wrong ones make it wrong."""
        key = self._ready(request.id)
        if key is None:
            return
        blocks = self._reserved.pop(key).blocks
        tokens = len(blocks) * self._size
        if not self._memory.knows((*self._unit.engines, *source.engines)):
            return
        for engine, ids in self._physical(blocks).items():
            if not self._sealed.hold(request.id, tokens, engine, ids):
                request.spoil()
                return
            writer = self._sealed.writer(engine, ids[0])
            if first_tokens(writer, tokens) != first_tokens(request, tokens):
                request.spoil()
                return

    # --- as a unit whose members read ---------------------------------------------------------

    def read(
        self,
        carry: int,
        source: Unit,
        target: Unit,
        requests: Sequence[AheadRequest],
        now: float,
    ) -> None:
        """See ``Core.copy_ahead``: members read when their steps in flight have ended."""
        settings, readers = self._settings, set(self._unit.engines).intersection(target.engines)
        size = settings.token_bytes * sum(each.end - each.begin for each in requests)
        links = min(source.size, target.size)
        seconds = settings.copy_seconds + size / (settings.peer_bytes_per_second * links)
        self._devices.cut(self._unit, now)
        start = max(self._devices.free_at(self._unit, now), *(r.due for r in self._reading), now)
        before = {
            (engine, block): self._memory.content(engine, block)
            for request in requests
            for engine in readers
            for block in request.target[engine][0]
        }
        share = size * len(readers) // target.size
        reading = Reading(carry, target, requests, before, share, seconds, start + seconds)
        self._reading.append(reading)

    def ended(self, now: float) -> list[tuple[int, Copied]]:
        """See ``Core.copied_ahead``."""
        ended = [reading for reading in self._reading if reading.due <= now]
        self._reading = [reading for reading in self._reading if reading.due > now]
        for reading in ended:
            for request in reading.requests:
                self._finish(reading, request)
        return [
            (one.carry, Copied([r.request_id for r in one.requests], one.bytes, one.seconds))
            for one in ended
        ]

    def _finish(self, reading: Reading, request: AheadRequest) -> None:
        """Let what was read be in the blocks, and not what others have written there meanwhile."""
        source = {engine: ids for engine, (ids,) in request.source.items()}
        if not self._memory.knows((*source, *reading.target.engines)):
            return
        is_there = all(
            self._sealed.hold(request.request_id, request.end, engine, ids)
            for engine, ids in source.items()
        )
        for engine in set(self._unit.engines).intersection(reading.target.engines):
            (blocks,) = request.target[engine]
            for block in blocks:
                content = self._memory.content(engine, block)
                if content is not None and content is not reading.before[engine, block]:
                    content[0].spoil()
            if is_there:
                other, ids = next(iter(source.items()))
                writer = self._sealed.writer(other, ids[0])
                self._memory.write(writer, 0, {engine: blocks})
                self._sealed.seal(writer, {engine: blocks}, request.end // len(blocks))

    # --- figures ------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        """Clock time at which the next reading ends; None: nobody reads."""
        return min((reading.due for reading in self._reading), default=None)

    @property
    def held(self) -> list[int]:
        """The block ids that are pinned or reserved."""
        pinned = [block for blocks in self._pins.values() for block in blocks]
        return pinned + [block for one in self._reserved.values() for block in one.blocks]

    def check_integrity(self) -> list[str]:
        """Return one line per carry that holds blocks, which none does while nobody is carried."""
        engines = self._unit.engines
        carries = {carry for carry, _ in self._reserved}
        return [
            *(f"core {engines}: blocks are pinned for carry {carry}" for carry in self._pins),
            *(f"core {engines}: blocks are reserved for carry {carry}" for carry in carries),
            *(f"core {engines}: members read for carry {r.carry}" for r in self._reading),
        ]
