"""Steps that hang, told from steps that are only long."""

from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.agent.results import EndedSteps
from shoal.runtime.engine.agent.watchdog import (
    FACTOR,
    LIKENESS,
    SHORTEST_SECONDS,
    STEPS,
    HungStepError,
    StepWatch,
)
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode, Work
from tests.runtime.engine.agent.agent_bench import started
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

ALONE = alone(0)
GROUP = tp(0, 1)
LONGEST = 60.0
DECODE = Work(1, 0.0, 4, 400)
PREFILL = Work(1, 0.0, 0, 0, 1000, 500_000)


def seen(work: Work, seconds: float, steps: int = STEPS) -> StepWatch:
    watch = StepWatch(LONGEST)
    for _ in range(steps):
        watch.see(ALONE, [EndedSteps(Mode.TP, work)], seconds)
    return watch


def limit(watch: StepWatch, work: Work) -> float:
    return watch.limit(ALONE, Mode.TP, work)


def times(work: Work, factor: float) -> Work:
    def scaled(value: int) -> int:
        return int(value * factor)

    return Work(
        1,
        0.0,
        scaled(work.decodes),
        scaled(work.context_tokens),
        scaled(work.prefill_tokens),
        scaled(work.prefill_pairs),
    )


@pytest.mark.parametrize("work", [DECODE, PREFILL])
def test_a_step_like_many_before_may_take_a_few_times_as_long(work: Work) -> None:
    assert limit(seen(work, 1.0), work) == FACTOR * 1.0
    assert limit(seen(work, 1.0), times(work, LIKENESS)) == FACTOR * 1.0


@pytest.mark.parametrize("work", [DECODE, PREFILL])
def test_others_may_take_all_the_time_there_is(work: Work) -> None:
    assert limit(seen(work, 1.0, STEPS - 1), work) == LONGEST
    assert limit(seen(work, 1.0), times(work, 2 * LIKENESS)) == LONGEST
    assert seen(work, 1.0).limit(GROUP, Mode.TP, work) == LONGEST
    other = PREFILL if work is DECODE else DECODE
    assert limit(seen(work, 1.0), other) == LONGEST


def test_the_limit_has_limits() -> None:
    assert limit(seen(DECODE, 0.001), DECODE) == SHORTEST_SECONDS
    assert limit(seen(DECODE, 50.0), DECODE) == LONGEST


def test_one_delayed_step_may_take_all_the_time_and_teaches_nothing() -> None:
    watch = seen(DECODE, 0.01)
    watch.expect_delay(ALONE)
    assert limit(watch, DECODE) == LONGEST
    watch.see(ALONE, [EndedSteps(Mode.TP, DECODE)], 40.0)
    assert limit(watch, DECODE) == SHORTEST_SECONDS


def test_what_one_mode_takes_says_nothing_of_the_other() -> None:
    watch = StepWatch(LONGEST)
    for _ in range(STEPS):
        watch.see(GROUP, [EndedSteps(Mode.SP, PREFILL)], 0.2)
    assert watch.limit(GROUP, Mode.SP, PREFILL) == FACTOR * 0.2
    assert watch.limit(GROUP, Mode.TP, PREFILL) == LONGEST
    watch.see(GROUP, [EndedSteps(Mode.TP, PREFILL)] * STEPS, 1.0)
    assert watch.limit(GROUP, Mode.TP, PREFILL) == FACTOR * 1.0
    assert watch.limit(GROUP, Mode.SP, PREFILL) == FACTOR * 0.2


def test_steps_of_both_modes_that_end_together_teach_each_its_own() -> None:
    watch = StepWatch(LONGEST)
    ended = [EndedSteps(Mode.SP, PREFILL)] * STEPS + [EndedSteps(Mode.TP, PREFILL)] * (STEPS - 1)
    watch.see(GROUP, ended, 0.2)
    assert watch.limit(GROUP, Mode.SP, PREFILL) == FACTOR * 0.2
    assert watch.limit(GROUP, Mode.TP, PREFILL) == LONGEST


def test_several_steps_at_once_count_as_their_mean() -> None:
    watch = StepWatch(LONGEST)
    watch.see(ALONE, [EndedSteps(Mode.TP, DECODE)] * STEPS, 0.5)
    assert limit(watch, DECODE) == FACTOR * 0.5


def test_a_step_that_hangs_is_named() -> None:
    watch = seen(DECODE, 0.01)
    watch.check(ALONE, Mode.TP, DECODE, SHORTEST_SECONDS)
    with pytest.raises(HungStepError, match=r"a step of unit \[0\] hangs: 1.5 s and no result"):
        watch.check(ALONE, Mode.TP, DECODE, SHORTEST_SECONDS + 0.1)


