"""The copies of KV that a fake core makes, for requests that are carried to it."""

from typing import NamedTuple

from shoal.policies.values.layouts import Unit
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.fake.fake_kv import memory_of
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.step_times import Devices, DeviceStep
from shoal.runtime.protocol.messages import CarriedRequest


class Arriving(NamedTuple):
    """A request that is carried to a core with its KV."""

    request: FakeRequest
    carried: CarriedRequest
    source: Unit
    """The unit whose members have the KV."""
    begin: int
    """The first token whose KV is read: those before it were cached where it goes."""


class Copy(DeviceStep, kw_only=True):
    """A copy of the KV of requests, on the devices of the unit that reads it."""

    requests: list[Arriving]
    bytes: int


class FakeCopies:
    """The copies that one core makes.

    Args:
        unit: the core's.
        settings: tells how long a copy takes.
        devices: the node's, as far as this process knows them.
    """

    def __init__(self, unit: Unit, settings: FakeSettings, devices: Devices) -> None:
        self._unit = unit
        self._settings = settings
        self._devices = devices
        self._memory = devices.memory
        self._adopted: list[Arriving] = []
        self._in_flight: list[Copy] = []
        self._ended: list[Copied] = []

    def adopt(self, request: Arriving) -> None:
        """Have the next copy read the KV of a request."""
        self._adopted.append(request)

    def start(self, now: float) -> None:
        """Queue a copy of what was adopted since the last call, if that is anything."""
        requests, self._adopted = self._adopted, []
        if not requests:
            return
        settings = self._settings
        tokens = sum(max(0, one.carried.computed - one.begin) for one in requests)
        size = settings.token_bytes * tokens
        if all(one.source.tier for one in requests):
            seconds = settings.copy_seconds + size / (
                settings.tier_bytes_per_second * len(self._unit.engines)
            )
        else:
            links = min(len(self._unit.engines), *(len(one.carried.blocks) for one in requests))
            seconds = settings.copy_seconds + size / (settings.peer_bytes_per_second * links)
        copy = Copy(seconds=seconds, requests=requests, bytes=size)
        self._devices.cut(self._unit, now)
        self._devices.queue(self._unit, copy, now)
        self._in_flight.append(copy)

    def end(self, now: float) -> None:
        """End the copies that are due: what they have read is in the requests' blocks now."""
        while self._in_flight and self._in_flight[0].due <= now:
            copy = self._in_flight.pop(0)
            for request, carried, source, _ in copy.requests:
                blocks = {memory_of(source, of): ids for of, (ids,) in carried.blocks.items()}
                seen = self._memory.knows((*self._unit.engines, *blocks))
                if seen and not self._memory.holds(request, carried.computed, blocks, source):
                    request.spoil()
                request.is_unsure = False
            ids = [one.request.id for one in copy.requests]
            self._ended.append(Copied(ids, copy.bytes, copy.seconds))

    def take(self) -> list[Copied]:
        """Return the copies that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._ended)

    @property
    def due(self) -> float | None:
        """Clock time at which the next copy ends; None: none is in flight."""
        return self._in_flight[0].due if self._in_flight else None
