"""An engine gives up KV blocks: its steps go on until only what requests hold is left."""

import logging

import pytest

from shoal.runtime.engine.fake import fake_own_core
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import Bench, started

STEP = 0.5
EPOCH, LEFT = 7, 100
PROMPT = 8


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return an engine of 200 blocks that takes free ones ten at a time."""
    monkeypatch.setattr(fake_own_core, "SLICE", 10)
    bench = started(step_seconds=STEP)
    bench.add("low", prompt=PROMPT, tokens=40)
    bench.clock.advance(STEP)
    bench.turn(2)
    return bench


def holds_high_blocks(bench: Bench) -> str:
    """Let a request run on blocks that are given up later."""
    own = bench.backend.own
    low = own.lend(LEFT - len(own.held))
    bench.add("high", prompt=PROMPT, tokens=40)
    while not own.holders(LEFT):
        bench.clock.advance(STEP)
        bench.turn(2)
    own.take_back(low)
    assert own.holders(LEFT) == ["high"]
    return "high"


def test_steps_go_on_while_free_blocks_are_given_up(bench: Bench) -> None:
    holds_high_blocks(bench)
    own, stood, turns = bench.backend.own, 0, 0
    answers = bench.tell(m.CloseBlocks(EPOCH, LEFT))
    while not answers:
        # While free blocks are left, the core is not paused, and its steps are dispatched.
        stood += bench.agent.active == []
        turns += 1
        assert own.in_flight or stood, "a step is in flight"
        bench.clock.advance(STEP / 4)
        answers = bench.turn()
    assert answers == [m.BlocksClosed(EPOCH, 0, 0)]
    assert turns > 8, "in slices"
    # Only the step in flight when the free ones were gone is waited for: it takes four turns.
    assert stood <= 4
    assert own.holders(LEFT) == []


def test_no_core_is_paused_if_nobody_holds_a_block(bench: Bench) -> None:
    own = bench.backend.own
    answers = bench.tell(m.CloseBlocks(EPOCH, LEFT))
    for _ in range(20):
        assert bench.agent.active == [own]
        answers += bench.turn()
    assert answers == [m.BlocksClosed(EPOCH, 0, 0)]


def test_requests_go_on_with_the_same_tokens(bench: Bench) -> None:
    name, own = holds_high_blocks(bench), bench.backend.own
    bench.tell(m.CloseBlocks(EPOCH, LEFT))
    for _ in range(12):
        bench.clock.advance(STEP)
        bench.turn(2)
    assert own.holders(LEFT) == []
    tokens = own.withdraw([name])[name]
    assert len(tokens) > 5
    assert tokens == expected_tokens([1] * PROMPT, len(tokens))


def test_it_is_logged_what_took_how_long(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    holds_high_blocks(bench)
    with caplog.at_level(logging.INFO, "shoal.engine"):
        answers = bench.tell(m.CloseBlocks(EPOCH, LEFT))
        while not answers:
            bench.clock.advance(STEP / 4)
            answers = bench.turn()
    (line,) = [r.getMessage() for r in caplog.records if "gave up" in r.getMessage()]
    assert line.startswith("engine 0 gave up its KV blocks above 100 in ")
    assert "0 requests preempted" in line
