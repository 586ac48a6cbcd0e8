"""What a partition will cost: the time of requests, their broken promises, and the switch to it.

Requests are divided into classes. Without targets there are two, urgent requests and all others;
with targets there is one for each target. If the units of a partition differ in size, the widest
ones serve the most urgent class alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.policies.flow import (
    FAR,
    NEAR_SECONDS,
    Moment,
    UnitPace,
    Work,
    flow,
    pace_of,
)
from shoal.policies.hindsight import EmptyCaches
from shoal.policies.static import with_singles
from shoal.policies.unit_costs import prices_of
from shoal.policies.values.batch import Batch
from shoal.policies.values.kv_need import blocks_for
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    Snapshot,
    StepPredictor,
    Target,
    UnitState,
)

NO_PROMISE = Target(NORMAL_PRIORITY, math.inf, math.inf)
"""The target of requests without a promise."""
URGENT = Target(NORMAL_PRIORITY - 1, math.inf, math.inf)
"""The class of urgent requests of a node without targets."""
URGENT_WEIGHT = 4.0
"""How many other requests' seconds a second of an urgent request counts as."""
TIE = 0.002
"""Broken promises that a second of a request counts as, so that the faster of two layouts is taken
that keep the same promises."""
TTFT_SHARPNESS, TPOT_SHARPNESS = 4, 16
"""How suddenly a promise becomes unsafe as the predicted mean comes near the target. TTFT varies
much more between requests than TPOT."""
USUAL = 16
"""Requests of the usual length that are added to the present ones, because a few requests say
little about the next ones."""
LEAST_RATE = 1 / 60
"""Least requests per second that are assumed to arrive, so that an idle node has a best layout."""
LEAST_ROOM = 0.15
"""Share of a unit's KV blocks that must be free, so that its requests can be carried away."""
SWITCH_SECONDS = 0.004
"""Seconds of a switch beyond the step that is computed and the copies: messages and launches."""
CACHE_SECONDS = 60.0
"""For how long the loss of caches counts at most. In Mooncake's conversation trace half of what is
found was last used more than 105 s before, and a third within a minute."""


@dataclass(frozen=True, slots=True)
class Class:
    """The requests of one target."""

    target: Target
    weight: float
    share: float
    """Share of the node's requests."""


