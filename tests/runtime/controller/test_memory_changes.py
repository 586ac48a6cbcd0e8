"""Changes of memory between weights and KV: the protocol, with fake engines and their deaths."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.static import dispatch_least_loaded
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout, alone
from shoal.policies.values.level import Level
from shoal.policies.values.plan import Plan, Policy, ShareReason
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.prompt_hashes import prompt_hashes
from shoal.runtime.controller.memory_changes import FILL_SECONDS, RETRY_SECONDS, USE_SECONDS
from shoal.runtime.controller.share_levels import LOOK_SECONDS
from shoal.runtime.engine.fake.fake_backend import WHOLE_BYTES
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults, Seam
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages.views import MemoryView
from tests.policies.snapshots import MODEL as UNSHARED
from tests.runtime.loopback_node import LoopbackNode, problems, request_payload
from tests.units import tp

ALL, LEFT, LEFT_BY_STAGES = 64, 40, 52
SETTINGS = FakeSettings(
    num_blocks=ALL,
    whole_blocks=LEFT,
    stage_blocks={2: LEFT_BY_STAGES},
    block_tokens=4,
    max_num_seqs=8,
    max_model_len=150,
)
PAIR = tp(0, 1)
MODEL = replace(
    UNSHARED, shape=replace(UNSHARED.shape, sharable_bytes=5.6e10), share_weights=2, max_sp=2
)


def node_of(
    faults: dict[int, Faults] | None = None,
    settings: FakeSettings = SETTINGS,
    share: int = 2,
    **fields: Any,
) -> LoopbackNode:
    node = LoopbackNode(
        2,
        settings=settings,
        faults=faults,
        share_weights=share,
        restart_limit=9,
        max_retries=9,
        **fields,
    )
    node.settle()
    return node


def reply(node: LoopbackNode, call: int) -> m.FromController | None:
    node.settle()
    return node.reply(call)


def change(node: LoopbackNode, share: int, stages: int = 1) -> MemoryView:
    answer = reply(node, node.call(m.ChangeMemory, share, stages))
    assert isinstance(answer, m.MemoryChanged), answer
    return answer.change


def refused(node: LoopbackNode, share: int, stages: int = 1) -> tuple[int, str]:
    answer = reply(node, node.call(m.ChangeMemory, share, stages))
    assert isinstance(answer, m.CallFailed), answer
    return answer.status, answer.error


def blocks(node: LoopbackNode) -> list[int]:
    """Return the KV blocks that each engine's pool has, as it counts them itself: all are free."""
    return [node.backends[engine].own.load.free_blocks for engine in sorted(node.backends)]


def shown(node: LoopbackNode) -> list[tuple[int, int, int]]:
    return [(e.share_weights, e.num_blocks, e.weight_bytes) for e in node.view().engines]


WHOLE = (1, LEFT, WHOLE_BYTES)
SHARED = (2, ALL, WHOLE_BYTES // 2)


def assert_whole(node: LoopbackNode) -> None:
    assert shown(node) == [WHOLE, WHOLE]
    assert node.view().share_weights == 1
    assert blocks(node) == [LEFT, LEFT]
    assert node.audit() == []


def assert_shared(node: LoopbackNode) -> None:
    assert [(level, size) for level, size, _ in shown(node)] == [(2, ALL), (2, ALL)]
    assert node.view().share_weights == 2
    assert blocks(node) == [ALL, ALL]
    assert node.audit() == []


# --- what a change does ---------------------------------------------------------------------------


def test_kv_blocks_become_weights_and_come_back() -> None:
    node = node_of()
    assert_shared(node)
    view = change(node, 1)
    assert (view.before, view.after, view.num_blocks, view.outcome) == (2, 1, LEFT, "done")
    assert list(view.stages) == ["closing", "filling", "using"]
    assert sum(view.stages.values()) == pytest.approx(view.duration_seconds)
    assert_whole(node)
    view = change(node, 2)
    assert (view.before, view.after, view.num_blocks) == (1, 2, ALL)
    assert list(view.stages) == ["using", "opening"]
    assert sum(view.stages.values()) == pytest.approx(view.duration_seconds)
    assert shown(node) == [SHARED, SHARED]
    assert_shared(node)
    assert [past.after for past in node.view().memory_changes] == [1, 2]
    assert node.value("shoal_memory_changes_total", outcome="done", reason="manual") == 2


def test_the_level_that_a_node_has_is_no_change() -> None:
    node = node_of()
    assert change(node, 2).engines == []
    assert node.view().memory_changes == []


def test_requests_that_hold_blocks_which_go_are_computed_again() -> None:
    node = node_of()
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=40, max_tokens=30)
    node.turns(6)
    node.collect()
    assert node.tokens
    view = change(node, 1)
    assert view.preempted > 0
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert_whole(node)
    assert node.value("shoal_memory_preempted_requests_total") == view.preempted


