"""What every registered policy must hold to, whatever it wants."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.registry import POLICIES, UnknownPolicyError, get_policy
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.plan import Dispatch, Plan, PlanError, Policy, check_plan
from shoal.policies.values.snapshot import LayoutState, Move, Snapshot
from tests.policies.snapshots import MODEL, TARGETS, request, snapshot, snapshots, unit
from tests.units import tp

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@every_policy
@given(seen=snapshots())
def test_plans_can_be_done(policy: Policy, seen: Snapshot) -> None:
    """Dispatches start now and fit; targets are aligned, cover all engines, spare the dead.

    Groups that an engine's restart has broken are not named.
    """
    check_plan(policy.plan(seen), seen)


@every_policy
@given(seen=snapshots())
def test_plans_are_a_function_of_the_snapshot(policy: Policy, seen: Snapshot) -> None:
    twin = copy.deepcopy(seen)
    assert policy.plan(seen) == policy.plan(twin)
    assert seen == twin


@every_policy
@given(seen=snapshots())
def test_no_target_while_a_switch_runs_or_unless_the_policy_decides_layouts(
    policy: Policy, seen: Snapshot
) -> None:
    if seen.switching or not policy.decides_layout:
        assert policy.plan(seen).target is None


@every_policy
@given(seen=snapshots())
def test_nothing_that_could_start_is_left_when_the_node_is_idle(
    policy: Policy, seen: Snapshot
) -> None:
    """The first request that some unit can start is started: no policy of ours withholds work.

    If requests wait in the host's memory, the node is not idle.
    """
    seen = replace(seen, tiers=())
    plan = policy.plan(seen)
    if plan.target is None and not plan.dispatches and seen.pool:
        first = next((r for r in seen.pool if any(u.can_hold(r) for u in seen.units)), None)
        if first is not None:
            assert not any(can_start(u, first) for u in seen.units)


def can_start(state, wanted) -> bool:
    return (
        state.serving
        and state.free_slots > 0
        and state.can_hold(wanted)
        and state.blocks_for(wanted) <= state.free_blocks
    )


MIXED = (
    (tp(0, 1, 2, 3), tp(4, 5), alone(6), alone(7)),
    (tp(0, 1), tp(2, 3), tp(4, 5, 6, 7)),
    (alone(0), alone(1), tp(2, 3), tp(4, 5, 6, 7)),
)
"""Partitions with groups of two and of four engines."""


@st.composite
def nodes_with_a_long_request(draw: st.DrawFn) -> Snapshot:
    """Draw a mixed node, whose wider units hold longer requests, and one that needs a group."""
    layouts = tuple(LayoutState(Layout(tp=d), 4, 1000, 4 * d, 100 * d) for d in (1, 2, 4, 8))
    units = tuple(
        unit(
            group,
            requests=draw(st.integers(0, 20)),
            slots=draw(st.sampled_from([4, 4, 0])),
            blocks=1000,
            total_blocks=1000,
            max_model_len=100 * group.size,
        )
        for group in draw(st.sampled_from(MIXED))
    )
    total, priority = draw(st.sampled_from([150, 300])), draw(st.sampled_from([0, -1]))
    return replace(
        snapshot(*units, pool=(request("long", total=total, priority=priority), request("short"))),
        switching=draw(st.booleans()),
        since_urgent=draw(st.sampled_from([0.0, 100.0])),
        layouts=layouts,
        cost_model=MODEL,
        targets=draw(st.sampled_from([(), TARGETS])),
    )


@every_policy
@given(seen=nodes_with_a_long_request())
def test_a_long_request_goes_to_the_smallest_group_that_can_start_it(
    policy: Policy, seen: Snapshot
) -> None:
    plan = policy.plan(seen)
    width = next((d.unit.size for d in plan.dispatches if d.request_id == "long"), None)
    if width is not None:
        able = (u.unit.size for u in seen.units if can_start(u, seen.pool[0]))
        assert width == min(able)


@every_policy
def test_names_are_keys(policy: Policy) -> None:
    assert get_policy(policy.name) is policy


def test_unknown_policy_lists_those_there_are() -> None:
    with pytest.raises(
        UnknownPolicyError, match="choose one of adaptive, batch, flying, manual, shift, static-dp"
    ):
        get_policy("static")


# --- the check itself ---


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan((Dispatch("none", alone(0)),)), "not in the pool"),
        (Plan((Dispatch("a", alone(0)), Dispatch("a", alone(1)))), "twice in the plan"),
        (Plan((Dispatch("a", tp(0, 1)),)), "is no unit"),
        (Plan((Dispatch("a", alone(2)),)), "cannot start a now"),
        (Plan((Dispatch("a", alone(0)), Dispatch("b", alone(0)))), "cannot start b now"),
        (Plan((Dispatch("large", alone(0)),)), "cannot start large now"),
        (Plan(target=(alone(0), tp(1, 2), alone(3))), "not an aligned"),
        (Plan(target=(tp(0, 1),)), "engines \\[2, 3\\] are in no unit"),
        (Plan(target=(tp(2, 3), tp(0, 1))), "not in order"),
        (Plan(target=(Unit((0, 1), Layout(pp=2)), tp(2, 3))), "cannot have the layout 'pp2'"),
        (Plan(target=(tp(0, 1), tp(2, 3))), "names a dead engine"),
        (Plan(moves=(Move(alone(0), tp(0, 1), 1),)), "\\[0, 1\\] is no unit"),
        (Plan(moves=(Move(alone(0), alone(0), 1),)), "from unit \\[0\\] moves nothing"),
        (Plan(moves=(Move(alone(0), alone(1), 0),)), "from unit \\[0\\] moves nothing"),
    ],
)
def test_plans_that_cannot_be_done_are_refused(plan: Plan, says: str) -> None:
    seen = snapshot(
        unit(alone(0), slots=1),
        unit(alone(1)),
        unit(alone(2), serving=False),
        unit(alone(3), serving=False),
        pool=(request("a"), request("b"), request("large", prompt=500)),
        dead=frozenset({3}),
    )
    with pytest.raises(PlanError, match=says):
        check_plan(plan, seen)


def test_a_target_names_no_group_that_a_restart_has_broken() -> None:
    seen = replace(
        snapshot(*map(unit, [alone(0), alone(1), alone(2), alone(3)])), broken=frozenset({tp(0, 1)})
    )
    check_plan(Plan(target=(alone(0), alone(1), tp(2, 3))), seen)
    with pytest.raises(PlanError, match="an engine of it was restarted"):
        check_plan(Plan(target=(tp(0, 1), tp(2, 3))), seen)
