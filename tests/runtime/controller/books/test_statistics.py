"""The controller's metrics say what happened on the node, and what is on it now."""

import logging
from typing import get_args

import pytest

from shoal.policies.registry import POLICIES
from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.policies.values.plan import Plan, Policy, SwitchReason
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.statistics import BIND_OUTCOMES, REASONS, RELEASE_OUTCOMES
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.metrics import EngineGauges, Kind
from shoal.runtime.protocol.wire import Terms
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.units import tp

HARD, SOFT, SEQUENTIAL = m.Treatment.HARD, m.Treatment.SOFT, m.Treatment.SEQUENTIAL
ALONE = (alone(0), alone(1), alone(2), alone(3))


def started(engines: int = 4, **settings) -> LoopbackNode:
    node = LoopbackNode(engines, **settings)
    node.settle()
    return node


def busy(node: LoopbackNode, requests: int = 8, tokens: int = 40) -> None:
    for k in range(requests):
        node.send(f"busy-{k}", 10, tokens)
    node.turns(4)
    assert len(node.missing) == requests


def gauges(node: LoopbackNode) -> list[EngineGauges]:
    """Return what vLLM's gauges show now, without letting anything else happen first."""
    return next(
        reply
        for reply in ask(node, m.GetMetrics(99))
        if isinstance(reply, m.NodeMetrics) and reply.call == 99
    ).engines


def ask(node: LoopbackNode, message: m.Message) -> list[m.FromController]:
    replies = node.network.control_replies.setdefault("asker", [])
    replies.clear()
    node.network.control_sends("asker", message)
    node.controller.turn()
    return replies


# --- switches ---


def test_a_bind_and_a_release_are_counted_with_their_phases() -> None:
    node = started()
    node.switch(tp(0, 1), alone(2), alone(3), treatment=HARD)
    assert node.value("shoal_binds_total", outcome="done", reason="manual") == 1
    assert node.value("shoal_releases_total") == 0
    node.switch(*ALONE, treatment=HARD)
    assert node.value("shoal_releases_total", outcome="done", reason="manual") == 1
    assert node.value("shoal_binds_total") == 1
    assert node.value("shoal_switches_total", outcome="done", reason="manual") == 2
    assert node.value("shoal_switch_seconds", treatment="hard") == 2
    for phase in ("drain", "lease", "commit", "release", "resume"):
        assert node.value("shoal_switch_phase_seconds", phase=phase, layout="tp2") == 1, phase
    assert node.value("shoal_switch_phase_seconds", layout="tp4") == 0


def test_a_phase_lasts_as_long_as_it_does() -> None:
    node = started(2)
    node.hung = {1}
    call = node.set_layout(tp(0, 1))
    node.settle()
    node.clock.advance(0.7)
    node.hung = set()
    node.settle()
    assert isinstance(node.reply(call), m.SwitchDone)
    (drain,) = node.metric("shoal_switch_phase_seconds", phase="drain")
    assert drain.value == pytest.approx(0.7)
    (whole,) = node.metric("shoal_switch_seconds", treatment="hard")
    assert whole.value == pytest.approx(0.7)
    (commit,) = node.metric("shoal_switch_phase_seconds", phase="commit")
    assert commit.value == 0


def test_a_bind_that_is_given_up_is_aborted_and_has_no_phases() -> None:
    node = started()
    node.switch(tp(0, 1), alone(2), alone(3))
    node.hung = {3}
    node.set_layout(tp(0, 1, 2, 3))
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    # The pair was dissolved for it, and formed again.
    assert node.value("shoal_binds_total", outcome="aborted") == 1
    assert node.value("shoal_binds_total", outcome="done") == 2
    assert node.value("shoal_releases_total", outcome="done") == 1
    assert node.value("shoal_switches_total", outcome="failed") == 1
    assert node.value("shoal_switch_phase_seconds", layout="tp4") == 0


def test_a_member_that_dies_in_a_commit_loses_the_bind() -> None:
    node = started()
    node.set_layout(tp(0, 1), alone(2), alone(3))
    node.turns(1)
    node.hung = {1}
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert node.value("shoal_binds_total", outcome="lost") == 1
    assert node.value("shoal_binds_total", outcome="done") == 0