@pytest.mark.parametrize("group", [False, True], ids=["alone", "in a group"])
def test_requests_keep_their_kv_where_there_is_room(group: bool) -> None:
    node = node_of()
    if group:
        node.switch(PAIR)
    short = [f"short{number}" for number in range(4)]
    for name in short:  # they take the first blocks: about as many as are left
        node.send(name, prompt_tokens=100 if group else 50, max_tokens=60)
    node.turns(6)
    kept = [f"kept{number}" for number in range(3)]
    for name in kept:
        node.send(name, prompt_tokens=20, max_tokens=60)
    node.turns(6)
    for name in short:
        node.abort(name)
    core = node.backends[0].cores[PAIR if group else alone(0)]
    node.turns(2)
    assert core.holders(LEFT), "there is nothing to move"
    assert change(node, 1).preempted == 0
    node.settle()
    node.collect()
    assert all(name in node.finish for name in kept)
    node.assert_exact()
    if not group:
        assert_whole(node)


def test_a_groups_requests_lose_blocks_of_its_members() -> None:
    node = node_of()
    node.switch(PAIR)
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=60, max_tokens=60)
    node.turns(8)
    call = node.call(m.ChangeMemory, 1)
    node.turns(40)
    answer = reply(node, call)
    assert isinstance(answer, m.MemoryChanged)
    assert answer.change.preempted > 0
    assert node.missing == []
    node.assert_exact()
    node.switch([0], [1])
    node.settle()
    assert_whole(node)
    change(node, 2)
    assert_shared(node)


def test_an_engine_may_have_lent_more_than_it_keeps() -> None:
    node = node_of()
    books = node.controller.books
    node.switch(PAIR)
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=60, max_tokens=60)
    while books.leases.lent_by(0).get(PAIR, 0) <= LEFT:
        node.turns(1)
    (frame,) = request_payload("cached", [1000] * 300, 1)
    books.prefixes.use(prompt_hashes(wire.decode_request([frame])), alone(0))
    call = node.call(m.ChangeMemory, 1)
    assert isinstance(reply(node, call), m.MemoryChanged)
    assert books.prefixes.tokens(alone(0)) == 0
    assert node.missing == []
    node.assert_exact()


def test_paused_requests_lose_blocks_too() -> None:
    node = node_of()
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=40, max_tokens=60)
    node.turns(6)
    node.switch(PAIR)  # those of the engines alone are paused, with their KV
    assert change(node, 1).preempted > 0
    node.switch([0], [1])
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert_whole(node)


def test_requests_go_on_while_weights_are_copied() -> None:
    node = node_of()
    answers: list[m.WeightsFilled] = []
    _hold(node, m.WeightsFilled, answers)
    call = node.call(m.ChangeMemory, 1)
    node.settle()
    assert node.reply(call) is None
    assert len(answers) == 2
    node.send("new", prompt_tokens=10, max_tokens=8)
    node.settle()
    assert node.missing == []


