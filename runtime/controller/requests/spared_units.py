"""Which units background requests get while people use the node.

Every unit that background requests have makes people's requests a little later, because these share
the others (``shoal.policies.crowding``). People may lose a fixed share of their time in this way
(``TTFT_SHARE``, ``TPOT_SHARE``), and an account keeps what they have not lost so far. If the next
unit costs more than the share, background requests have it for a part of the time: as long as the
account lasts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.policies.crowding import Crowding, Load
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Unit
from shoal.policies.values.snapshot import PoolRequest, Snapshot

TTFT_SHARE = 0.03
"""Share by which the mean TTFT of people's requests may grow."""
TPOT_SHARE = 0.02
"""The same for their mean TPOT. The 90th percentile grows by about twice as much."""
HOLD_SECONDS = 10.0
"""A unit is given to background requests when the account lasts for at least so long."""
SAVED_SECONDS = 60.0
"""Most that the account keeps: so many seconds of what people may lose."""
SMOOTHING_SECONDS = 10.0
"""Time constant of the figures of people's load."""
LINGER_SECONDS = 60.0
"""How long after a person's request a unit is kept free for the next one, at least."""
LINGER_GAPS = 4.0
"""The same in mean times between two such requests, so that few come later than that."""
MOST_LINGER_SECONDS = 600.0
"""People who come more rarely wait for the steps of background requests."""
SEEMING = 8
"""Requests that a spared unit seems to have. A policy also counts the requests that wait for a
prompt, so it takes several to outweigh one that is really there."""
GAPS_KEPT = 8
"""A gap between two requests has the weight of one in so many."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who is on a unit."""

    unit: Unit
    people: int
    background: int


class SparedUnits:
    """Keeps the account, and chooses the units."""

    def __init__(self) -> None:
        self.units: frozenset[Unit] = frozenset()
        """Those that background requests may have, whether or not people are still there."""
        self._account = 0.0
        """Seconds of the allowed loss that people have not lost."""
        self._seen_at = self._began = math.nan
        self._came_at = -math.inf
        self._gap = 0.0
        self._running_now = 0
        self._rate = self._prompts = self._running = 0.0

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
        passed = self._note(snapshot.now, units, arrived)
        if not units or not needed:
            self._pay(passed, 0.0)
            self.units = frozenset()
            return
        kept = [one for one in units if one.unit in self.units]
        costs = self._costs(snapshot, units)
        self._pay(passed, costs[min(len(kept), len(costs) - 1)])
        self._choose(units, self._count(costs, len(kept)))

    def context_of(self, snapshot: Snapshot) -> int:
        """Return the tokens of context that a spared unit seems to have, so that people avoid it.

        It is that of ``SEEMING`` requests, and of as many for each that another unit has. So
        people's requests go there only when the others have much more to do than usual.
        """
        others = max(1, len(snapshot.units) - len(self.units))
        load = self._load(snapshot)
        return round(SEEMING * (1 + load.running / others) * load.context_tokens)

    def _note(
        self, now: float, units: Sequence[Occupancy], arrived: Sequence[PoolRequest]
    ) -> float:
        """Smooth the figures of people's load; return the seconds since the last call."""
        if math.isnan(self._seen_at):
            self._seen_at = self._began = now
        passed, self._seen_at = now - self._seen_at, now
        kept = math.exp(-passed / SMOOTHING_SECONDS)
        self._running = kept * self._running + (1 - kept) * self._running_now
        self._running_now = sum(one.people for one in units)
        self._rate, self._prompts = kept * self._rate, kept * self._prompts
        for request in arrived:
            self._rate += 1 / SMOOTHING_SECONDS
            self._prompts += request.prompt_tokens / SMOOTHING_SECONDS
            if self._came_at > -math.inf:
                self._gap += (now - self._came_at - self._gap) / GAPS_KEPT
            self._came_at = now
        if self._running_now:
            self._came_at = now
        return passed

    @property
    def _is_unused(self) -> bool:
        """Whether no person's request is on the node or likely to come soon."""
        linger = min(MOST_LINGER_SECONDS, max(LINGER_SECONDS, LINGER_GAPS * self._gap))
        return self._seen_at - self._came_at >= linger

    def _load(self, snapshot: Snapshot) -> Load:
        """Return people's load; the averages are over the time that has passed."""
        known = 1 - math.exp((self._began - self._seen_at) / SMOOTHING_SECONDS)
        mean = self._prompts / self._rate if self._rate else snapshot.prompt_tokens
        rate, running = (self._rate / known, self._running / known) if known else (0.0, 0.0)
        return Load(rate, running, mean, snapshot.output_tokens)

    def _costs(self, snapshot: Snapshot, units: Sequence[Occupancy]) -> list[float]:
        """Return what people lose by 0, 1, ... spared units; 1 is all that they may lose.

        One unit is left to people, unless it is the only one, or they do not use the node.
        """
        if self._is_unused:
            return [0.0] * (len(units) + 1)
        if len(units) == 1:
            return [0.0, 0.0]
        model, load = snapshot.cost_model, self._load(snapshot)
        if model is None:
            return [0.0] * (len(units) // 2 + 1)
        prompt = Batch(0, 0, round(load.prompt_tokens))
        # Units may differ; the narrowest is the one that notices others most.
        layout = min((one.unit.layout for one in units), key=lambda layout: layout.world_size)
        crowding = Crowding(model, layout, load, snapshot.mode(layout, prompt))
        ttft, tpot = crowding.ttft(len(units)), crowding.tpot(len(units))
        return [
            max(
                (crowding.ttft(left) / ttft - 1) / TTFT_SHARE,
                (crowding.tpot(left) / tpot - 1) / TPOT_SHARE,
            )
            for left in range(len(units), 0, -1)
        ]

    def _pay(self, seconds: float, cost: float) -> None:
        self._account = min(SAVED_SECONDS, self._account + seconds * (1 - cost))

    def _count(self, costs: Sequence[float], now: int) -> int:
        """Return how many units background requests get."""
        free = max(count for count, cost in enumerate(costs) if cost <= 1)
        if self._account < 0:
            self._account = 0.0
            return free
        lasts = [
            count
            for count, cost in enumerate(costs)
            if self._account >= (cost - 1) * (HOLD_SECONDS if count > now else 0.0)
        ]
        return max(free, min(max(lasts, default=0), max(now, free) + 1))

    def _choose(self, units: Sequence[Occupancy], count: int) -> None:
        """Keep the units that are chosen already, and add those that people use least."""
        ranked = sorted(
            units, key=lambda one: (one.unit not in self.units, one.people, -one.background)
        )
        self.units = frozenset(one.unit for one in ranked[:count])
