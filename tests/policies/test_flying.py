"""Flying: DP under load, TP when quiet, a group for who needs one, and no hurry between them."""

from dataclasses import replace

import pytest

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.flying import FLYING, PROMPT, FlyingSettings
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, alone, layouts_up_to
from shoal.policies.values.partition import singles
from shoal.policies.values.snapshot import LayoutState, Snapshot, UnitState
from shoal.policies.values.speculation import Speculation
from tests.policies.snapshots import MODEL, request, snapshot, unit
from tests.units import tp, tp_units

SETTINGS = FlyingSettings()
DP, TP = singles(8), tp_units(8, 8)
MIXED = (tp(0, 1, 2, 3), alone(4), alone(5), alone(6), alone(7))
BUSY = int(SETTINGS.jam_above * 8) + 8
QUIET = int(SETTINGS.dp_above * 8) - 8
BETWEEN = int(SETTINGS.tp_below * 8) + 8
RISING = int(SETTINGS.dp_above * 8) + 8


def node(partition, requests: int = 0, *, pool=(), **fields) -> Snapshot:
    """Return a node of eight engines that holds so many requests, evenly, with usual prompts."""
    usual, room = fields.get("prompt_tokens", 0), {"slots": 64, "blocks": 500, "total_blocks": 500}
    shares = [requests * group.size // 8 for group in partition]
    units = [
        unit(group, requests=share, context_tokens=round(share * usual), **room)
        for group, share in zip(partition, shares, strict=True)
    ]
    figures = {"smoothed_requests": float(requests), "waiting": len(pool)}
    return replace(snapshot(*units, pool=pool), **{**figures, **fields})


def target(seen: Snapshot):
    return FLYING.plan(seen).target


@pytest.mark.parametrize(
    ("partition", "requests", "wanted"),
    [
        (DP, QUIET, TP),
        (DP, BETWEEN, None),
        (DP, BUSY, None),
        (TP, QUIET, None),
        (TP, BETWEEN, None),
        (TP, BUSY, DP),
    ],
)
def test_load_decides_with_hysteresis(partition, requests, wanted) -> None:
    assert target(node(partition, requests)) == wanted


def test_a_burst_is_answered_at_once_and_quiet_only_when_it_lasts() -> None:
    assert target(node(TP, BUSY, smoothed_requests=0.0, since_switch=0.0)) == DP
    assert target(node(DP, QUIET, smoothed_requests=float(BUSY))) is None
    assert target(node(DP, QUIET, since_switch=SETTINGS.settle_seconds / 2)) is None


def test_a_few_requests_that_grow_are_a_burst_and_as_many_that_do_not_are_none() -> None:
    growing = {"smoothed_requests": RISING / SETTINGS.growth - 1, "since_switch": 0.0}
    assert target(node(TP, RISING, **growing)) == DP
    assert target(node(TP, RISING, smoothed_requests=RISING / SETTINGS.growth + 1)) is None
    assert target(node(DP, RISING, smoothed_requests=RISING / 2)) is None
    assert target(node(DP, RISING)) == TP
    assert target(node(DP, RISING, smoothed_requests=RISING - 0.1)) == TP, "steady but for rounding"


def test_prompts_that_keep_the_widest_layout_busy_are_a_load() -> None:
    tokens_per_second = PROMPT.prefill_tokens / MODEL.step_seconds(Layout(tp=8), PROMPT)

    def seen(partition, busy: float) -> Snapshot:
        rate = busy * tokens_per_second
        return node(partition, QUIET, prompt_rate=rate, cost_model=MODEL)

    assert target(seen(TP, SETTINGS.busy_above + 0.01)) == DP
    assert target(seen(TP, SETTINGS.busy_above - 0.01)) is None
    assert target(seen(DP, SETTINGS.busy_below + 0.01)) is None
    assert target(seen(DP, SETTINGS.busy_below - 0.01)) == TP
    assert target(replace(seen(TP, 1.0), cost_model=None)) is None


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (node(TP, BUSY), "load"),
        (node(DP, QUIET), "quiet"),
        (node(DP, BUSY, since_urgent=0.0), "urgent"),
    ],
)
def test_a_switch_has_a_reason(seen: Snapshot, reason: str) -> None:
    assert FLYING.plan(seen).reason == reason


def test_load_moves_requests_and_pauses_none() -> None:
    assert FLYING.plan(node(TP, BUSY)).treatment == "carry"
    assert FLYING.plan(node(DP, QUIET)).treatment == "carry"


def test_a_full_node_is_loaded() -> None:
    full = node(TP, QUIET, pool=(request(),), since_switch=1.0)
    units: tuple[UnitState, ...] = tuple(replace(u, free_slots=0) for u in full.units)
    assert target(full) is None
    assert target(replace(full, units=units)) == DP


# --- urgent requests ---


