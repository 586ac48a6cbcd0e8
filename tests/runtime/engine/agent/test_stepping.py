"""Steps are driven in order, and the controller is told what they computed."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.agent.results import Collected, CoreOutputs, EndedSteps
from shoal.runtime.engine.agent.stepping import Account
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from tests.runtime.engine.agent.agent_bench import Bench
from tests.runtime.loopback_node import request_payload


def test_a_token_leaves_before_the_next_step_is_scheduled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add("a", tokens=2)
    core, waiting = bench.backend.own, bench.network.front_outputs
    waiting.clear()
    seen: list[int] = []
    dispatch = core.dispatch

    def look_and_dispatch() -> bool:
        seen.append(len(waiting.get(0, ())))
        return dispatch()

    monkeypatch.setattr(core, "dispatch", look_and_dispatch)
    bench.turn()
    assert seen == [1]


def test_load_is_reported_when_it_changes(bench: Bench) -> None:
    bench.agent.turn()
    assert bench.heard() == []
    bench.network.controller.to_engine(
        0, m.AddRequest(alone(0), "a"), request_payload("a", [1] * 8, 1)
    )
    bench.agent.turn()
    bench.agent.turn()
    loads = [x for x in bench.heard() if isinstance(x, m.Load)]
    assert [(x.running, x.free_blocks, x.finished) for x in loads] == [
        (1, 198, []),
        (0, 200, ["a"]),
    ]


def test_front_ends_hear_nothing_of_trials(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even how many requests run, which vLLM tells the first one after every step."""
    core, waiting = bench.backend.own, bench.network.front_outputs
    collect = core.collect

    def with_statistics() -> Collected | None:
        collected = collect()
        if collected is not None:
            frame = wire.encode_outputs([], unit=core.unit, timestamp=0.0)
            collected.outputs.append(CoreOutputs(0, [frame]))
        return collected

    monkeypatch.setattr(core, "collect", with_statistics)
    waiting.clear()
    answers = bench.tell(m.Try(1, core.unit, [8, 20], 3), turns=20)
    assert answers == [m.Tried(0, 1)]
    assert not any(waiting.values())
    bench.add("a", tokens=2)
    bench.turn(5)
    assert waiting[0]


DECODE = m.Work(steps=1, decodes=2, context_tokens=30)
PREFILL = m.Work(steps=1, prefill_tokens=9, prefill_pairs=45)


def in_tp(*works: m.Work) -> list[EndedSteps]:
    return [EndedSteps(m.Mode.TP, work) for work in works]


def test_a_step_lasts_from_the_end_of_the_one_before_it() -> None:
    account = Account()
    account.see(10.0, [], in_flight=True, judges=True)
    account.see(10.5, [], in_flight=True, judges=True)
    account.see(12.0, in_tp(PREFILL), in_flight=True, judges=True)
    account.see(12.5, in_tp(DECODE), in_flight=False, judges=True)
    account.see(20.0, [], in_flight=True, judges=True)
    account.see(21.0, in_tp(DECODE), in_flight=False, judges=True)
    assert account.work[m.Mode.TP].prefilling == PREFILL + m.Work(seconds=2.0)
    assert account.work[m.Mode.TP].decoding == DECODE + DECODE + m.Work(seconds=1.5)


def test_steps_of_both_kinds_that_end_together_are_left_out() -> None:
    account = Account()
    account.see(0.0, [], in_flight=True, judges=True)
    account.see(5.0, in_tp(PREFILL, DECODE), in_flight=True, judges=True)
    account.see(6.0, in_tp(DECODE, DECODE), in_flight=False, judges=True)
    done = account.work[m.Mode.TP]
    assert done.prefilling == m.Work()
    assert done.decoding == DECODE + DECODE + m.Work(seconds=1.0)
    assert (done.total.steps, done.total.seconds) == (4, 6.0)


def test_steps_whose_times_say_nothing_are_left_out() -> None:
    """They queue up behind what the runner does to form a group."""
    account = Account()
    account.see(0.0, [], in_flight=True, judges=False)
    account.see(5.0, in_tp(DECODE), in_flight=True, judges=False)
    account.see(6.0, in_tp(DECODE), in_flight=False, judges=True)
    done = account.work[m.Mode.TP]
    assert done.decoding == DECODE + m.Work(seconds=1.0)
    assert (done.total.steps, done.total.seconds) == (2, 6.0)


def test_steps_of_each_mode_count_apart() -> None:
    account = Account()
    account.see(0.0, [], in_flight=True, judges=True)
    account.see(2.0, [EndedSteps(m.Mode.SP, PREFILL)], in_flight=True, judges=True)
    account.see(3.0, in_tp(DECODE), in_flight=True, judges=True)
    assert account.work[m.Mode.SP].prefilling == PREFILL + m.Work(seconds=2.0)
    assert account.work[m.Mode.TP].decoding == DECODE + m.Work(seconds=1.0)
    # What two modes took together is in the totals, half of it in each.
    account.see(
        7.0, [EndedSteps(m.Mode.SP, PREFILL), *in_tp(PREFILL)], in_flight=False, judges=True
    )
    assert account.work[m.Mode.SP].prefilling == PREFILL + m.Work(seconds=2.0)
    assert account.work[m.Mode.SP].total == PREFILL + PREFILL + m.Work(seconds=4.0)
    assert account.work[m.Mode.TP].total == DECODE + PREFILL + m.Work(seconds=3.0)


def test_a_load_report_says_what_steps_computed(bench: Bench) -> None:
    bench.add("a", prompt=8, tokens=3)
    bench.agent.turn()
    for _ in range(6):
        bench.agent.turn()
    last = [x for x in bench.heard() if isinstance(x, m.Load)][-1]
    done = last.done(m.Mode.TP)
    assert (done.prefilling.steps, done.prefilling.prefill_tokens) == (1, 8)
    assert (done.decoding.steps, done.decoding.decodes) == (2, 2)
    assert last.done(m.Mode.SP) == m.ModeWork()