def _hold(node: LoopbackNode, kind: type, held: list) -> None:  # type: ignore[type-arg]
    """Keep answers of a kind from the controller."""
    handle = node.controller._operations.memory.handle

    def hold(message: m.MemoryAnswer) -> bool:
        if isinstance(message, kind):
            held.append(message)
            return True
        return handle(message)

    node.controller._operations.memory.handle = hold  # type: ignore[method-assign]


def test_the_steps_of_each_level_are_learned_apart() -> None:
    settings = msgspec.structs.replace(SETTINGS, step_seconds=0.01)
    node = node_of(settings=settings, cost_model=MODEL)
    for level, streams in ((2, [True]), (1, [False, True])):
        change(node, level)
        model = _model_after(node, f"at {level}")
        assert model.share_weights == level
        assert sorted({correction.streams for correction in model.corrections}) == streams


def test_an_engine_that_has_not_followed_teaches_what_its_own_level_takes() -> None:
    settings = msgspec.structs.replace(SETTINGS, step_seconds=0.01)
    node = node_of(settings=settings, cost_model=MODEL)
    change(node, 1)
    node.controller.books.engines.have_level(0, Level(2), WHOLE_BYTES)
    node.controller._operations.memory._retry_at = math.inf
    assert all(correction.streams for correction in _model_after(node, "early").corrections)


def _model_after(node: LoopbackNode, request_id: str) -> CostModel:
    """Return the cost model after a request whose steps take 10 ms each."""
    node.send(request_id, prompt_tokens=10, max_tokens=30)
    for _ in range(60):
        node.turns(4)
        node.collect()
        node.clock.advance(0.01)
    assert node.missing == []
    model = node.controller._capacity.costs.model
    assert model is not None
    return model


def test_the_shift_follows_what_steps_in_sp_read_from_others() -> None:
    node = node_of(cost_model=MODEL, max_sp=2, shift_threshold=4)
    (shared,) = node.view().shift.sp_above.values()
    assert node.view().hidden_above == {"dp": MODEL.hidden_above(DP)}
    change(node, 1)
    (whole,) = node.view().shift.sp_above.values()
    assert node.view().hidden_above == {}
    assert (shared > 100, whole) == (True, 4)
    change(node, 2)
    assert list(node.view().shift.sp_above.values()) == [shared]


# --- whole stages ---------------------------------------------------------------------------------


def assert_stages(node: LoopbackNode) -> None:
    taken = WHOLE_BYTES // 2 + WHOLE_BYTES // 4
    assert shown(node) == [(2, LEFT_BY_STAGES, taken)] * 2
    view = node.view()
    assert (view.share_weights, view.share_stages) == (2, 2)
    assert [engine.share_stages for engine in view.engines] == [2, 2]
    assert blocks(node) == [LEFT_BY_STAGES] * 2
    labels = {"engine": "1", "shared_by": "2"}
    values = [node.value("shoal_engine_weight_bytes", stages=n, **labels) for n in ("1", "2")]
    assert values == [0, taken]
    assert node.audit() == []


def test_stages_become_whole_and_are_shared_again() -> None:
    node = node_of(max_pp=2)
    view = change(node, 2, 2)
    assert (view.before, view.before_stages, view.after, view.after_stages) == (2, 1, 2, 2)
    assert (view.num_blocks, list(view.stages)) == (LEFT_BY_STAGES, ["closing", "filling", "using"])
    assert view.line().startswith(
        "memory 1: weights shared by 2 -> 2 with whole stages of pp2 on engines [0, 1] (manual)"
    )
    assert_stages(node)
    assert change(node, 2, 2).engines == []
    view = change(node, 2)
    assert (view.before, view.before_stages, view.after, view.after_stages) == (2, 2, 2, 1)
    assert list(view.stages) == ["using", "opening"]
    assert_shared(node)