# --- in an engine's loop ---


class Watched:
    """A node with one engine whose steps take half a second, and can be made to take for ever."""

    def __init__(self, **settings: Any) -> None:
        fake = FakeSettings(step_seconds=0.5, **settings)
        self.node = LoopbackNode(2, settings=fake)
        backend = self.node.backends[0]
        self.node.agents[0] = Agent(
            backend, self.node.network.agent(0), clock=self.node.clock, watch=StepWatch(LONGEST)
        )
        self.run(1.0)

    def run(self, seconds: float, tick: float = 0.25) -> None:
        """Let time pass, with turns for everybody."""
        for _ in range(round(seconds / tick)):
            self.node.clock.advance(tick)
            self.turn()

    def turn(self) -> None:
        for _ in range(3):
            self.node.controller.turn()
            for engine in list(self.node.agents):
                self.node.turn_agent(engine)
            self.node.collect()

    def hang(self) -> None:
        """Have the step in flight never end."""
        (step,) = self.node.backends[0].own._steps
        step.seconds = float("inf")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    def bury(self: LoopbackNode, engine: int) -> None:
        try:
            self.agents[engine].turn()
        except HungStepError as error:
            self.deaths[engine] = error
            del self.agents[engine]

    monkeypatch.setattr(LoopbackNode, "turn_agent", bury)
    return Watched()


def test_a_hung_step_ends_the_engine_and_its_requests_go_on(watched: Watched) -> None:
    node = watched.node
    node.send("r", 10, 40)
    watched.run(8.0)
    assert 0 < len(node.tokens["r"]) < 40
    watched.hang()
    watched.run(FACTOR * 0.5 - 0.5)
    assert node.deaths == {}
    watched.run(1.0)
    assert isinstance(node.deaths[0], HungStepError)
    watched.run(30.0)
    assert node.missing == []
    node.assert_exact()
    assert node.value("shoal_engine_deaths_total", cause=m.DeathCause.HUNG) == 1


def test_the_first_steps_have_the_longest_time(watched: Watched) -> None:
    watched.node.send("r", 10, 40)
    watched.run(0.25)
    watched.hang()
    watched.run(LONGEST - 1.0)
    assert watched.node.deaths == {}
    watched.run(2.0)
    assert 0 in watched.node.deaths


def test_a_break_of_the_loop_is_not_held_against_the_runner(watched: Watched) -> None:
    node = watched.node
    node.send("r", 10, 40)
    watched.run(8.0)
    watched.hang()
    node.clock.advance(1000.0)
    watched.turn()
    assert node.deaths == {}
    watched.run(FACTOR * 0.5 - 0.5)
    assert node.deaths == {}


def test_the_loop_wakes_to_look_while_a_step_is_in_flight(watched: Watched) -> None:
    agent = watched.node.agents[0]
    assert agent.next_wakeup() is None
    watched.node.send("r", 10, 40)
    watched.run(1.0)
    watched.hang()
    wakeup = agent.next_wakeup()
    assert wakeup is not None
    assert wakeup < SHORTEST_SECONDS


def test_without_a_timeout_a_step_may_take_for_ever() -> None:
    bench = started(step_seconds=1e6)
    bench.add("r")
    bench.turn()
    bench.clock.advance(1e5)
    assert bench.turn() == []
    assert bench.agent.next_wakeup() == pytest.approx(9e5)


def test_a_step_that_compiles_a_kernel_has_the_time_of_any_step() -> None:
    asked = list[tuple[Unit, float]]()
    compiles = True

    def compiling(unit: Unit, seconds: float) -> bool:
        asked.append((unit, seconds))
        return compiles

    watch = StepWatch(LONGEST, compiling)
    for _ in range(STEPS):
        watch.see(ALONE, [EndedSteps(Mode.TP, DECODE)], 0.01)
    watch.check(ALONE, Mode.TP, DECODE, SHORTEST_SECONDS - 0.1)
    assert asked == [], "nothing is looked up for steps that are not late"
    watch.check(ALONE, Mode.TP, DECODE, LONGEST - 1)
    assert asked == [(ALONE, SHORTEST_SECONDS)]
    with pytest.raises(HungStepError):
        watch.check(ALONE, Mode.TP, DECODE, LONGEST + 1)
    compiles = False
    with pytest.raises(HungStepError):
        watch.check(ALONE, Mode.TP, DECODE, SHORTEST_SECONDS + 0.1)
