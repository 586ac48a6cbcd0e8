"""How long requests will take in a partition, by means: what decides on memory (``share_level``).

A level of memory that the node does not have has no shadow, because KV that is not there cannot be
followed request by request.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.policies.flow import FAR, NEAR_SECONDS, UnitPace, Work, flow, pace_of
from shoal.policies.static import with_singles
from shoal.policies.switch_costs import usual_prompt
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import Snapshot, StepPredictor

LEAST_RATE = 1 / 60
"""Least requests per second that are assumed to arrive, so that an idle node has a best layout."""


class Forecast:
    """Judges partitions of the node of one snapshot.

    Args:
        snapshot: the node.
        model: predicts the times of steps.
        later: the partitions that the node may have after the next seconds.
    """

    def __init__(
        self, snapshot: Snapshot, model: StepPredictor, later: Sequence[Partition]
    ) -> None:
        self._snapshot = snapshot
        self._model = model
        self._work = work_of(snapshot)
        self._paces: dict[Layout, UnitPace] = {}
        self._later_ones = later

    def cost(self, candidate: Partition) -> float:
        """Return the seconds that requests spend on a node that has a partition.

        What is left after the next seconds costs what it does in the best partition of ``later``,
        because the node may change by then.
        """
        cost, left = 0.0, replace(self._work, decoding=0.0, waiting=0.0, tokens=0.0)
        for layout, count, part in self._shares(candidate):
            moments = list(flow(self._pace(layout), self._work.part(part)))
            cost += count * sum(moment.seconds for moment in moments)
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
        for layout, count, part in self._shares(partition):
            moments = flow(self._pace(layout), left.part(part), FAR, at=NEAR_SECONDS)
            cost += count * sum(moment.seconds for moment in moments)
        return cost

    def _pace(self, layout: Layout) -> UnitPace:
        if layout not in self._paces:
            self._paces[layout] = pace_of(self._snapshot, self._model, layout, self._work)
        return self._paces[layout]

    def _shares(self, candidate: Partition) -> Iterator[tuple[Layout, int, float]]:
        """Yield layouts, with the number of units, and the share of the work that each does."""
        dead = self._snapshot.dead
        alive = [unit for unit in candidate if not dead.intersection(unit.engines)]
        engines = sum(unit.size for unit in alive)
        for layout, count in Counter(unit.layout for unit in alive).items():
            yield layout, count, layout.world_size / engines


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
