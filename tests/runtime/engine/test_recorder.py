"""Recordings of a runner: when they begin and end, what they hold, and what is timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from runtime.engine import recorder as recorder_module
from runtime.engine import steps
from runtime.engine.recorder import Recorder, Stopwatch, shift_cost
from runtime.messages import Mode
from runtime.recording import Recording, recording_file, request_file, trace_file
from server.bench.kernels import Kind, divided, read_trace

ENGINE = 3


def step(tokens: int, mode: Mode = Mode.TP) -> steps.Step:
    scheduled = SchedulerOutput.make_empty()
    scheduled.total_num_scheduled_tokens = tokens
    return steps.Step(1, scheduled, None, sample=True, mode=mode)


# --- the stopwatch ---


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    @contextmanager
    def slow(self, way_in: int, way_out: int) -> Iterator[None]:
        """Take so many nanoseconds to be entered, and to be left."""
        self.now += way_in
        yield
        self.now += way_out


def test_the_ways_in_and_out_count_and_nothing_between() -> None:
    hand = Hand()
    watch = Stopwatch(hand)
    with watch.timed(hand.slow, 3, 4):
        hand.now += 1000
        with watch.timed(hand.slow, 50, 60):
            hand.now += 1000
    assert watch.take() == pytest.approx(117e-9)
    assert watch.take() == 0.0


def test_what_fails_inside_fails_outside() -> None:
    watch = Stopwatch(Hand())

    def work() -> None:
        with watch.timed(Hand().slow, 1, 1):
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        work()


# --- recordings ---


@pytest.fixture(autouse=True)
def _few_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "LOOPS", 5)


def read(directory: Path, name: str) -> Recording:
    content = recording_file(directory, name, ENGINE).read_bytes()
    return msgspec.json.decode(content, type=Recording)


def test_steps_are_recorded_while_a_request_names_a_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, ENGINE)
    recorder.look(step(1))
    assert list(tmp_path.iterdir()) == []
    request_file(tmp_path).write_text("first\n")
    recorder.look(step(2))
    recorder.look(step(512, Mode.SP))
    torch.ones(300, 300) @ torch.ones(300, 300)
    assert not recording_file(tmp_path, "first", ENGINE).exists()
    request_file(tmp_path).unlink()
    recorder.look(step(7))
    found = read(tmp_path, "first")
    assert [(s.tokens, s.mode) for s in found.steps] == [(2, Mode.TP), (512, Mode.SP)]
    activities = read_trace(trace_file(tmp_path, "first", ENGINE))
    # The clock of the trace is that of the steps.
    begin = found.steps[1].begin
    assert divided(activities, begin, begin + 60.0)[Kind.GEMM] > 0
    assert divided(activities, begin - 60.0, begin)[Kind.GEMM] == 0


def test_another_name_ends_one_recording_and_begins_the_next(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, ENGINE)
    for name, tokens in (("a", 2), ("b", 3)):
        request_file(tmp_path).write_text(name)
        recorder.look(step(tokens))
    request_file(tmp_path).unlink()
    recorder.look(step(4))
    recorder.look(step(5))
    assert [s.tokens for s in read(tmp_path, "a").steps] == [2]
    assert [s.tokens for s in read(tmp_path, "b").steps] == [3]


def test_ways_into_a_mode_are_kept_of_steps_that_are_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, ENGINE)
    recorder.look(step(1))
    recorder.entered(Mode.TP, 1e-6)
    recorder.entered(Mode.SP, 2e-6)
    request_file(tmp_path).write_text("a")
    recorder.look(step(1))
    recorder.entered(Mode.SP, 3.0)
    request_file(tmp_path).unlink()
    recorder.look(step(1))
    assert read(tmp_path, "a").shift.entering == {Mode.TP: [1e-6], Mode.SP: [2e-6]}


def test_a_step_without_its_mode_is_the_shorter_message() -> None:
    cost = shift_cost(step(9, Mode.SP), {})
    assert cost.choice > 0.0
    assert cost.message >= 0.0
    assert cost.entering == {}
