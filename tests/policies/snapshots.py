"""Snapshots for the tests of policies: made by hand, or drawn by Hypothesis."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to, tier_of
from shoal.policies.values.partition import Partition, singles, units_of
from shoal.policies.values.snapshot import (
    LayoutState,
    PoolRequest,
    Snapshot,
    Target,
    TierState,
    UnitState,
)
from tests.units import tp

LAYOUTS = tuple(
    LayoutState(layout, 4, 30, 4 * layout.tp, 120 * layout.tp) for layout in layouts_up_to(8)
)
MODEL = CostModel(
    ModelShape(80, 8192, 64, 8, 128, parameters=70e9, weight_bytes=1.0),
    Hardware(3e12, 1e15, 2e11, allreduce_seconds=1e-5, overhead_seconds=2e-3),
    max_sp=8,
)
TARGETS = (Target(-1, 0.5, 0.02), Target(0, 2.0, 0.05))


def request(
    request_id: str = "r",
    *,
    prompt: int = 10,
    total: int | None = None,
    priority: int = 0,
    arrival: float = 0.0,
) -> PoolRequest:
    return PoolRequest(request_id, prompt, total or prompt + 1, priority, arrival)


def unit(
    group: Unit,
    *,
    serving: bool = True,
    requests: int = 0,
    slots: int = 4,
    blocks: int = 100,
    total_blocks: int = 100,
    block_tokens: int = 4,
    max_model_len: int = 400,
    **figures: Any,
) -> UnitState:
    room = (slots, blocks, total_blocks, block_tokens, max_model_len)
    return UnitState(group, serving, requests, *room, **figures)


def snapshot(
    *units: UnitState,
    pool: tuple[PoolRequest, ...] = (),
    max_group: int | None = None,
    dead: frozenset[int] = frozenset(),
    switching: bool = False,
    now: float = 0.0,
) -> Snapshot:
    """Return a snapshot whose units must partition the engines."""
    partition = tuple(u.unit for u in units)
    engines = sum(group.size for group in partition)
    return Snapshot(now, engines, max_group or engines, dead, partition, switching, units, pool)


@st.composite
def partitions(draw: st.DrawFn, engines: int) -> Partition:
    """Draw an aligned partition of a power of two engines."""

    def split(first: int, size: int) -> list[Unit]:
        if size == 1 or draw(st.booleans()):
            return [tp(*range(first, first + size))]
        return split(first, size // 2) + split(first + size // 2, size // 2)

    return tuple(split(0, engines))


@st.composite
def _tiers(draw: st.DrawFn, engines: int, dead: frozenset[int]) -> tuple[TierState, ...]:
    """Draw the tiers of engines, mostly none."""
    if draw(st.sampled_from([True, True, False])):
        return ()
    waiting = st.lists(st.integers(1, 150), max_size=3)
    return tuple(
        TierState(tier_of(engine), tuple(draw(waiting)), draw(st.integers(-3, 90)), 100, 4)
        for engine in range(engines)
        if engine not in dead
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw any snapshot that a controller could make."""
    engines = draw(st.sampled_from([1, 2, 4, 8]))
    dead = frozenset(draw(st.sets(st.integers(0, engines - 1))))
    partition = singles(engines) if dead else draw(partitions(engines))
    small = st.integers(0, 20)
    units = tuple(
        unit(
            group,
            serving=not dead.intersection(group.engines) and draw(st.booleans()),
            requests=draw(small),
            slots=draw(st.integers(0, 4)),
            blocks=draw(st.integers(-3, 30)),
            total_blocks=30,
            block_tokens=4 * group.size,
            max_model_len=draw(st.sampled_from([60, 120])),
            by_priority=draw(st.sampled_from([(), ((-1, 1),), ((0, 7),), ((-1, 1), (0, 6))])),
        )
        for group in partition
    )
    pool = tuple(
        replace(
            request(
                f"r{k}",
                prompt=draw(st.integers(0, 150)),
                total=draw(st.integers(1, 200)),
                priority=draw(st.sampled_from([-1, 0, 0, 1])),
            ),
            cached=tuple((group, draw(st.integers(1, 160))) for group in partition[: k % 3]),
            prefix=k % 2,
        )
        for k in range(draw(st.integers(0, 12)))
    )
    seen = snapshot(
        *units, pool=pool, dead=dead, switching=draw(st.booleans()), now=draw(st.floats(0, 1e6))
    )
    modelled = draw(st.booleans())
    layouts = layouts_up_to(seen.max_group)[1:]
    groups = [group for layout in layouts for group in units_of(engines, layout)]
    return replace(
        seen,
        tiers=draw(_tiers(engines, dead)),
        broken=frozenset(g for g in groups if g not in partition and draw(st.booleans())),
        waiting=len(pool) + draw(st.sampled_from([0, 500])),
        waiting_tokens=draw(st.integers(0, 10_000)),
        arrival_rate=draw(st.floats(0, 50)),
        smoothed_requests=draw(st.floats(0, 300)),
        since_switch=draw(st.sampled_from([0.0, 100.0])),
        since_urgent=draw(st.sampled_from([0.0, 100.0])),
        layouts=draw(st.sampled_from([(), LAYOUTS])),
        cost_model=MODEL if modelled else None,
        targets=TARGETS if modelled else (),
        urgent_engines=draw(st.sampled_from([0, engines // 2])) if engines > 2 else 0,
        sp_above=draw(
            st.sampled_from([(), ((Layout(tp=2), 300), (Layout(tp=4), 400), (Layout(tp=8), 500))])
        ),
    )
