"""Nodes of eight engines with a cost model, as policies that forecast see them."""

from dataclasses import replace

from shoal.policies.values.layouts import layouts_up_to
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.snapshot import LayoutState, Snapshot, Target
from tests.policies.snapshots import MODEL, snapshot, unit
from tests.units import tp_units

DP, PAIRS, FOURS, TP = (singles(8), *(tp_units(8, size) for size in (2, 4, 8)))
LAYOUTS = tuple(
    LayoutState(layout, 256, 10_000, 16 * layout.tp, 131_072) for layout in layouts_up_to(8)
)


def node(
    partition: Partition,
    classes: dict[int, int] | None = None,
    *targets: Target,
    rate: float = 1.0,
) -> Snapshot:
    """Return eight engines with so many running requests of each priority, on every engine."""
    units = []
    for group in partition:
        counts = {p: count * group.size for p, count in sorted((classes or {}).items())}
        total = sum(counts.values())
        units.append(
            unit(
                group,
                requests=total,
                slots=64,
                running=total,
                max_model_len=131_072,
                by_priority=tuple(counts.items()),
                context_tokens=500 * total,
            )
        )
    return replace(
        snapshot(*units),
        cost_model=MODEL,
        targets=targets,
        arrival_rate=rate,
        recent_rate=rate,
        usual_rate=rate,
        layouts=LAYOUTS,
    )
