"""When memory goes from weights to KV, and back."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal.policies.forecast import uniform
from shoal.policies.registry import get_policy
from shoal.policies.share_level import (
    DOUBT,
    MOST_DOUBT,
    REVIEW_SECONDS,
    Memory,
    with_share_level,
)
from shoal.policies.static import STATIC_DP, STATIC_TP
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.partition import singles, units_of
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import LayoutState, ShareLevel, Snapshot
from tests.policies.snapshots import MODEL, snapshot, unit

SHARED = replace(MODEL, shape=replace(MODEL.shape, sharable_bytes=5.6e10), share_weights=2)
WHOLE = replace(SHARED, share_weights=1)
DP, TP2 = singles(2), units_of(2, Layout(tp=2))
SEATS, BLOCK = 256, 16


def layouts(blocks: int) -> tuple[LayoutState, ...]:
    return tuple(
        LayoutState(layout, SEATS, blocks, BLOCK * layout.tp, 100_000)
        for layout in layouts_up_to(2)
    )


def node(
    partition=DP,
    *,
    share: int = 2,
    running: int = 1,
    waiting: int = 0,
    blocks: tuple[int, int] = (4_000, 8_000),
    tokens: int = 500,
    **fields,
) -> Snapshot:
    """Return a node of two engines, with so many KV blocks with whole weights and with shared ones.

    Each unit runs ``running`` requests of ``tokens`` tokens.
    """
    has, other = (blocks[1], blocks[0]) if share == 2 else blocks
    units = [
        unit(
            group,
            requests=running,
            running=running,
            slots=SEATS - running,
            blocks=has - running * tokens // (BLOCK * group.size),
            total_blocks=has,
            block_tokens=BLOCK * group.size,
            max_model_len=100_000,
            context_tokens=running * tokens,
        )
        for group in partition
    ]
    model, then = (SHARED, WHOLE) if share == 2 else (WHOLE, SHARED)
    level = ShareLevel(then.share_weights, layouts(other), then)
    return replace(
        snapshot(*units, max_group=2),
        layouts=layouts(has),
        cost_model=model,
        share_weights=share,
        share_levels=(level,),
        waiting=waiting,
        waiting_tokens=waiting * tokens,
        prompt_tokens=float(tokens),
        output_tokens=300.0,
        since_switch=100.0,
        since_urgent=100.0,
        **fields,
    )


def plans(policy: Policy, seen: Snapshot, seconds: float = 30.0) -> Iterator[tuple[float, Plan]]:
    """Ask again and again about the same node, until the plan wants a change."""
    memory = seen.memory
    for k in range(round(seconds / REVIEW_SECONDS)):
        now = seen.now + k * REVIEW_SECONDS
        plan = policy.plan(replace(seen, now=now, memory=memory))
        memory = plan.memory
        yield now, plan
        if plan.share_weights is not None:
            return


def change(policy: Policy, seen: Snapshot) -> tuple[float, int, str] | None:
    """Return when a policy wants a change, to what and why; None: it wants none."""
    *_, (at, plan) = plans(policy, seen)
    return None if plan.share_weights is None else (at, plan.share_weights, plan.share_reason)


STAYS_DP, STAYS_TP = with_share_level(STATIC_DP), with_share_level(STATIC_TP)


def test_dp_gets_whole_weights_for_few_requests_that_decode() -> None:
    found = change(STAYS_DP, node(running=4))
    assert found is not None
    at, share, reason = found
    assert (share, reason) == (1, "steps")
    assert at > 0.0, "not at once"


@pytest.mark.parametrize("share", [1, 2])
def test_a_group_that_reads_nothing_from_others_keeps_what_it_has(share: int) -> None:
    assert change(STAYS_TP, node(TP2, share=share, running=8)) is None


def test_requests_that_wait_for_kv_get_it_where_this_slows_no_step() -> None:
    full = node(TP2, share=1, running=64, waiting=80, tokens=1600, blocks=(3_200, 8_000))
    found = change(STAYS_TP, full)
    assert found is not None
    assert found[1:] == (2, "kv")


def test_dp_keeps_whole_weights_where_more_kv_would_not_make_up_for_slow_steps() -> None:
    full = node(DP, share=1, running=32, waiting=20, tokens=1600, blocks=(3_200, 4_000))
    assert change(STAYS_DP, full) is None


def test_the_best_layout_at_each_level_counts() -> None:
    """With whole weights the node in TP2 could be in DP, which the first policy never takes."""
    busy = node(
        TP2,
        running=200,
        tokens=500,
        blocks=(20_000, 30_000),
        arrival_rate=15.0,
        recent_rate=15.0,
        usual_rate=15.0,
    )
    free = with_share_level(Policy("free", STATIC_TP.plan, decides_layout=True), uniform)
    assert change(STAYS_TP, busy) is None
    found = change(free, busy)
    assert found is not None
    assert found[1:] == (1, "steps")


def test_kv_that_would_be_computed_again_makes_the_change_dearer() -> None:
    few, much = (change(STAYS_DP, node(running=8, tokens=t)) for t in (100, 6_000))
    assert few is not None
    assert much is not None
    assert much[0] > few[0]


def test_a_change_that_takes_the_last_one_back_costs_twice_as_much() -> None:
    seen = node(running=4)
    first = change(STAYS_DP, seen)
    again = change(STAYS_DP, replace(seen, memory=Memory(at=-1.0, doubt=4.0, changed=True)))
    assert first is not None
    assert again is not None
    assert again[0] > 2 * first[0]
    doubts = []
    memory: object = None
    for _ in range(8):
        *_, (_, plan) = plans(STAYS_DP, replace(seen, memory=memory))
        assert isinstance(plan.memory, Memory)
        memory = replace(plan.memory, at=-REVIEW_SECONDS)
        doubts.append(plan.memory.doubt)
    assert doubts[0] == 1.0
    assert doubts[1] == pytest.approx(DOUBT, rel=0.1)
    assert doubts == sorted(doubts)
    assert doubts[-1] <= MOST_DOUBT


def test_nothing_is_decided_without_levels_or_while_a_switch_runs() -> None:
    seen = node(running=4)
    assert change(STAYS_DP, replace(seen, share_levels=())) is None
    assert change(STAYS_DP, replace(seen, pending=TP2)) is None


def test_the_policy_keeps_its_own_memory() -> None:
    def count(seen: Snapshot, /) -> Plan:
        known = seen.memory
        return Plan(memory=1 if not isinstance(known, int) else known + 1)

    policy = with_share_level(Policy("counts", count, decides_layout=True))
    seen = node(running=1)
    memory = None
    for levels in (seen.share_levels, (), seen.share_levels):
        memory = policy.plan(replace(seen, memory=memory, share_levels=levels)).memory
    assert isinstance(memory, Memory)
    assert memory.own == 3
    assert policy.plan(replace(seen, share_levels=())).memory == 1


@pytest.mark.parametrize("name", ["adaptive", "flying", "shift", "static-dp", "static-tp"])
def test_all_policies_that_decide_the_layout_decide_this_too(name: str) -> None:
    partition = DP if name == "static-dp" else TP2
    memory = get_policy(name).plan(node(partition, running=4)).memory
    assert isinstance(memory, Memory)
    assert memory.at == 0.0


def test_an_operators_policy_does_not() -> None:
    assert get_policy("manual").plan(node(running=4)).memory is None
