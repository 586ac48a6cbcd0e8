"""Which units background requests get while people use the node.

Every unit that background requests have makes people's requests a little later, because these share
the others (``shoal.policies.crowding``). People may lose a fixed share of their time in this way
(``TTFT_SHARE``, ``TPOT_SHARE``), and an account keeps what they have not lost so far. What all of
them may lose for one of their requests is the account's unit. Each request that comes adds one, and
takes what it loses by the units that it does not have, in the crowd that it finds. A request that
comes to a unit where only background requests run waits for their steps, and this is taken, too.

Background requests have a unit that costs less than the share as long as the account is hardly
overdrawn. They have another one for a part of the time: as long as the account lasts. When people's
requests begin to queue for prompts, or a crowd of them comes, they leave a unit at once. The only
unit of a node is theirs while nobody else is there, if the account can pay for the wait of the next
request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.policies.crowding import Crowding, Load
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Unit
from shoal.policies.values.snapshot import PoolRequest, Snapshot
from shoal.runtime.controller.requests.people_load import PeopleLoad

TTFT_SHARE = 0.03
"""Share by which the mean TTFT of people's requests may grow."""
TPOT_SHARE = 0.02
"""The same for their mean TPOT. The 90th percentile grows by about twice as much."""
HOLD_SECONDS = 10.0
"""A unit is given to background requests when the account lasts for at least so long, and no
earlier than so long after one was given back to a crowd."""
START = 10.0
"""Requests that the account has at first, and for which it must last when a unit is given. By as
many it may be overdrawn while background requests have only units that cost less than the share."""
SAVED_SECONDS = 60.0
"""Most that the account keeps: what people may lose in so many seconds, and ``SAVED``."""
SAVED = 200.0
"""The same in requests."""
OVERDRAWN = 50.0
"""Requests by which the account may be overdrawn."""
CROWDED = 6.0
"""In a burst a request loses at least so many times what it may lose, and twice what is usual."""
SEEMING = 8
"""Requests that a spared unit seems to have. A policy also counts the requests that wait for a
prompt, so it takes several to outweigh one that is really there."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who is on a unit."""

    unit: Unit
    people: int
    background: int
    wait: float = 0.0
    """Seconds for which a person's request would wait here if only background requests were here:
    as many as the unit has room for. It is needed of a node's only unit."""
    waited: float = 0.0
    """Seconds for which one that has just come waits for those that really are here."""
    queued: float = 0.0
    """Seconds for which one that has just come waits for the prompts of others of people's."""