def test_from_whole_weights_to_whole_stages_the_way_leads_over_shared_weights() -> None:
    node = node_of(max_pp=2)
    stages = ["using", "opening", "closing", "filling"]
    for level, before, check in (
        ((1, 1), (2, 1), assert_whole),
        ((2, 2), (1, 1), assert_stages),
        ((1, 1), (2, 2), assert_whole),
    ):
        requests = [f"{level} {before} {number}" for number in range(8)]
        for name in requests:
            node.send(name, prompt_tokens=40, max_tokens=30)
        node.turns(6)
        view = change(node, *level)
        assert (view.before, view.before_stages) == before
        assert list(view.stages) == (
            stages if before != (2, 1) else ["closing", "filling", "using"]
        )
        node.settle()
        node.collect()
        assert node.missing == []
        check(node)
    node.assert_exact()
    assert [past.reason for past in node.view().memory_changes] == ["manual"] * 3


def test_nothing_starts_on_the_way_that_would_not_fit_at_its_end() -> None:
    node = node_of(max_pp=2)
    change(node, 2, 2)
    held: list[m.WeightsUsed] = []
    _hold(node, m.WeightsUsed, held)
    node.call(m.ChangeMemory, 1)
    node.settle()
    assert [level for _, level, _ in shown(node)] == [LEFT, LEFT], "the engines have more yet"
    change_of = node.controller._operations.memory
    del change_of.handle  # type: ignore[method-assign]
    for message in held:
        change_of.handle(message)
    node.settle()
    assert_whole(node)


def test_a_change_over_shared_weights_that_fails_ends_there() -> None:
    node = node_of(max_pp=2)
    change(node, 1)
    node.backends[1].faults = Faults(wrong_copy=True)
    assert refused(node, 2, 2) == (500, "engine 1: a copy was damaged on purpose")
    assert_shared(node)
    assert node.view().memory_changes[-1].line().endswith("0 requests preempted")
    node.backends[1].faults = NO_FAULTS
    change(node, 2, 2)
    assert_stages(node)


def test_an_engine_that_comes_back_gets_its_stage_whole_as_the_others_have() -> None:
    node = node_of(max_pp=2)
    change(node, 2, 2)
    node.kill(1)
    node.settle()
    assert [engine.share_stages for engine in node.view().engines] == [2, 2]
    node.restart(1)
    node.settle()
    assert_stages(node)
    rejoin = node.view().memory_changes[-1]
    assert (rejoin.reason, rejoin.before_stages, rejoin.after_stages) == ("rejoin", 1, 2)


@pytest.mark.parametrize("seam", [Seam.CLOSE, Seam.FILL, Seam.USE])
@pytest.mark.parametrize("start", [1, 2])
def test_a_change_to_whole_stages_goes_on_without_an_engine_that_dies(
    seam: Seam, start: int
) -> None:
    node = node_of(max_pp=2)
    if start == 1:
        change(node, 1)
    node.backends[1].faults = Faults(die_at=seam)
    node.backends[1].own._around = _with_faults(node, 1, seam)
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=40, max_tokens=30)
    node.turns(6)
    call = node.call(m.ChangeMemory, 2, 2)
    node.settle()
    node.kill(1)
    assert isinstance(reply(node, call), m.MemoryChanged)
    _bring_back(node)
    assert node.missing == []
    node.assert_exact()
    assert_stages(node)