def test_a_release_is_kept_or_lost() -> None:
    node = started()
    node.switch(tp(0, 1, 2, 3))
    node.send("long", 10, 60)
    node.turns(2)
    node.set_layout(*ALONE, treatment=SEQUENTIAL, timeout=2.0)
    node.controller.turn()
    node.clock.advance(2.0)
    node.settle()
    assert node.value("shoal_releases_total", outcome="kept") == 1
    node.hung = {0}
    node.set_layout(*ALONE)
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert node.value("shoal_releases_total", outcome="lost") == 1
    assert node.value("shoal_releases_total", outcome="done") == 0


def test_requests_that_pause_resume_wait_and_move_are_counted() -> None:
    node = started()
    busy(node)
    node.switch(tp(0, 1), alone(2), alone(3), treatment=HARD)
    assert node.value("shoal_paused_requests_total") == 4
    assert node.value("shoal_resumed_requests_total") == 0
    node.switch(*ALONE, treatment=HARD)
    assert node.value("shoal_resumed_requests_total") == 4
    node = started()
    busy(node)
    node.switch(tp(0, 1, 2, 3), treatment=SOFT)
    assert node.value("shoal_moved_requests_total") == 8
    node = started()
    busy(node)
    node.switch(tp(0, 1, 2, 3), treatment=SEQUENTIAL)
    assert node.value("shoal_drained_requests_total") == 8


def test_every_series_of_a_switch_is_there_before_the_first() -> None:
    node = started()
    binds = {sample.labels for sample in node.metric("shoal_binds_total")}
    assert binds == {(outcome, reason) for outcome in BIND_OUTCOMES for reason in REASONS}
    releases = {sample.labels for sample in node.metric("shoal_releases_total")}
    assert releases == {(outcome, reason) for outcome in RELEASE_OUTCOMES for reason in REASONS}
    assert node.value("shoal_switch_phase_seconds", phase="drain", layout="tp4") == 0


def test_every_reason_of_a_policy_has_its_own_series() -> None:
    assert set(filter(None, get_args(SwitchReason))) < set(REASONS)


