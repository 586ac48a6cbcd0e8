"""A runner does steps of its own between the portions of a group's forming, and members agree."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import vllm.config.vllm as vllm_config
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import (
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)

from shoal.runtime.engine.runner import interludes as interludes_module
from shoal.runtime.engine.runner.interludes import (
    CUTS,
    IDLE_SECONDS,
    LOGGED_SECONDS,
    SHARE_SECONDS,
    Interludes,
    after_cuts,
    before_passes,
    outside,
)

GROUP = "engine 0 forms tp2"


class World:
    """The time, a member's steps, and what the other member has come to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = 0
        """Steps in the member's queue."""
        self.step_seconds = 0.25
        self.done = 0
        self.depth = 0
        self.patience = 30.0
        self.other_is_at = 0
        self.own = 0
        self.other_comes_after: int | None = None
        """Looks after which the other member is there; None: it is always there already."""
        self.waits: list[float] = []

    # --- time

    def clock(self) -> float:
        return self.now

    # --- steps

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def step(self, seconds: float) -> bool:
        assert self.depth == 1
        if not self.waiting:
            self.waits.append(seconds)
            self.now += seconds
            return False
        self.waiting -= 1
        self.done += 1
        self.now += self.step_seconds
        return True

    # --- the members

    def arrive(self, point: int) -> None:
        self.own = point

    def all_are_at(self, point: int) -> bool:
        assert self.own == point, "others would wait for a member that waits for them"
        if self.other_comes_after is None:
            return True
        self.other_comes_after -= 1
        return self.other_comes_after < 0


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def interludes(world: World) -> Interludes:
    made = Interludes(world, world.clock)
    made.begin(world, GROUP)
    return made


@pytest.mark.parametrize(
    ("took", "steps"), [(0.0, 0), (0.5, 2), (1.0, 4), (60.0, 4)], ids=lambda value: str(value)
)
def test_steps_get_as_long_as_the_portion_took_within_a_limit(
    world: World, interludes: Interludes, took: float, steps: int
) -> None:
    world.waiting = 100
    world.now += took
    interludes.hold("a portion")
    assert world.done == steps
    assert steps * world.step_seconds <= SHARE_SECONDS


def test_a_runner_without_steps_goes_on_at_once(world: World, interludes: Interludes) -> None:
    world.now = 10.0
    interludes.hold("a portion")
    assert (world.done, world.now) == (0, 10.0)


def test_one_that_has_had_steps_waits_for_more_of_them_for_a_moment(
    world: World, interludes: Interludes
) -> None:
    world.now, world.waiting = 10.0, 1
    interludes.hold("a portion")
    assert (world.done, world.waits) == (1, [IDLE_SECONDS])
    world.now += 1.0
    interludes.hold("a portion")
    assert world.waits == [IDLE_SECONDS, IDLE_SECONDS], "after an interlude with steps"
    world.now += 1.0
    interludes.hold("a portion")
    assert world.waits == [IDLE_SECONDS, IDLE_SECONDS, 0.0], "after one without"


def test_a_member_that_waits_for_another_does_steps(world: World, interludes: Interludes) -> None:
    world.waiting, world.other_comes_after = 100, 7
    interludes.hold("a portion")
    assert world.done == 7
    assert world.depth == 0


def test_a_member_that_waits_in_vain_gives_up(world: World, interludes: Interludes) -> None:
    world.other_comes_after = 10**6
    with pytest.raises(TimeoutError, match="portion 1"):
        interludes.hold("a portion")
    assert world.now == pytest.approx(world.patience, abs=0.1)


def test_once_the_controller_watches_members_they_wait_for_long(
    world: World, interludes: Interludes
) -> None:
    world.other_comes_after = 100_000  # 500 s
    interludes.be_patient()
    interludes.hold("a portion")
    assert world.now > 10 * world.patience
    interludes.begin(world, GROUP)
    world.other_comes_after = 100_000
    with pytest.raises(TimeoutError):
        interludes.hold("a portion")