def test_policies_are_told_of_whole_stages_and_get_them() -> None:
    seen: list[Snapshot] = []

    def plan(snapshot: Snapshot, /) -> Plan:
        seen.append(snapshot)
        found = Plan(dispatch_least_loaded(snapshot))
        levels = {level.level for level in snapshot.share_levels}
        if Level(2, 2) not in levels:
            return found
        return replace(found, share_weights=2, share_stages=2, share_reason="steps")

    node = decided(Policy("stages", plan, decides_layout=False), max_pp=2)
    assert_stages(node)
    before = next(snapshot for snapshot in seen if snapshot.share_levels)
    offered = {level.level: level for level in before.share_levels}
    assert set(offered) == {Level(1), Level(2, 2)}
    assert (before.level, seen[-1].level) == (Level(2), Level(2, 2))
    stages = offered[Level(2, 2)]
    dp = next(state for state in stages.layouts if state.layout == DP)
    assert dp.total_blocks == LEFT_BY_STAGES
    assert isinstance(stages.cost_model, CostModel)
    assert not stages.cost_model.streams(Layout(pp=2))
    assert stages.cost_model.streams(DP)
    assert node.controller._capacity.costs.model.level == Level(2, 2)
    node.clock.advance(LOOK_SECONDS)
    node.send("later")
    node.settle()
    assert {level.level for level in seen[-1].share_levels} == {Level(1), Level(2)}


@pytest.mark.parametrize(
    ("share", "stages", "why"),
    [
        (2, 4, "this node has no pipeline of 4 stages of one engine each (--max-pp 2)"),
        (1, 2, "with 1, engines have all layers whole; stages go with share_weights 2"),
        (4, 2, "this node can change between 1 and 2 only (--share-weights 2)"),
    ],
)
def test_stages_that_a_node_cannot_have_are_refused_by_name(
    share: int, stages: int, why: str
) -> None:
    node = node_of(max_pp=2)
    assert refused(node, share, stages) == (400, f"share_weights {share}, stages {stages}: {why}")


def test_engines_that_cannot_have_whole_stages_say_why() -> None:
    only_whole = msgspec.structs.replace(SETTINGS, stage_blocks={})
    node = node_of(settings=only_whole, max_pp=2)
    assert refused(node, 2, 2) == (
        409,
        "share_weights 2, stages 2: engine 0: this fake engine cannot have these weights whole",
    )
    only_stages = msgspec.structs.replace(SETTINGS, whole_blocks=0)
    node = node_of(settings=only_stages, max_pp=2)
    assert refused(node, 1)[0] == 409
    change(node, 2, 2)
    assert_stages(node)


# --- what the policy decides ---


def asking(share: int, reason: ShareReason = "steps") -> Policy:
    """Return a policy that wants a level whenever it can."""

    def plan(seen: Snapshot, /) -> Plan:
        can = share in [level.share for level in seen.share_levels]
        found = Plan(dispatch_least_loaded(seen))
        return replace(found, share_weights=share, share_reason=reason) if can else found

    return Policy(f"asks for {share}", plan, decides_layout=False)


def decided(policy: Policy, faults: dict[int, Faults] | None = None, **fields: Any) -> LoopbackNode:
    """Return a node whose policy this is from now on."""
    node = node_of(faults, cost_model=MODEL, **{"move_memory": True} | fields)
    node.controller._adviser.policy = policy
    node.send("first")
    node.settle()
    return node


def test_a_policy_gets_the_level_that_it_wants() -> None:
    node = decided(asking(1))
    assert_whole(node)
    (past,) = node.view().memory_changes
    assert (past.reason, past.before, past.after, past.outcome) == ("steps", 2, 1, "done")
    assert node.view().share_decided_by == "policy"
    assert node.value("shoal_memory_changes_total", outcome="done", reason="steps") == 1
    node.controller._adviser.policy = asking(2, "kv")
    node.clock.advance(LOOK_SECONDS)
    node.settle()
    assert_shared(node)
    assert [past.reason for past in node.view().memory_changes] == ["steps", "kv"]
    assert node.missing == []