@pytest.mark.parametrize(("reason", "counted"), [("load", "load"), ("", "other"), ("x", "other")])
def test_the_reason_is_the_policys_and_an_unknown_one_makes_no_series(
    reason: str, counted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(snapshot):
        wanted = (tp(0, 1),)
        target = None if snapshot.switching or snapshot.partition == wanted else wanted
        return Plan(target=target, treatment="hard", reason=reason)  # type: ignore[arg-type]

    monkeypatch.setitem(POLICIES, "test", Policy("test", plan, decides_layout=True))
    with caplog.at_level(logging.INFO, "shoal"):
        node = started(2, policy="test")
    assert node.value("shoal_switches_total", outcome="done", reason=counted) == 1
    assert node.value("shoal_switches_total") == 1
    assert node.view().switches[0].reason == reason


def test_a_switch_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    node = started()
    busy(node)
    with caplog.at_level(logging.INFO, "shoal"):
        node.switch(tp(0, 1), alone(2), alone(3), treatment=HARD)
    (record,) = caplog.records
    assert record.getMessage() == (
        "switch 1: [0] [1] [2] [3] -> [0,1] [2] [3] (manual, hard) took 0.0 ms; requests: 4 paused"
    )
    assert record.fields["switch"].paused == 4  # type: ignore[attr-defined]
    node.hung = {2}
    caplog.clear()
    node.set_layout(tp(0, 1), tp(2, 3))
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert line.startswith("switch 3: [0,1] [2] [3] -> [0,1] [2] [3] (manual, hard) failed after 5")
    assert "engines [2] did not reach a safe point" in line


# --- requests ---


def test_a_request_queues_until_a_unit_has_it_and_once() -> None:
    node = started(2)
    node.send("normal", 10, 40, priority=0)
    node.send("urgent", 10, 40, priority=-2)
    node.turns(3)
    node.clock.advance(3.0)
    node.switch(tp(0, 1), treatment=SOFT)
    assert node.value("shoal_moved_requests_total") == 2
    assert node.value("shoal_request_queue_seconds") == 2
    (normal,) = node.metric("shoal_request_queue_seconds", priority="normal", layout="dp")
    (urgent,) = node.metric("shoal_request_queue_seconds", priority="urgent", layout="dp")
    assert (sum(normal.counts), sum(urgent.counts)) == (1, 1)
    assert (normal.value, urgent.value) == (0, 0)


def test_the_wait_for_a_switch_is_queueing() -> None:
    node = started(2)
    node.hung = {1}
    node.set_layout(tp(0, 1))
    node.settle()
    node.send("waits", 10, 4, priority=5)
    node.controller.turn()
    assert node.value("shoal_pool_waiting", priority="background") == 1
    assert node.value("shoal_pool_waiting_tokens", priority="background") == 10
    node.clock.advance(1.5)
    assert node.value("shoal_pool_oldest_seconds", priority="background") == pytest.approx(1.5)
    assert node.value("shoal_pool_oldest_seconds", priority="normal") == 0
    node.hung = set()
    node.settle()
    (sample,) = node.metric("shoal_request_queue_seconds", priority="background", layout="tp2")
    assert sample.value == pytest.approx(1.5)
    assert node.value("shoal_pool_waiting") == 0


def test_a_stop_string_is_no_abort() -> None:
    node = started(2)
    for name in ("stopped", "aborted", "runs"):
        node.send(name, 10, 60)
    node.turns(3)
    node.abort("aborted")
    node.aborted.add("stopped")
    node.network.control_sends("front-0", m.Stopped(["stopped", "unknown"]))
    node.settle()
    assert node.value("shoal_requests_total", outcome="finished") == 2
    assert node.value("shoal_requests_total", outcome="aborted") == 1
    assert node.audit() == []


def test_a_stop_string_ends_a_request_that_moves() -> None:
    node = started(2)
    node.send("stopped", 10, 60)
    node.turns(3)
    node.hung = {1}
    node.set_layout(tp(0, 1), treatment=SOFT)
    node.turns(2)
    assert "stopped" in node.pool
    node.aborted.add("stopped")
    node.network.control_sends("front-0", m.Stopped(["stopped"]))
    node.hung = set()
    node.settle()
    assert node.value("shoal_requests_total", outcome="finished") == 1
    assert node.value("shoal_requests_total", outcome="aborted") == 0


# --- what vLLM's gauges show ---


def test_idle_members_of_a_group_show_nothing_and_their_leader_all() -> None:
    node = started(2)
    busy(node, 6)
    before = gauges(node)
    assert [engine.running for engine in before] == [3, 3]
    assert all(0 < engine.kv_cache_usage < 1 for engine in before)
    node.switch(tp(0, 1), treatment=HARD)
    node.send("group", 10, 40)
    node.turns(3)
    bound = gauges(node)
    assert [(e.running, e.waiting, e.deferred) for e in bound] == [(1, 0, 3), (0, 0, 3)]
    node.switch(alone(0), alone(1), treatment=SEQUENTIAL)
    node.settle()
    assert [(e.running, e.waiting, e.deferred) for e in gauges(node)] == [(0, 0, 0)] * 2
    assert [e.kv_cache_usage for e in gauges(node)] == [0, 0]


def test_a_group_uses_the_blocks_of_every_member() -> None:
    node = started(2, settings=FakeSettings(num_blocks=64, block_tokens=4, max_model_len=400))
    node.switch(tp(0, 1))
    node.send("group", 60, 40)
    node.turns(4)
    group = node.controller.books.requests.core(tp(0, 1))
    assert group.load is not None
    used = node.controller.books.leases.opened[tp(0, 1)] - group.load.free_blocks
    assert used > 0
    assert [e.kv_cache_usage for e in gauges(node)] == [pytest.approx(used / 64)] * 2


def test_what_waits_in_the_pool_is_spread_over_the_engines() -> None:
    node = started(2, settings=SMALL)
    for k in range(25):
        node.send(f"r{k}", 10, 40)
    node.turns(4)
    waiting = len(node.pool)
    assert waiting > 2
    shown = gauges(node)
    queued = node.value("shoal_engine_requests", state="waiting")
    assert sum(engine.waiting for engine in shown) == waiting + queued
    assert abs(shown[0].waiting - shown[1].waiting) <= 1
    assert sum(e.running + e.waiting for e in shown) == 25


def test_a_lost_engine_has_no_share_of_the_pool_and_no_layout() -> None:
    node = started(2)
    node.kill(1)
    node.settle()
    assert node.value("shoal_engine_state", engine="1", state="dead") == 1
    assert node.value("shoal_engine_layout", engine="1") == 0
    assert node.value("shoal_engine_layout", engine="0") == 1
    assert node.value("shoal_engines", state="dead") == 1
    for k in range(20):
        node.send(f"r{k}", 10, 40)
    node.turns(4)
    assert [engine.waiting > 0 for engine in gauges(node)] == [True, False]


def test_the_layout_of_an_engine_is_a_timeline() -> None:
    node = started()

    def layouts(name: str) -> list[float]:
        return [sample.value for sample in node.metric(name)]

    assert layouts("shoal_engine_layout") == [1, 1, 1, 1]
    node.switch(alone(0), alone(1), tp(2, 3))
    assert layouts("shoal_engine_layout") == [1, 1, 2, 2]
    assert node.value("shoal_units", layout="tp2") == 1
    assert node.value("shoal_lease_blocks", unit="2,3", layout="tp2") > 0
    assert node.value("shoal_lease_blocks", unit="0,1", layout="tp2") == 0
    lent = node.value("shoal_engine_kv_blocks", engine="3", state="lent")
    assert lent == node.value("shoal_lease_blocks", unit="2,3")
    node.hung = {1}
    node.set_layout(tp(0, 1), tp(2, 3))
    node.settle()
    assert layouts("shoal_engine_switching") == [1, 1, 0, 0]


# --- steps and decisions ---


def test_tokens_that_a_move_computes_again_are_steps_tokens() -> None:
    node = started(2)
    node.send("r", 10, 40)
    node.turns(8)
    node.switch(tp(0, 1), treatment=SOFT)
    node.settle()
    assert node.finish.keys() == {"r"}
    prefill = node.value("shoal_step_tokens_total", kind="prefill", mode="dp")
    again = node.value("shoal_step_tokens_total", kind="prefill", mode="tp", layout="tp2")
    assert prefill == 10
    assert again > 10
    decodes = node.value("shoal_step_tokens_total", kind="decode")
    # Each prefill made a token as well.
    assert decodes == 40 - 2
    steps = node.value("shoal_steps_total", engine="0")
    assert steps == decodes + 2


def test_step_seconds_are_the_time_with_a_step_in_flight() -> None:
    node = started(2, settings=FakeSettings(step_seconds=0.1, num_blocks=64, block_tokens=4))
    node.send("r", 10, 5)
    for _ in range(20):
        node.turns(1)
        node.clock.advance(0.1)
    node.collect()
    assert node.missing == []
    assert node.value("shoal_steps_total", layout="dp") == 5
    assert node.value("shoal_step_seconds_total", layout="dp") == pytest.approx(0.5)


def test_decisions_turns_and_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(2)
    before = node.value("shoal_policy_decision_seconds")
    assert before > 0
    node.controller.turn()
    assert node.value("shoal_policy_decision_seconds") > before
    assert node.value("shoal_controller_loop_seconds") > 0
    assert node.value("shoal_policy_errors_total") == 0
    assert node.value("shoal_policy_info", policy="manual") == 1
    assert node.value("shoal_policy_info", policy="flying") == 0


def test_while_units_change_no_counter_goes_back_and_no_series_vanishes() -> None:
    node = LoopbackNode(4, seed=5)
    node.settle()
    seen: dict[tuple[str, tuple[str, ...]], float] = {}
    partitions = [(tp(0, 1), tp(2, 3)), (tp(0, 1, 2, 3),), singles(4)]
    for k in range(12):
        for j in range(4):
            node.send(f"r{k}-{j}", 12, 20, priority=j - 1, terms=Terms(caller="c"))
        node.turns(4)
        treatment = (HARD, SOFT, SEQUENTIAL)[k % 3]
        if k == 9:
            node.kill(3)
        node.set_layout(*partitions[k % 3], treatment=treatment)
        node.settle()
        for family in node.metrics().families:
            for sample in family.samples if family.kind is not Kind.GAUGE else ():
                key = (family.name, sample.labels)
                total = sum(sample.counts) + sample.value
                assert total >= seen.get(key, 0), key
                seen[key] = total
        known = {(f.name, s.labels) for f in node.metrics().families for s in f.samples}
        assert seen.keys() <= known
