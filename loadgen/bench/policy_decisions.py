"""How long each policy takes to decide in hard cases.

``python -m shoal.loadgen.bench.policy_decisions`` prints each policy's worst median. The cases are
several partitions of a node of eight engines with 10,000 waiting requests, of which a policy sees
the head. Units have room for the requests, are full, or the requests are too long for any unit.
"""

import statistics
import time
from collections.abc import Iterator

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.registry import POLICIES
from shoal.policies.values.layouts import Layout, Unit, alone, layouts_up_to, tensor_parallel
from shoal.policies.values.partition import Partition, singles, units_of
from shoal.policies.values.plan import check_plan
from shoal.policies.values.snapshot import LayoutState, PoolRequest, Snapshot, Target, UnitState

ENGINES = 8
WAITING = 10_000
HEAD = 256
"""Requests that the controller shows (``shoal.runtime.controller.books.capacity.POOL_HEAD``)."""
ROUNDS = 100
PARTITIONS: tuple[Partition, ...] = (
    singles(ENGINES),
    units_of(ENGINES, Layout(tp=2)),
    (tensor_parallel(range(4)), *map(alone, range(4, ENGINES))),
    units_of(ENGINES, Layout(tp=8)),
)
SHAPE = ModelShape(80, 8192, 64, 8, 128, parameters=70e9)
MODEL = CostModel(SHAPE, Hardware(4e12, 1e15, 4e11, 1e-5, 2e-3))
TARGETS = (Target(-1, 0.5, 0.02), Target(0, 2.0, 0.05))


def hard_snapshots() -> Iterator[tuple[str, Snapshot]]:
    """Yield the snapshots by name."""
    for partition in PARTITIONS:
        for name, slots, prompt in (("room", 256, 100), ("full", 0, 100), ("long", 256, 10**6)):
            units = tuple(_unit(group, slots) for group in partition)
            pool = tuple(
                PoolRequest(f"r{k}", prompt, prompt + 1, k % 3 - 1, 0.0) for k in range(HEAD)
            )
            widths = ",".join(str(unit.size) for unit in partition)
            yield (
                f"{widths} {name}",
                Snapshot(
                    now=100.0,
                    engines=ENGINES,
                    max_group=ENGINES,
                    dead=frozenset(),
                    partition=partition,
                    switching=False,
                    units=units,
                    pool=pool,
                    waiting=WAITING,
                    waiting_tokens=WAITING * prompt,
                    arrival_rate=50.0,
                    smoothed_requests=float(WAITING),
                    since_urgent=0.0,
                    layouts=tuple(
                        LayoutState(layout, 256, 50_000, 16 * layout.tp, 10**5)
                        for layout in layouts_up_to(ENGINES)
                    ),
                    cost_model=MODEL,
                    targets=TARGETS,
                ),
            )


def _unit(group: Unit, slots: int) -> UnitState:
    by_priority = ((-1, 10), (0, 100))
    return UnitState(
        group, True, 110, slots, 50_000, 50_000, 16, 10**5, 100, 10, 50_000, 5000, by_priority
    )


def decision_seconds(name: str, snapshot: Snapshot) -> list[float]:
    """Return the times of ``ROUNDS`` decisions of a policy, with the controller's check of each."""
    policy, times = POLICIES[name], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        check_plan(policy.plan(snapshot), snapshot)
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    """Print a line per policy: the name of its worst snapshot, and its median time there."""
    print(f"{'policy':<12} {'median of the worst (ms)':>25}  snapshot")
    for name in sorted(POLICIES):
        medians = {
            case: statistics.median(decision_seconds(name, seen)) for case, seen in hard_snapshots()
        }
        worst = max(medians, key=lambda case: medians[case])
        print(f"{name:<12} {medians[worst] * 1e3:>25.3f}  {worst}")


if __name__ == "__main__":
    main()
