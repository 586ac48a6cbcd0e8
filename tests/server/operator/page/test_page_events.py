"""What the live page is told, of the views and metrics of a real controller."""

import json
from typing import Any

import msgspec
import pytest

from shoal.policies.registry import POLICIES
from shoal.runtime.protocol import messages as m
from shoal.server.operator.page.page_events import (
    Moment,
    Rates,
    event,
    key_of,
    moment,
    switch_event,
)
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.server.operator.page.parts import ABOUT

NOTHING = {"dp": (0, 0), "tp": (0, 0), "sp": (0, 0)}


@pytest.fixture
def node() -> LoopbackNode:
    node = LoopbackNode(2)
    node.settle()
    return node


def look(node: LoopbackNode, rates: Rates | None = None, now: float = 0.0) -> Moment:
    call = node.call(m.GetLayout, 8)
    node.turns(2)
    layout = node.reply(call)
    assert isinstance(layout, m.LayoutView)
    call = node.call(m.GetMetrics)
    node.turns(1)
    metrics = node.reply(call)
    assert isinstance(metrics, m.NodeMetrics)
    return moment(layout, metrics, now=now, at=1000.0 + now, rates=rates or Rates())


def test_engines_show_their_units_and_blocks(node: LoopbackNode) -> None:
    node.switch((0, 1))
    seen = look(node)
    assert seen.trace.engines == [("0,1", "tp2", "serving")] * 2
    assert [unit.engines for unit in seen.units] == [(0, 1)]
    for engine in seen.engines:
        assert engine.kv["lent"] > 0
        assert sum(engine.kv.values()) == 64
    assert (seen.ready, seen.policy) == (True, "manual")


def test_running_requests_are_named_and_paused_ones_too(node: LoopbackNode) -> None:
    node.send("urgent", max_tokens=60, priority=-5)
    node.send("other", max_tokens=60)
    node.turns(8)
    running = [request for unit in look(node).units for request in unit.requests]
    assert sorted(running) == sorted([(key_of("urgent"), -5, False), (key_of("other"), 0, False)])
    node.switch((0, 1))
    (unit,) = look(node).units
    assert sorted(unit.requests) == sorted([(key, priority, True) for key, priority, _ in running])
    assert unit.paused == 2


def test_no_more_requests_are_named_than_asked_for(node: LoopbackNode) -> None:
    for k in range(12):
        node.send(f"r{k}", max_tokens=20)
    node.turns(8)
    for named in (0, 2):
        call = node.call(m.GetLayout, named)
        node.turns(2)
        view = node.reply(call)
        assert isinstance(view, m.LayoutView)
        assert [len(unit.requests) for unit in view.units] == [named, named]


def test_a_dead_and_a_drained_engine_show_it(node: LoopbackNode) -> None:
    node.call(m.DrainEngines, [0], True)
    node.settle()
    assert look(node).trace.engines[0] == ("0", "dp", "drained")
    node.call(m.DrainEngines, [0], False)
    node.kill(1)
    node.settle()
    seen = look(node)
    assert seen.trace.engines == [("0", "dp", "serving"), ("1", "dp", "dead")]
    assert seen.engines[1].reason == "killed"


def test_it_is_told_how_engines_share_weights(node: LoopbackNode) -> None:
    assert look(node).sharing == ""
    settings = msgspec.structs.replace(SMALL, whole_blocks=40, max_model_len=100)
    shared = LoopbackNode(2, settings=settings, share_weights=2)
    shared.settle()
    assert look(shared).sharing == "weights shared by 2 engines"
    shared.call(m.ChangeMemory, 1)
    shared.settle()
    assert look(shared).sharing == "whole weights; last change 2 → 1 (manual): 0.0 s"


def test_the_pool_is_counted_by_priority(node: LoopbackNode) -> None:
    for k in range(2 * SMALL.max_num_seqs):
        node.send(f"runs-{k}", max_tokens=6, priority=-9)
    for priority, count in ((-1, 1), (0, 2), (1, 3)):
        for k in range(count):
            node.send(f"waits-{priority}-{k}", prompt_tokens=200, priority=priority)
    node.controller.turn()
    node.clock.advance(2.0)
    seen = look(node)
    assert seen.trace.waiting == {"urgent": 1, "normal": 2, "background": 3}
    assert seen.oldest == {"urgent": 2.0, "normal": 2.0, "background": 2.0}


def test_rates_are_means_over_some_seconds() -> None:
    rates = Rates()
    assert rates.take(0.0, NOTHING) == NOTHING
    assert rates.take(0.5, {**NOTHING, "tp": (100, 10)})["tp"] == (200, 20)
    assert rates.take(1.0, {**NOTHING, "tp": (100, 30)})["tp"] == (100, 30)
    assert rates.take(4.0, {**NOTHING, "tp": (100, 60)})["tp"] == (0, 10)
    assert rates.take(8.0, NOTHING) == NOTHING  # an engine was restarted


def test_rates_come_of_the_node_s_own_counts(node: LoopbackNode) -> None:
    rates = Rates()
    look(node, rates)
    node.send("r", prompt_tokens=10, max_tokens=8)
    node.settle()
    prompt, output = look(node, rates, now=1.0).trace.tokens["dp"]
    assert prompt + output == pytest.approx(17)


def test_a_switch_is_told_as_the_admin_api_answers_it(node: LoopbackNode) -> None:
    told = parsed(switch_event(node.switch((0, 1))))
    assert told["event"] == "switch"
    assert (told["data"]["before"], told["data"]["after"]) == ([[0], [1]], [[0, 1]])
    assert told["data"]["requests"]["carried"] == 0


def test_an_event_is_one_line_of_data_whatever_it_holds() -> None:
    text = "a\n\nevent: moment\ndata: {}\r\n"
    assert parsed(event("trouble", {"error": text}))["data"] == {"error": text}
    assert event("trouble", {"error": text}).count(b"\n") == 3


def test_all_policies_are_on_offer() -> None:
    assert ABOUT.policies.keys() == POLICIES.keys()
    assert not ABOUT.policies["manual"]
    assert ABOUT.policies["static-dp"]


def parsed(told: bytes) -> dict[str, Any]:
    head, data, *rest = told.decode().split("\n")
    assert rest == ["", ""]
    assert data.startswith("data: ")
    return {"event": head.removeprefix("event: "), "data": json.loads(data.removeprefix("data: "))}