def test_an_urgent_request_pauses_only_the_engines_it_needs() -> None:
    seen = node(DP, BUSY, pool=(request("u", priority=-1),), since_urgent=0.0)
    plan = FLYING.plan(seen)
    assert (plan.target, plan.treatment) == (MIXED, "hard")
    assert plan.dispatches == (), "it waits for its group"


def test_the_group_is_formed_where_the_least_runs() -> None:
    seen = node(DP, BUSY, since_urgent=0.0)
    units = tuple(replace(u, requests=1) if u.unit.leader > 3 else u for u in seen.units)
    assert target(replace(seen, units=units)) == (
        alone(0),
        alone(1),
        alone(2),
        alone(3),
        tp(4, 5, 6, 7),
    )


def test_the_group_lingers_for_the_next_urgent_request() -> None:
    assert target(node(MIXED, BUSY, since_urgent=SETTINGS.linger_seconds / 2)) is None
    assert target(node(MIXED, BUSY, since_urgent=SETTINGS.linger_seconds * 2)) == DP


def test_urgent_requests_get_the_group_and_others_the_rest() -> None:
    pool = (request("u", priority=-1), request("n"))
    seen = node(MIXED, BUSY, pool=pool, since_urgent=0.0)
    assert {d.request_id: d.unit for d in FLYING.plan(seen).dispatches} == {
        "u": tp(0, 1, 2, 3),
        "n": alone(4),
    }


def test_an_urgent_request_waits_for_no_switch_that_cannot_be() -> None:
    seen = node(DP, BUSY, pool=(request("u", priority=-1),), since_urgent=0.0, switching=True)
    assert len(FLYING.plan(seen).dispatches) == 1
    assert FLYING.plan(replace(seen, pending=MIXED)).dispatches == ()


# --- long requests ---

LAYOUTS = tuple(LayoutState(Layout(tp=d), 64, 500, 4 * d, 400 * d) for d in (1, 2, 4, 8))


@pytest.mark.parametrize(("tokens", "width"), [(399, 1), (500, 2), (1500, 4), (3000, 8)])
def test_a_long_request_gets_as_many_engines_as_it_needs(tokens: int, width: int) -> None:
    seen = node(DP, BUSY, pool=(request("long", total=tokens),), layouts=LAYOUTS)
    wanted = target(seen)
    assert max(unit.size for unit in wanted or DP) == width
    assert sum(g.is_group for g in wanted or DP) == (width > 1)


def test_a_long_request_gets_no_pipeline() -> None:
    layouts = tuple(
        LayoutState(of, 4, 30, 4 * of.world_size, 120 * of.world_size)
        for of in layouts_up_to(8, max_pp=2)
    )
    made = target(node(DP, BUSY, pool=(request("long", total=200),), layouts=layouts))
    assert {group.layout for group in made} == {Layout(), Layout(tp=2)}


def test_the_group_stays_while_its_long_request_runs() -> None:
    seen = node(MIXED, BUSY, layouts=LAYOUTS)
    units = (replace(seen.units[0], longest_tokens=1500), *seen.units[1:])
    assert target(replace(seen, units=units)) is None
    assert target(seen) == DP


def test_no_group_has_a_dead_engine() -> None:
    seen = node(DP, BUSY, since_urgent=0.0, dead=frozenset({0}))
    assert target(seen) == (alone(0), alone(1), alone(2), alone(3), tp(4, 5, 6, 7))


# --- SP ---

PROMPTS = {"prompt_tokens": 8000.0, "output_tokens": 100.0}
ANSWERS = {"prompt_tokens": 100.0, "output_tokens": 2000.0}
LOADED = {"cost_model": MODEL, "sp_above": tuple((layout, 512) for layout in layouts_up_to(8)[1:])}
SEATS = tuple(LayoutState(Layout(tp=d), 32, 50_000, 4 * d, 4000) for d in (1, 2, 4, 8))


# Requests per second that TP8 ends with every seat taken; their prompts are next to nothing.
FULL = 32 / (2000 * MODEL.step_seconds(Layout(tp=8), Batch(32, 32 * 1100)))


def answers(partition, requests: int, part: float, **fields) -> Snapshot:
    """Return a node that is asked for this part of what TP8 can answer."""
    known = {"layouts": SEATS, **ANSWERS, **LOADED, **fields}
    return node(partition, requests, arrival_rate=part * FULL, **known)


def test_groups_that_run_sp_are_kept_until_the_requests_that_come_fill_them() -> None:
    assert target(answers(TP, BUSY, 1.0)) == DP
    assert target(answers(TP, BUSY, 0.75)) is None
    in_tp = {"sp_above": ()}
    assert target(answers(TP, BUSY, 0.75, **in_tp)) == DP
    unknown = {"cost_model": None}
    assert target(answers(TP, BUSY, 0.75, **unknown)) == DP


def test_they_are_left_earlier_while_requests_grow() -> None:
    growing = {"smoothed_requests": 0.0, "since_switch": 0.0}
    assert target(answers(TP, RISING, 0.75, **growing)) == DP
    assert target(answers(TP, RISING, 0.6, **growing)) is None