def test_what_policies_are_told_of_levels() -> None:
    seen: list[Snapshot] = []

    def look(snapshot: Snapshot, /) -> Plan:
        seen.append(snapshot)
        return Plan(dispatch_least_loaded(snapshot))

    node = decided(Policy("looks", look, decides_layout=True))
    (level,) = seen[-1].share_levels
    assert (seen[-1].share_weights, level.share) == (2, 1)
    assert [state.total_blocks for state in level.layouts] == [LEFT, LEFT]
    assert [state.total_blocks for state in seen[-1].layouts] == [ALL, ALL]
    step = Batch(decodes=1)
    now = seen[-1].cost_model
    assert now is not None
    assert level.cost_model.step_seconds(DP, step) < now.step_seconds(DP, step)
    assert node.missing == []


@pytest.mark.parametrize("fields", [{"move_memory": False}, {"share": 1}])
def test_policies_decide_nothing_unless_they_may(fields: dict[str, Any]) -> None:
    node = decided(asking(1), **fields)
    assert node.view().memory_changes == []


def test_what_an_operator_asks_for_counts_until_the_policy_may_decide_again() -> None:
    node = decided(asking(1))
    assert_whole(node)
    change(node, 2)
    node.run_for(60.0, tick=1.0)
    assert_shared(node)
    assert node.view().share_decided_by == "operator"
    assert change(node, m.POLICY_DECIDES).engines == []
    assert node.view().share_decided_by == "policy"
    node.clock.advance(LOOK_SECONDS)
    node.settle()
    assert_whole(node)


def test_the_policy_waits_after_a_change_that_failed() -> None:
    node = decided(asking(1), {1: Faults(wrong_copy=True)})
    assert [past.outcome for past in node.view().memory_changes] == ["failed"]
    node.run_for(RETRY_SECONDS - 1.0, tick=0.5)
    assert len(node.view().memory_changes) == 1
    node.run_for(2.0, tick=0.5)
    assert len(node.view().memory_changes) == 2
    assert_shared(node)


@pytest.mark.parametrize("seam", [Seam.CLOSE, Seam.FILL, Seam.USE])
def test_a_policys_change_goes_on_without_an_engine_that_dies(seam: Seam) -> None:
    node = decided(asking(1), {1: Faults(die_at=seam)})
    node.kill(1)
    node.settle()
    (past,) = node.view().memory_changes
    assert (past.outcome, past.reason) == ("done", "steps")
    _bring_back(node)
    assert node.missing == []
    node.assert_exact()
    assert_whole(node)


# --- what is refused ------------------------------------------------------------------------------


def test_levels_that_a_node_cannot_have_are_refused_by_name() -> None:
    assert refused(node_of(), 4) == (
        400,
        "share_weights 4: this node can change between 1 and 2 only (--share-weights 2)",
    )
    status, error = refused(node_of(share=1), 2)
    assert (status, error[:60]) == (
        400,
        "share_weights 2: this node was started without --share-weights"[:60],
    )
    assert change(node_of(share=1), 1).engines == []


def test_engines_that_cannot_have_whole_weights_say_why() -> None:
    fixed = FakeSettings(num_blocks=ALL, block_tokens=4, max_model_len=150)
    assert refused(node_of(settings=fixed), 1) == (
        409,
        "share_weights 1: engine 0: this fake engine cannot have these weights whole",
    )


def test_too_little_kv_for_the_longest_request_is_refused() -> None:
    long = FakeSettings(
        num_blocks=ALL, whole_blocks=LEFT, block_tokens=4, max_num_seqs=8, max_model_len=400
    )
    assert refused(node_of(settings=long), 1) == (
        409,
        (
            "share_weights 1 leaves 40 KV blocks on each engine, which hold requests of 320 "
            "tokens, and requests may have 400"
        ),
    )


def test_too_little_kv_for_a_request_that_runs_is_refused() -> None:
    settings = FakeSettings(
        num_blocks=ALL, whole_blocks=LEFT, block_tokens=4, max_num_seqs=8, max_model_len=300
    )
    node = node_of(settings=settings)
    node.send("long", prompt_tokens=150, max_tokens=50)
    node.turns(4)
    call = node.call(m.ChangeMemory, 1)
    node.controller.turn()
    answer = node.reply(call)
    assert isinstance(answer, m.CallFailed)
    assert answer.status == 409
    assert "too few for a request that runs on unit [" in answer.error
    assert_shared_after(node)