class SparedUnits:
    """Keeps the account, and chooses the units."""

    def __init__(self) -> None:
        self.units: frozenset[Unit] = frozenset()
        """Those that background requests may have, whether or not people are still there."""
        self._account = START
        """For how many requests people have not lost what they may lose."""
        self._people = PeopleLoad()
        self._crowded_at = -math.inf
        """When a unit was last given back to a crowd."""

    def see(
        self,
        snapshot: Snapshot,
        units: Sequence[Occupancy],
        arrived: Sequence[PoolRequest],
        *,
        needed: bool,
    ) -> None:
        """Note what has come since the last call, and choose the units anew.

        Args:
            snapshot: the node.
            units: the units that serve.
            arrived: people's requests since the last call.
            needed: whether there are background requests.
        """
        people = self._people
        people.pass_to(snapshot.now)
        found = people.found(snapshot)
        people.arrive(arrived)
        people.run(sum(one.people for one in units))
        if not units or not needed:
            self._account = max(self._account, min(START, self._account + len(arrived)))
            self.units = frozenset()
            return
        kept = sum(one.unit in self.units for one in units)
        costs = self._costs(snapshot, units, found)
        queued = sum(one.queued for one in units) if kept and len(units) > 1 else 0.0
        waited = sum(one.waited for one in units) + queued
        lost = self._cost_of_wait(snapshot, units, waited)
        self._take(snapshot, len(arrived) * (1 - costs[min(kept, len(costs) - 1)]) - lost)
        if people.is_unused:
            count = len(units)
        elif len(units) == 1:
            count = self._of_one(snapshot, units)
        else:
            load = people.usual(snapshot)
            usual = self._costs(snapshot, units, load)
            holds = snapshot.now - self._crowded_at < HOLD_SECONDS
            count = self._count(usual, kept, load.rate)
            count = min(count, kept) if holds else count
            if queued or self._is_crowded(costs, usual, kept):
                count, self._crowded_at = min(count, kept - 1), snapshot.now
        self._choose(units, count)

    def context_of(self, snapshot: Snapshot) -> int:
        """Return the tokens of context that a spared unit seems to have, so that people avoid it.

        It is that of ``SEEMING`` requests, and of as many for each that another unit has. So
        people's requests go there only when the others have much more to do than usual.
        """
        others = max(1, len(snapshot.units) - len(self.units))
        load = self._people.usual(snapshot)
        return round(SEEMING * (1 + load.running / others) * load.context_tokens)

    def _take(self, snapshot: Snapshot, requests: float) -> None:
        """Add to the account, or take from it if the number is negative."""
        most = SAVED + SAVED_SECONDS * self._people.usual(snapshot).rate
        self._account = max(-OVERDRAWN, min(most, self._account + requests))

    def _crowding(
        self, snapshot: Snapshot, units: Sequence[Occupancy], load: Load
    ) -> Crowding | None:
        model = snapshot.cost_model
        if model is None:
            return None
        prompt = Batch(0, 0, round(load.prompt_tokens))
        # Units may differ; the narrowest is the one that notices others most.
        layout = min((one.unit.layout for one in units), key=lambda layout: layout.world_size)
        return Crowding(model, layout, load, snapshot.mode(layout, prompt))

    def _costs(self, snapshot: Snapshot, units: Sequence[Occupancy], load: Load) -> list[float]:
        """Return what a request loses by 0, 1, ... spared units; 1 is all that it may lose.

        One unit is left to people, unless it is the only one, or they do not use the node.
        """
        if self._people.is_unused:
            return [0.0] * (len(units) + 1)
        if len(units) == 1:
            return [0.0, 0.0]
        crowding = self._crowding(snapshot, units, load)
        if crowding is None:
            return [0.0] * (len(units) // 2 + 1)
        ttft, tpot = crowding.ttft(len(units)), crowding.tpot(len(units))
        return [
            max(
                (crowding.ttft(left) / ttft - 1) / TTFT_SHARE,
                (crowding.tpot(left) / tpot - 1) / TPOT_SHARE,
            )
            for left in range(len(units), 0, -1)
        ]

    def _cost_of_wait(
        self, snapshot: Snapshot, units: Sequence[Occupancy], seconds: float
    ) -> float:
        """Return what requests lose by a wait, in requests that lose what they may."""
        if not seconds or self._people.is_unused:
            return 0.0
        crowding = self._crowding(snapshot, units, self._people.usual(snapshot))
        if crowding is None:
            return 0.0
        return seconds / (TTFT_SHARE * crowding.ttft(len(units)))

    def _of_one(self, snapshot: Snapshot, units: Sequence[Occupancy]) -> int:
        """Return whether background requests get the only unit, as 0 or 1."""
        (unit,) = units
        if unit.people:
            return 1  # few are there beside them
        return int(self._account >= self._cost_of_wait(snapshot, units, unit.wait))

    def _is_crowded(self, found: Sequence[float], usual: Sequence[float], now: int) -> bool:
        """Return whether a request that comes now would lose far more than others usually do."""
        last = min(now, len(found) - 1)
        return now > 0 and found[last] > max(CROWDED, 2 * usual[last])

    def _count(self, costs: Sequence[float], now: int, rate: float) -> int:
        """Return how many units background requests get.

        Args:
            costs: what each number of them costs.
            now: how many they have.
            rate: people's requests per second.
        """
        free = max(count for count, cost in enumerate(costs) if cost <= 1)

        def lasts(count: int) -> bool:
            if count > now:
                return self._account >= max(START, (costs[count] - 1) * rate * HOLD_SECONDS)
            return self._account >= (-START if count <= free else 0.0)

        most = min(len(costs) - 1, max(now, free) + 1)
        return max((count for count in range(1, most + 1) if lasts(count)), default=0)

    def _choose(self, units: Sequence[Occupancy], count: int) -> None:
        """Keep the units that are chosen already, and add those that people use least."""
        ranked = sorted(
            units, key=lambda one: (one.unit not in self.units, one.people, -one.background)
        )
        self.units = frozenset(one.unit for one in ranked[:count])