def test_they_are_left_when_no_seat_is_free() -> None:
    seen = answers(TP, BUSY, 0.5, pool=(request("r"),))
    assert target(seen) is None
    assert target(replace(seen, units=tuple(replace(u, free_slots=0) for u in seen.units))) == DP


def test_they_are_kept_where_dp_is_hardly_faster() -> None:
    """All that runs would be computed again."""
    full = {**PROMPTS, **LOADED, "arrival_rate": 1000.0}
    assert target(node(TP, BUSY, **full)) is None
    assert target(node(TP, BUSY, **{**full, "sp_above": ()})) == DP


def test_they_are_kept_where_dp_would_wait_for_weights_of_others() -> None:
    """A full batch of DP has 32 tokens a step, and reading half of the MLPs takes longer."""
    shared = replace(MODEL, shape=replace(MODEL.shape, sharable_bytes=5.6e10), share_weights=2)
    in_tp = {"sp_above": ()}
    assert target(answers(TP, BUSY, 1.0, **in_tp)) == DP
    assert target(answers(TP, BUSY, 1.0, cost_model=shared, **in_tp)) is None
    assert target(answers(DP, BUSY, 1.0, cost_model=shared, **in_tp)) is None, "not quiet"


def test_a_layout_is_as_full_as_its_kv_allows() -> None:
    few = tuple(replace(seats, total_blocks=540) for seats in SEATS)
    assert target(answers(TP, BUSY, 1.0, layouts=few)) is None, "one seat in DP, eight in TP8"


SHORT = {
    "prompt_tokens": 300.0,
    "output_tokens": 500.0,
    "layouts": tuple(LayoutState(Layout(tp=d), 256, 50_000, 4 * d, 4000) for d in (1, 2, 4, 8)),
    **LOADED,
    "cost_model": replace(MODEL, hardware=replace(MODEL.hardware, sp_layer_host_seconds=5e-4)),
}
"""A prompt makes a step in SP of a full batch, 556 tokens, but not of 212 requests."""


def carried(decodes: int, model: CostModel = SHORT["cost_model"]) -> float:
    """Return the requests per second that TP8 ends with so many in every batch, one by one."""
    seen = node(TP, **{**SHORT, "cost_model": model})

    def seconds(batch: Batch) -> float:
        return model.step_seconds(Layout(tp=8), batch, seen.mode(Layout(tp=8), batch))

    context = decodes * 550
    step = seconds(Batch(decodes, context))
    return 1 / (seconds(Batch(decodes, context, 300, 150)) - step + 500 * step / decodes)


def short(part: float, of: float) -> Snapshot:
    """Return a busy group that is asked for this part of so many short requests per second."""
    return node(TP, BUSY, **{**SHORT, "arrival_rate": part * of})


def test_they_are_as_full_as_the_batch_that_serves_most_lets_them_be() -> None:
    most = carried(212)
    assert 0.75 * most > SETTINGS.sp_full_above * carried(256), "a full batch would serve too few"
    assert target(short(0.75, most)) is None
    assert target(short(1.0, most)) == DP


def test_they_are_less_full_where_decodes_check_proposed_tokens() -> None:
    drafting = replace(SHORT["cost_model"], speculation=Speculation(drafts=0.5, seen=9))
    most, more, full = (carried(decodes, drafting) for decodes in (141, 142, 256))
    assert most > 1.04 * max(more, full), "so many run in TP beside a prompt"
    nearly = 0.98 * SETTINGS.sp_full_above
    assert target(replace(short(nearly, most), cost_model=drafting)) is None
    assert target(replace(short(1.0, most), cost_model=drafting)) == DP


def test_the_prompts_that_are_here_count_beside_those_that_were() -> None:
    most = carried(212)
    seen = replace(short(0.75, most), prompt_tokens=500.0)
    assert target(seen) is None, "nearly all are of 300 tokens"
    units = tuple(replace(u, context_tokens=500 * u.requests) for u in seen.units)
    assert target(replace(seen, units=units)) == DP


def test_the_way_back_is_open_when_they_would_have_room() -> None:
    assert target(answers(DP, QUIET, 0.5)) == TP
    assert target(answers(DP, QUIET, 0.8)) is None
    assert target(answers(DP, BUSY, 0.5)) is None, "too many would be computed again"


def test_the_way_back_is_open_while_prompts_keep_coming() -> None:
    tokens_per_second = PROMPT.prefill_tokens / MODEL.step_seconds(Layout(tp=8), PROMPT, Mode.SP)
    busy = {"prompt_rate": 0.5 * tokens_per_second}
    assert target(node(DP, QUIET, **busy, **PROMPTS, **LOADED)) == TP
    in_tp = {**LOADED, "sp_above": ()}
    assert target(node(DP, QUIET, **busy, **PROMPTS, **in_tp)) is None