def assert_shared_after(node: LoopbackNode) -> None:
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert_shared(node)


def test_one_operation_at_a_time() -> None:
    node = node_of()
    held: list[m.WeightsFilled] = []
    _hold(node, m.WeightsFilled, held)
    first = node.call(m.ChangeMemory, 1)
    node.settle()
    assert refused(node, 2) == (409, "a change of memory is running: ask again when it is over")
    switch = node.set_layout(PAIR)
    node.settle()
    assert node.reply(switch) is None, "it waits for its turn"
    del node.controller._operations.memory.handle  # type: ignore[method-assign]
    for message in held:
        node.controller._operations.memory.handle(message)
    assert isinstance(reply(node, first), m.MemoryChanged)
    assert isinstance(reply(node, switch), m.SwitchDone)


def test_a_change_is_refused_while_a_switch_runs() -> None:
    node = node_of()
    node.set_layout(PAIR)
    node.controller.turn()
    assert node.controller._operations.switches.running is not None
    call = node.call(m.ChangeMemory, 1)
    node.controller.turn()
    assert node.reply(call) == m.CallFailed(
        call, 409, "a switch is running: ask again when it is over"
    )


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("seam", [Seam.CLOSE, Seam.FILL, Seam.USE])
def test_a_change_to_whole_weights_goes_on_without_an_engine_that_dies(
    seam: Seam, engine: int, grouped: bool
) -> None:
    node = node_of({engine: Faults(die_at=seam)})
    if grouped:
        node.switch(PAIR)
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=40, max_tokens=30)
    node.turns(6)
    call = node.call(m.ChangeMemory, 1)
    node.settle()
    node.clock.advance(1.0)
    for dead in set(node.backends) - set(node.agents):
        node.kill(dead)
    node.settle()
    answer = node.reply(call)
    if grouped and (seam is Seam.CLOSE or engine == 0):
        # The other member of the group has died with it, and nobody is left.
        assert isinstance(answer, m.CallFailed), answer
        assert answer.status == 503
    else:
        assert isinstance(answer, m.MemoryChanged), answer
    _bring_back(node)
    assert node.missing == []
    node.assert_exact()
    if isinstance(answer, m.MemoryChanged):
        assert_whole(node)
    else:
        assert_shared(node)
        change(node, 1)
        assert_whole(node)


@pytest.mark.parametrize("seam", [Seam.USE, Seam.OPEN])
def test_a_change_to_shared_weights_goes_on_without_an_engine_that_dies(seam: Seam) -> None:
    node = node_of()
    change(node, 1)
    node.backends[1].faults = Faults(die_at=seam)
    node.backends[1].own._around = _with_faults(node, 1, seam)
    call = node.call(m.ChangeMemory, 2)
    node.settle()
    node.kill(1)
    assert isinstance(reply(node, call), m.MemoryChanged)
    _bring_back(node)
    assert_shared(node)


def _with_faults(node: LoopbackNode, engine: int, seam: Seam):  # type: ignore[no-untyped-def]
    return replace(node.backends[engine].own._around, faults=Faults(die_at=seam))


def _bring_back(node: LoopbackNode) -> None:
    """Restart what is dead; engines that are back follow the others."""
    for engine in sorted(node.controller.books.engines.gone):
        node.restart(engine, faults=NO_FAULTS)
    node.settle()
    node.run_for(RETRY_SECONDS + 1.0, tick=1.0)
    node.switch([0], [1])
    node.settle()