def test_each_forming_counts_its_portions_anew(world: World, interludes: Interludes) -> None:
    interludes.hold("a portion")
    interludes.hold("a portion")
    assert world.own == 2
    interludes.begin(world, GROUP)
    interludes.hold("a portion")
    assert world.own == 1


def test_an_interlude_comes_before_each_pass_of_the_model() -> None:
    model, held = nn.Linear(2, 2), []
    with before_passes(model, lambda: held.append(len(held))):
        for _ in range(3):
            model(torch.zeros(2))
    assert held == [0, 1, 2]
    model(torch.zeros(2))
    assert held == [0, 1, 2], "vLLM does not warm up any more"


class Stream:
    """Says what it is told to wait for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: "Stream") -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.said.append(f"the host waits for {self.name}")


def test_steps_run_on_their_own_stream_after_what_comes_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    steps, captures = Stream("steps", said), Stream("captures", said)

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        said.append(f"{stream.name} is current")
        yield
        said.append("no more")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: captures)
    monkeypatch.setattr(torch.cuda, "stream", current)
    with outside(steps):  # type: ignore[arg-type]
        said.append("steps run")
    assert said == [
        "steps waits for captures",
        "steps is current",
        "steps run",
        "no more",
        "the host waits for steps",
    ]


def test_there_is_no_interlude_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held = nn.Linear(2, 2), []
    capturing = iter([False, True, False])
    monkeypatch.setattr(interludes_module, "current_platform", SimpleNamespace(is_cuda=lambda: 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    with before_passes(model, lambda: held.append("held")):
        for _ in range(3):
            model(torch.zeros(2))
    assert held == ["held", "held"]


def test_steps_see_nothing_of_the_pass_that_they_interrupt() -> None:
    config, context = VllmConfig(), object()
    with set_current_vllm_config(config), override_forward_context(context):  # type: ignore[arg-type]
        with outside(None):
            assert vllm_config._current_vllm_config is None
            assert not is_forward_context_available()
        assert vllm_config._current_vllm_config is config
        assert get_forward_context() is context
        with pytest.raises(ValueError, match="a step"), outside(None):
            raise ValueError("a step failed")
        assert vllm_config._current_vllm_config is config


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_long_portion_is_logged_by_its_name(
    world: World, interludes: Interludes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.engine")
    for seconds in (LOGGED_SECONDS, 12.3):
        world.now += seconds
        interludes.hold("making of communicators")
    assert said(caplog) == [f"{GROUP}: no step for 12.3 s: making of communicators"]


def test_passes_are_counted_in_each_part(
    world: World, interludes: Interludes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.engine")
    for part in ("determine_available_memory", "compile_or_warm_up_model"):
        world.now += 100.0  # between two parts steps may run
        interludes.enter(part)
        for _ in range(2):
            world.now += 1.0
            interludes.hold_pass()
        world.now += 2.0
        interludes.hold_end()
    assert [line.removeprefix(f"{GROUP}: no step for ") for line in said(caplog)] == [
        "1.0 s: determine_available_memory, until pass 1 began",
        "1.0 s: determine_available_memory, until pass 2 began",
        "2.0 s: determine_available_memory, from pass 2 on",
        "1.0 s: compile_or_warm_up_model, until pass 1 began",
        "1.0 s: compile_or_warm_up_model, until pass 2 began",
        "2.0 s: compile_or_warm_up_model, from pass 2 on",
    ]


@pytest.mark.parametrize(("module", "function", "name"), CUTS)
def test_a_portion_ends_after_each_cut(
    monkeypatch: pytest.MonkeyPatch, module: str, function: str, name: str
) -> None:
    held, result, place = list[str](), object(), importlib.import_module(module)
    monkeypatch.setattr(place, function, lambda *_: result)
    with after_cuts(held.append):
        assert getattr(place, function)(None, "path") is result
        assert held == [name]
    getattr(place, function)(None, "path")
    assert len(held) == 1, "the group is formed"