class Forecast:
    """Judges partitions of the node of one snapshot.

    Args:
        snapshot: the node.
        model: predicts the times of steps and copies.
        urgent: share of the requests that are urgent.
        lane: the group that these have to themselves.
        later: the partitions that the node may have after the next seconds; None: all that have one
            layout for all engines.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        model: StepPredictor,
        urgent: float = 0.0,
        lane: Unit | None = None,
        later: Sequence[Partition] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._lane = lane
        self._model = model
        self._work = work_of(snapshot)
        self._classes = _classes(snapshot, urgent)
        self._paces: dict[Layout, UnitPace] = {}
        self._later_ones = uniform(snapshot) if later is None else later

    def cost(self, candidate: Partition, stall: float = 0.0) -> float:
        """Return what it costs to have a partition for the next seconds.

        It is the seconds that requests spend on the node. If there are targets, it is the broken
        promises, and ``TIE`` for each of these seconds. What is left after the next seconds costs
        what it does in the best partition of ``later``, because the node may change by then.

        Args:
            candidate: the partition.
            stall: seconds for which nothing is computed first, because of a switch.
        """
        cost, left = 0.0, replace(self._work, decoding=0.0, waiting=0.0, tokens=0.0)
        for layout, count, part, classes in self._shares(candidate):
            moments = list(flow(self._pace(layout), self._work.part(part), stall=stall))
            cost += count * self._cost_of(moments, classes, part * self._work.decoding, stall)
            end = moments[-1]
            left = replace(
                left,
                decoding=left.decoding + count * end.decoding,
                waiting=left.waiting + count * end.waiting,
                tokens=left.tokens + count * end.tokens,
            )
        return cost + min(self._later(partition, left) for partition in self._later_ones)

    def _later(self, partition: Partition, left: Work) -> float:
        """Return what a partition costs from ``NEAR_SECONDS`` on."""
        cost = 0.0
        for layout, count, part, classes in self._shares(partition):
            ticks = flow(self._pace(layout), left.part(part), FAR, at=NEAR_SECONDS)
            cost += count * self._cost_of(list(ticks), classes, 0.0, 0.0)
        return cost

    def _pace(self, layout: Layout) -> UnitPace:
        if layout not in self._paces:
            self._paces[layout] = pace_of(self._snapshot, self._model, layout, self._work)
        return self._paces[layout]

    def stall(self, candidate: Partition) -> float:
        """Return the seconds for which a switch interrupts a request that it moves, in the mean.

        Of the longest step that is computed half is left in the mean. A step that was scheduled
        ahead follows (``Snapshot.schedules_ahead``). Then the new units read the KV from the old
        ones.
        """
        return self._stop(candidate, lambda _: 1 / 2)

    def whole_stop(self, candidate: Partition) -> float:
        """Return the same until the last engine has ended its step.

        Of the longest of n units' steps n / (n + 1) is left in the mean.
        """
        return self._stop(candidate, lambda steps: steps / (steps + 1))

    def _stop(self, candidate: Partition, left: Callable[[int], float]) -> float:
        moved = [unit for unit in self._snapshot.units if unit.unit not in candidate]
        here = [unit for unit in moved if unit.requests]
        if not here:
            return SWITCH_SECONDS
        steps = left(len(here)) + self._snapshot.schedules_ahead
        longest = max(map(self._step_seconds, here))
        return SWITCH_SECONDS + steps * longest + self._copy_seconds(candidate, moved)

    def loss(self, candidate: Partition, here: float) -> float:
        """Return what a switch costs, in seconds of requests.

        The switch stops the requests. Those that are there then wait until the caches that it has
        lost are filled.

        Args:
            candidate: to which the node changes.
            here: as many requests as were there lately.
        """
        stop = self.whole_stop(candidate) * self._snapshot.requests
        return stop + self.refill() * (1 + here)

    def refill(self) -> float:
        """Return the seconds in which the node computes again what the caches lose in a switch.

        What is used again soon is lost only once, such as a beginning that all prompts share. How
        much is used again only after longer than the node was watched is a guess: as much between
        a time and its double as between a quarter and half of the time until now. Mooncake's chats
        go on like that. All this is at most what a switch leaves behind. It takes along what was
        used latest.
        """
        snapshot, latest = self._snapshot, self._taken_along
        rate = self._prompt * snapshot.usual_rate
        found = CACHE_SECONDS * snapshot.hit_share * rate
        unseen = max(0.0, CACHE_SECONDS * rate - max(latest, snapshot.watched_tokens / 2))
        unknown = snapshot.late_share / math.log(2) * unseen
        lost = snapshot.lost_tokens
        if lost:
            lost *= math.exp(-latest * snapshot.hit_share / lost)
        token = prices_of(snapshot, snapshot.units[0].unit.layout).prompt / len(snapshot.units)
        return min(found, self._left_behind, lost + unknown) * token

    @property
    def _left_behind(self) -> int:
        """The cached tokens that a switch does not take along."""
        units = self._snapshot.units
        return sum(max(0, of_ended(unit) - unit.portable_tokens) for unit in units)

    @property
    def _prompt(self) -> float:
        """Tokens of the mean prompt, those that it finds in a cache included."""
        return self._snapshot.prompt_tokens / max(0.1, 1 - self._snapshot.hit_share)

    @property
    def _taken_along(self) -> float:
        """The latest tokens of prompts of which a switch takes along all that is cached."""
        snapshot = self._snapshot
        tokens = sum(map(of_ended, snapshot.units)) - self._left_behind
        return tokens * self._prompt / max(1.0, snapshot.prompt_tokens + snapshot.output_tokens)

    def empty_caches(self) -> EmptyCaches:
        """Return what requests find after a switch, in which caches are left behind.

        How long ago it was last used is taken to be distributed exponentially.
        """
        share, lost = self._snapshot.hit_share, self._snapshot.lost_tokens
        if not (share and self._left_behind):
            return EmptyCaches(0.0)
        return EmptyCaches(lost / share, round(self._taken_along))

    def has_room(self, candidate: Partition) -> bool:
        """Return whether the requests that a switch moves can take their KV along.

        While it is copied it lies in two places. Without room for that it would be computed again.
        """
        moved = [unit for unit in self._snapshot.units if unit.unit not in candidate]
        return all(
            free_of_kv(unit) >= LEAST_ROOM * unit.total_blocks for unit in moved if unit.running
        )

    def _step_seconds(self, unit: UnitState) -> float:
        context = round(self._work.prompt + self._work.output / 2)
        layout, running = unit.unit.layout, max(1, unit.running)
        prompts = min(self._snapshot.chunk(layout), unit.prefill_tokens)
        before = round(self._work.prompt / 2) if prompts else 0
        batch = Batch(running, running * context, prompts, before)
        return self._model.step_seconds(layout, batch, self._snapshot.mode(layout, batch))

    def _copy_seconds(self, candidate: Partition, moved: Sequence[UnitState]) -> float:
        """Return the seconds of the copies: units read at once, each from one other at a time."""
        engines = {engine for unit in moved for engine in unit.unit.engines}
        readers = [unit for unit in candidate if engines.intersection(unit.engines)]
        widest = max(unit.unit.size for unit in moved)
        links = sum(min(unit.size, widest) for unit in readers)
        computed = sum(unit.context_tokens - unit.prefill_tokens for unit in moved)
        tokens = computed + sum(unit.running for unit in moved) * self._work.output / 2
        return self._model.carry_seconds(tokens, max(1, links))

    def _shares(self, candidate: Partition) -> Iterator[tuple[Layout, int, float, Sequence[Class]]]:
        """Yield layouts, with the number of units, the share of each, and the classes served."""
        dead = self._snapshot.dead
        alive = [unit for unit in candidate if not dead.intersection(unit.engines)]
        for units, classes in served(alive, self._classes, self._lane):
            engines = sum(unit.size for unit in units)
            present = sum(each.share for each in classes)
            for layout, count in Counter(unit.layout for unit in units).items():
                yield layout, count, present * layout.world_size / engines, classes

    def _cost_of(
        self, moments: Sequence[Moment], classes: Sequence[Class], running: float, stall: float
    ) -> float:
        """Return what happens on one unit as a cost (``cost``).

        Args:
            moments: what happens on it.
            classes: whose requests it serves.
            running: requests that decode there from the start; their first token is no risk.
            stall: seconds for which they stop.
        """
        whole = sum(each.share for each in classes)
        weight = sum(each.weight * each.share for each in classes) / whole
        seconds = weight * sum(moment.seconds for moment in moments)
        if not self._snapshot.targets:
            return seconds
        broken, slower = 0.0, moments[0].tpot + stall / self._work.output
        for each in classes:
            missed = sum(m.started * risk(m.ttft, m.tpot, each.target) for m in moments)
            missed += running * risk(0.0, slower, each.target)
            missed += moments[-1].waiting * risk(moments[-1].ttft, 0.0, each.target)
            broken += each.share / whole * missed
        return broken + TIE * seconds


def uniform(snapshot: Snapshot) -> tuple[Partition, ...]:
    """Return the partitions into groups of one size, as far as these can form, narrowest first."""
    every = (units_of(snapshot.engines, layout) for layout in layouts_up_to(snapshot.max_group))
    return tuple(dict.fromkeys(with_singles(snapshot, groups) for groups in every))


def work_of(snapshot: Snapshot) -> Work:
    """Return the work of the whole node."""
    units = snapshot.units
    waiting = snapshot.waiting + sum(unit.waiting for unit in units)
    tokens = snapshot.waiting_tokens + sum(unit.prefill_tokens for unit in units)
    return Work(
        decoding=max(0, snapshot.requests - waiting),
        waiting=waiting,
        tokens=tokens,
        rate=max(LEAST_RATE, snapshot.arrival_rate),
        recent=max(LEAST_RATE, snapshot.recent_rate),
        usual=max(LEAST_RATE, snapshot.usual_rate),
        prompt=max(1.0, usual_prompt(snapshot)),
        output=max(1.0, snapshot.output_tokens),
    )


def of_ended(unit: UnitState) -> int:
    """Return the tokens that a unit has cached of requests which have ended."""
    return max(0, unit.cached_tokens - unit.context_tokens)


def free_of_kv(unit: UnitState) -> int:
    """Return the blocks of a unit in which no running request has KV.

    Those of prompts that wait are not free for others, but have no KV that a switch would copy.
    """
    waiting = (blocks_for(n + 1, unit.block_tokens, unit.group_limits) for n in unit.prompts)
    return unit.free_blocks + sum(waiting)


def usual_prompt(snapshot: Snapshot) -> float:
    """Return the prompt tokens of the mean request, from the present and the latest requests."""
    here = snapshot.waiting_tokens + sum(unit.context_tokens for unit in snapshot.units)
    return (here + USUAL * snapshot.prompt_tokens) / (snapshot.requests + USUAL)


def served(
    partition: Sequence[Unit], classes: Sequence[Class], lane: Unit | None = None
) -> Iterator[tuple[Sequence[Unit], Sequence[Class]]]:
    """Yield units and the classes that they serve.

    The most urgent class has the lane to itself, if the partition has it, and otherwise the widest
    units, if units differ in size.
    """
    widest = max((unit.size for unit in partition), default=0)
    wide = [unit for unit in partition if unit.size == widest]
    if lane in partition:
        wide = [unit for unit in partition if unit == lane]
    rest = [unit for unit in partition if unit not in wide]
    if not rest or len(classes) == 1:
        yield partition, classes
    else:
        yield wide, classes[:1]
        yield rest, classes[1:]


def _classes(snapshot: Snapshot, urgent: float) -> list[Class]:
    if not snapshot.targets:
        usual = Class(NO_PROMISE, 1.0, 1 - urgent)
        return [Class(URGENT, URGENT_WEIGHT, urgent), usual] if urgent else [usual]
    counts = [1.0] * len(snapshot.targets)  # nobody is sure to be the last of its class
    priorities = Counter(request.priority for request in snapshot.pool)
    for unit in snapshot.units:
        priorities.update(dict(unit.by_priority))
    for priority, count in priorities.items():
        counts[_class_of(priority, snapshot.targets)] += count
    whole = sum(counts)
    return [
        Class(target, 1.0, count / whole)
        for target, count in zip(snapshot.targets, counts, strict=True)
    ]


def _class_of(priority: int, targets: Sequence[Target]) -> int:
    """Return the first class that is not more urgent than the priority, otherwise the last."""
    return next((k for k, t in enumerate(targets) if priority <= t.priority), len(targets) - 1)


def risk(ttft: float, tpot: float, target: Target) -> float:
    """Return how likely it is, given the predicted means, that at least one target is missed."""
    late = min(9.0, ttft / target.ttft_seconds) ** TTFT_SHARPNESS
    slow = min(9.0, tpot / target.tpot_seconds) ** TPOT_SHARPNESS
    return 1 - 1 / (1 + late) / (1 + slow)
