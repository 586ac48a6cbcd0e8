"""What a fake core does for pre-copies: it pins blocks, reserves some, and lets members read.

As in the real engines (``blocks_ahead.py``), what was read is in the prefix cache, where its
request finds it later. Reading takes its time beside the steps. Blocks that are written to before
they were read, and blocks that are used before something was read into them, give wrong tokens, as
on a device.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler
from shoal.runtime.engine.fake.step_times import Devices
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest

Physical = Callable[[Sequence[int]], Mapping[int, list[int]]]
"""Turns block ids of a core into the ids of each member."""


class Reservation(msgspec.Struct):
    """The blocks of a request's first tokens, which it has filled elsewhere; all are held."""

    request: FakeRequest
    blocks: list[int]
    begin: int
    """The first that is read into: those before it are cached, or reserved for another request."""
    is_seen: bool
    """Whether this process knows what the source has; else that is taken to be right."""
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
        scheduler: the core's.
        physical: what backs its blocks.
    """

    def __init__(
        self,
        unit: Unit,
        block_tokens: int,
        settings: FakeSettings,
        devices: Devices,
        scheduler: FakeScheduler,
        physical: Physical,
    ) -> None:
        self._unit = unit
        self._size = block_tokens
        self._settings = settings
        self._devices = devices
        self._memory = devices.memory
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._physical = physical
        self._pins: dict[int, list[int]] = {}
        self._taken: defaultdict[int, int] = defaultdict(int)
        """How many free blocks each carry holds of requests that have ended."""
        self._reserved: dict[tuple[int, str], Reservation] = {}
        self._by_hash: dict[int, dict[bytes, int]] = {}
        """Blocks that are reserved for each carry, by what will be cached in them."""
        self._reading: list[Reading] = []

    # --- as the source ------------------------------------------------------------------------

    def pin(self, carry: int, request_ids: Collection[str]) -> list[CarriedRequest]:
        """See ``Core.pin``."""
        pinned = list[CarriedRequest]()
        for request in self._scheduler.requests:
            blocks = request.blocks[: request.computed // self._size]
            if request.id in request_ids and blocks and not request.is_unsure:
                self._pool.hold(blocks)
                self._pins.setdefault(carry, []).extend(reversed(blocks))
                pinned.append(self._describe(request, blocks))
        return pinned

    def pin_cached(
        self, carry: int, ended: Mapping[str, FakeRequest | None], room: int
    ) -> list[CarriedRequest]:
        """Do the same with what is cached of requests that have ended, by new names.

        A step in flight may be about to write what is cached already.

        Args:
            carry: the carry.
            ended: the requests.
            room: how many free blocks may be held for these in all calls.
        """
        pinned = list[CarriedRequest]()
        unsure = {
            block
            for other in self._scheduler.requests
            for block in other.blocks[other.computed // self._size :]
        }
        for name, request in ended.items():
            if request is None or not self._scheduler.looks_up(request):
                continue
            found = self._pool.find(request.prefixes(self._size))
            blocks = list(takewhile(lambda block: block not in unsure, found))
            free = self._pool.unheld(blocks)
            if blocks and self._taken[carry] + free <= room:
                self._taken[carry] += free
                self._pool.hold(blocks)
                self._pins.setdefault(carry, []).extend(reversed(blocks))
                pinned.append(self._describe(request, blocks).as_prefix(name))
        return pinned

    def _describe(self, request: FakeRequest, blocks: list[int]) -> CarriedRequest:
        tokens, computed = list(request.generated), len(blocks) * self._size
        ids = {engine: [of] for engine, of in self._physical(blocks).items()}
        return CarriedRequest(request.id, tokens, computed, ids, request.tokens)

    def unpin(self, carry: int) -> None:
        """See ``Core.unpin``."""
        self._pool.give(self._pins.pop(carry, []))
        self._taken.pop(carry, None)

    # --- as the destination -------------------------------------------------------------------

    def reserve(
        self, carry: int, requests: Iterable[tuple[FakeRequest, CarriedRequest]]
    ) -> list[AheadRequest]:
        """See ``Core.reserve``; the requests are expected."""
        by_hash, taken = self._by_hash.setdefault(carry, {}), list[AheadRequest]()
        for request, carried in sorted(requests, key=lambda each: -each[1].computed):
            reserved = self._reserve(request, carried, by_hash)
            if reserved is None:
                continue
            self._reserved[carry, request.id] = reserved
            begin, end = reserved.begin * self._size, len(reserved.blocks) * self._size
            if begin < end:
                target = {engine: [ids] for engine, ids in self._physical(reserved.blocks).items()}
                taken.append(AheadRequest(request.id, begin, end, carried.blocks, target))
        return taken

    def _reserve(
        self, request: FakeRequest, carried: CarriedRequest, by_hash: dict[bytes, int]
    ) -> Reservation | None:
        """Hold all blocks for what a request has filled, or none.

        Args:
            request: the request.
            carried: what the source has pinned of it.
            by_hash: blocks that are reserved for the same carry, by what will be cached in them.
        """
        if not self._scheduler.looks_up(request):
            return None
        request.extend(carried.tokens[len(request.generated) :])
        hashes = request.prefixes(self._size)[: carried.computed // self._size]
        blocks = self._pool.find(hashes)
        blocks += map(by_hash.__getitem__, takewhile(by_hash.__contains__, hashes[len(blocks) :]))
        begin, lacking = len(blocks), len(hashes) - len(blocks)
        if not hashes or lacking + self._pool.unheld(blocks) > len(self._pool):
            return None
        self._pool.hold(blocks)
        blocks += self._pool.take(lacking)
        by_hash.update(zip(hashes, blocks, strict=True))
        known = self._memory.knows(carried.blocks)
        return Reservation(request, blocks, begin, known, is_wanted=not carried.is_prefix)

    def settle(self, carry: int, *, copied: bool) -> None:
        """See ``Core.settle``."""
        self._by_hash.pop(carry, None)
        for key, reserved in list(self._reserved.items()):
            if key[0] == carry and not reserved.is_settled:
                reserved.is_settled = True
                if copied:
                    self._cache(reserved)
                if not (copied and reserved.is_wanted):
                    self._free(key)

    def _cache(self, reserved: Reservation) -> None:
        request, blocks, begin = reserved.request, reserved.blocks, reserved.begin
        self._scheduler.cache(request, blocks, begin)
        if not reserved.is_seen:
            read = self._physical(blocks[begin:])
            self._memory.write(self._unit, request, begin, read, self._size)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Let go of the blocks of requests that have come, or do not come.

        Those that are read into are kept until that is settled.
        """
        gone = set(request_ids)
        for key, reservation in list(self._reserved.items()):
            if key[1] in gone:
                reservation.is_wanted = False
                if reservation.is_settled:
                    self._free(key)

    def _free(self, key: tuple[int, str]) -> None:
        self._pool.give(reversed(self._reserved.pop(key).blocks))

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
        # While one portion of a carry is read, the next is prepared.
        is_first = all(reading.carry != carry for reading in self._reading)
        seconds = size / (settings.peer_bytes_per_second * links) + is_first * settings.copy_seconds
        self._devices.cut(self._unit, now)
        start = max(self._devices.free_at(self._unit, now), *(r.due for r in self._reading), now)
        before = {
            (engine, block): self._memory.content(engine, block)
            for request in requests
            for engine in readers
            for block in _read_into(request, engine)
        }
        share = size * len(readers) // target.size
        due = start + seconds
        reading = Reading(carry, target, requests, before, share, seconds, due)
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
        readers = set(self._unit.engines).intersection(reading.target.engines)
        blocks = {engine: _read_into(request, engine) for engine in readers}
        for engine, ids in blocks.items():
            for block in ids:
                content = self._memory.content(engine, block)
                if content is not None and content is not reading.before[engine, block]:
                    content[0].spoil()
        self._memory.copy(source, blocks, request.begin, request.end)

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


def _read_into(request: AheadRequest, engine: int) -> list[int]:
    """Return the blocks of an engine that something is read into: those before it are there."""
    (blocks,) = request.target[engine]
    return blocks[len(blocks) * request.begin // request.end :]
