"""Running requests go to units that have less to do, once, whatever happens meanwhile."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.values.layouts import alone
from shoal.runtime.config import BACKGROUND_PRIORITY, FakeSettings
from shoal.runtime.controller.balancing import LOOK_SECONDS, STAY_SECONDS
from shoal.runtime.controller.books.carry_book import CarryStage
from shoal.runtime.controller.requests.spared_units import SparedUnits
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode

# Contexts decide the time of a step.
MODEL = CostModel(ModelShape(80, 8192, 64, 8, 128, parameters=1e6), Hardware(3e10, 1e15, 2e11))
ROOMY = FakeSettings(num_blocks=2000, block_tokens=4, max_num_seqs=64, max_model_len=1000)
PROMPT, LONG, SHORT = 40, 600, 3


def uneven_node(pairs: int = 6, engines: int = 2, **limits: Any) -> LoopbackNode:
    """Return a node on whose engine 0 only long requests are left, and nothing elsewhere."""
    options = {"settings": ROOMY, "cost_model": MODEL} | limits
    node = LoopbackNode(engines, **options)
    node.settle()
    for k in range(pairs * engines):
        node.send(f"r{k}", PROMPT, SHORT if k % engines else LONG)
    pass_time(node, 8)
    assert [len(held(node, e)) for e in range(engines)][1:] == [0] * (engines - 1)
    return node


def pass_time(node: LoopbackNode, turns: int, seconds: float = 0.0) -> None:
    """Let everybody have turns, during each of which so much time passes."""
    for _ in range(turns):
        node.clock.advance(seconds)
        node.turns(1)
        node.collect()


def held(node: LoopbackNode, engine: int) -> list[str]:
    return list(node.controller.books.requests.core(alone(engine)).requests)


def moved(node: LoopbackNode) -> float:
    return node.controller.books.statistics.carries.departures.total("balance")


def assert_all_well(node: LoopbackNode) -> None:
    """Everything ends with the right tokens, and nothing was computed twice."""
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert node.value("shoal_departures_total", reason="balance") == moved(node)
    assert node.value("shoal_carried_requests_total", outcome="recomputed") == 0
    assert node.audit() == []


def test_what_a_burst_leaves_on_one_engine_is_spread() -> None:
    node = uneven_node()
    assert len(held(node, 0)) == 6
    pass_time(node, 20, LOOK_SECONDS)
    assert [len(held(node, engine)) for engine in (0, 1)] == [3, 3]
    assert moved(node) == 3
    pass_time(node, 20, LOOK_SECONDS)
    assert moved(node) == 3
    assert_all_well(node)
    assert node.value("shoal_carried_requests_total", outcome="carried") == 3


def test_four_engines_share_what_one_has() -> None:
    node = uneven_node(8, engines=4)
    pass_time(node, 40, LOOK_SECONDS)
    assert [len(held(node, engine)) for engine in range(4)] == [2] * 4
    assert_all_well(node)


@pytest.mark.parametrize(
    ("rebalances", "priority", "goes"),
    [(True, 0, True), (False, 0, False), (True, BACKGROUND_PRIORITY, False)],
    ids=["on", "off", "a background request"],
)
def test_blocks_that_are_free_here_and_there_become_room_for_a_large_request(
    rebalances: bool, priority: int, goes: bool
) -> None:
    settings = msgspec.structs.replace(ROOMY, num_blocks=400, max_model_len=2000)
    node = LoopbackNode(2, settings=settings, cost_model=MODEL, rebalance=rebalances)
    node.settle()
    for k in range(6):
        node.send(f"r{k}", 200, 200)
    pass_time(node, 4)
    node.send(
        "large", 1100, 100, priority=priority
    )  # no engine has 276 free blocks, and both have some 240
    pass_time(node, 12, LOOK_SECONDS)
    assert moved(node) == goes
    sizes = [len(held(node, engine)) for engine in (0, 1)]
    assert sorted(sizes) == ([3, 4] if goes else [3, 3]), "none has ended"
    assert ("large" in held(node, 0) + held(node, 1)) == goes
    if priority == BACKGROUND_PRIORITY:
        pass_time(node, 200, 5.0)  # it may begin when people have been away for long
    assert_all_well(node)


def test_load_that_is_uneven_for_a_moment_is_left_alone() -> None:
    node = uneven_node()
    pass_time(node, 1, LOOK_SECONDS)  # it is seen once
    for k in range(3):
        node.abort(held(node, 0)[-1 - k])
    pass_time(node, 1)
    assert len(held(node, 0)) == 3
    for k in range(3):
        node.send(f"new-{k}", PROMPT, LONG)
    pass_time(node, 10, LOOK_SECONDS)
    assert moved(node) == 0


@pytest.mark.parametrize(
    "limits", [{"rebalance": False}, {"cost_model": None}], ids=["switched off", "no cost model"]
)
def test_it_can_be_switched_off_and_needs_a_cost_model(limits: dict[str, Any]) -> None:
    node = uneven_node(**limits)
    assert node.controller.next_wakeup() is None
    pass_time(node, 10, LOOK_SECONDS)
    assert moved(node) == 0
    assert len(held(node, 0)) == 6


def test_a_request_that_has_come_stays_for_a_while() -> None:
    node = uneven_node()
    pass_time(node, 6, LOOK_SECONDS)
    came = held(node, 1)
    assert len(came) == 3
    for request in held(node, 0):
        node.abort(request)
    pass_time(node, 4, LOOK_SECONDS)
    # They would gain if some of them went back.
    assert held(node, 1) == came
    assert moved(node) == 3
    pass_time(node, 4, STAY_SECONDS / 3)
    assert len(held(node, 0)) == 1
    assert_all_well(node)


def test_aborted_requests_are_gone_on_both_sides() -> None:
    node = uneven_node()
    going = until_moving(node, CarryStage.EXPORTING)
    node.abort(going[0])
    pass_time(node, 2)
    assert_all_well(node)
    assert node.outcomes[m.Outcome.ABORTED] == 1


@pytest.mark.parametrize("stage", [CarryStage.EXPORTING, CarryStage.IMPORTING])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_death_on_either_side_loses_nothing(dead: int, stage: CarryStage) -> None:
    node = uneven_node()
    until_moving(node, stage)
    node.kill(dead)
    pass_time(node, 3)
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []


def until_moving(node: LoopbackNode, stage: CarryStage) -> list[str]:
    """Go on until requests have come to a stage of their way; return them."""
    for _ in range(20):
        node.clock.advance(LOOK_SECONDS)
        for turn in (node.controller.turn, *(agent.turn for agent in node.agents.values())):
            turn()
            for carry in node.controller.books.carries:
                if carry.stage is stage:
                    return sorted(carry.ids)
    raise AssertionError("nothing moves")


@pytest.mark.parametrize("alone_here", [True, False], ids=["alone", "beside a person's"])
def test_background_requests_are_spread_only_if_there_are_no_others(
    alone_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparedUnits, "_costs", lambda *_: [0.0, 0.0, 0.0][: 2 + alone_here])
    node = LoopbackNode(2, settings=ROOMY, cost_model=MODEL)
    node.settle()
    for k in range(12):
        node.send(f"r{k}", PROMPT, SHORT if k % 2 else LONG, priority=BACKGROUND_PRIORITY)
    pass_time(node, 8)
    engine = 0 if held(node, 0) else 1
    assert [len(held(node, each)) for each in (engine, 1 - engine)] == [6, 0]
    if not alone_here:
        node.send("person", PROMPT, LONG)
        pass_time(node, 4)
        assert held(node, 1 - engine) == ["person"]
    pass_time(node, 20, LOOK_SECONDS)
    assert moved(node) == (3 if alone_here else 0)
    assert ("person" in held(node, 1 - engine)) == (not alone_here)


def test_an_operation_that_runs_comes_first() -> None:
    node = uneven_node()
    pass_time(node, 1, LOOK_SECONDS)
    node.hung = {1}
    call = node.call(m.SetLayout, [[0, 1]], m.Treatment.CARRY, 5.0)
    pass_time(node, 1)
    assert node.controller.switches is not None
    node.clock.advance(LOOK_SECONDS)
    node.controller.turn()
    assert moved(node) == 0
    node.hung = set()
    pass_time(node, 10)
    assert node.reply(call) is not None
    assert_all_well(node)


def test_moves_that_would_be_slow_are_not_made() -> None:
    slow = replace(MODEL, hardware=replace(MODEL.hardware, peer_bytes_per_second=1e5))
    node = uneven_node(cost_model=slow)
    pass_time(node, 10, LOOK_SECONDS)
    assert moved(node) == 0