def test_an_engine_that_comes_back_follows_the_others() -> None:
    node = node_of()
    change(node, 1)
    node.kill(1)
    node.settle()
    node.restart(1)
    node.settle()
    assert_whole(node)
    assert [past.reason for past in node.view().memory_changes] == ["manual", "rejoin"]


def test_copies_that_are_wrong_are_not_used() -> None:
    node = node_of({1: Faults(wrong_copy=True)})
    assert refused(node, 1) == (500, "engine 1: a copy was damaged on purpose")
    assert_shared(node)
    (past,) = node.view().memory_changes
    assert (past.outcome, past.after, past.num_blocks) == ("failed", 2, ALL)
    assert node.value("shoal_memory_changes_total", outcome="failed") == 1


@pytest.mark.parametrize(
    ("kind", "seconds", "text"),
    [
        (m.BlocksClosed, 6.0, "engines [0, 1] have not given up their KV blocks after 6 s"),
        (m.WeightsFilled, FILL_SECONDS, "engines [0, 1] have not copied their weights after"),
    ],
)
def test_a_change_that_takes_too_long_is_undone(kind: type, seconds: float, text: str) -> None:
    node = node_of()
    _hold(node, kind, [])
    call = node.call(m.ChangeMemory, 1)
    node.settle()
    node.clock.advance(seconds)
    answer = reply(node, call)
    assert isinstance(answer, m.CallFailed)
    assert answer.status == 504
    assert text in answer.error
    assert_shared(node)


def test_an_engine_that_died_with_less_kv_and_is_back_with_all_counts_with_all() -> None:
    node = node_of()
    before = node.controller.snapshot().layouts
    change(node, 1)
    node.kill(1)
    node.settle()
    change(node, 2)
    assert node.controller.snapshot().layouts != before, "it may come back with less"
    node.restart(1)
    node.settle()
    assert node.controller.snapshot().layouts == before


def test_an_engine_that_does_not_go_on_with_other_memory_is_lost() -> None:
    node = node_of()
    node.hung.add(1)
    change_call = node.call(m.ChangeMemory, 1)
    node.hung.discard(1)
    _hold(node, m.WeightsUsed, [])
    node.settle()
    node.clock.advance(USE_SECONDS)
    answer = reply(node, change_call)
    assert isinstance(answer, m.CallFailed)
    assert (answer.status, answer.error) == (503, "engines [0, 1] are lost")


def test_an_engine_that_goes_on_to_use_what_it_gave_up_is_found() -> None:
    """The negative control of what the other tests assert of blocks."""
    node = node_of({0: Faults(keep_blocks=True)})
    change(node, 1)
    assert blocks(node) == [ALL, LEFT]
    with pytest.raises(AssertionError):
        assert_whole(node)


# --- an engine's part -----------------------------------------------------------------------------


def test_blocks_that_go_are_not_lent_again_when_they_come_back() -> None:
    """Otherwise a group that wants blocks gets those that it has just returned, for ever."""
    node = node_of()
    node.switch(PAIR)
    for number in range(8):
        node.send(f"r{number}", prompt_tokens=60, max_tokens=60)
    node.turns(12)
    own, send = node.backends[1].own, node.controller._transport.to_engine
    send(1, m.CloseBlocks(99, LEFT))
    node.turn_agent(1)
    lent = sorted(own.lent)
    assert lent[-1] > LEFT
    send(1, m.TakeBack(lent))
    send(1, m.Lend(m.AHEAD, PAIR, ALL, urgent=False))
    node.turn_agent(1)
    assert own.lent
    assert max(own.lent) <= LEFT


def test_blocks_that_go_hold_nothing_any_more() -> None:
    node = node_of()
    node.send("a", prompt_tokens=100, max_tokens=30)
    node.send("b", prompt_tokens=100, max_tokens=30)
    node.turns(4)
    change(node, 1)
    for backend in node.backends.values():
        assert backend.own.holders(LEFT) == []
        assert problems(backend) == []
    assert alone(0) in node.partition
