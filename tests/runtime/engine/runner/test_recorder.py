"""Recordings of a runner: when they begin and end, and what they hold."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.v1.core.sched.output import SchedulerOutput

from shoal.loadgen.bench.kernels import Kind, divided, read_trace
from shoal.policies.values.layouts import Unit, alone, tensor_parallel
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.engine.layouts.introductions import Introductions
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.link import instructions as steps
from shoal.runtime.engine.runner import recorder as recorder_module
from shoal.runtime.engine.runner.bound_phases import EventMarks, HostMarks
from shoal.runtime.engine.runner.recorder import Recorder, RecordingRunner
from shoal.runtime.protocol.messages import Mode
from shoal.runtime.protocol.recording import (
    BoundPhase,
    Recording,
    read_phases,
    recording_file,
    request_file,
    trace_file,
)

ENGINE = 3


def step(tokens: int, mode: Mode = Mode.TP) -> steps.Step:
    scheduled = SchedulerOutput.make_empty()
    scheduled.total_num_scheduled_tokens = tokens
    return steps.Step(1, scheduled, None, sample=True, mode=mode)


# --- recordings ---


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


# --- the runner ---

OWN, GROUP = alone(ENGINE), tensor_parallel((2, 3))


class LoggedWorker:
    """A layout's worker that computes nothing, and says when it would."""

    map_blocks = LayoutWorker.map_blocks
    block_map: Any = None
    answers = False
    introductions = Introductions()

    def __init__(self, unit: Unit, log: list[str]) -> None:
        self.unit, self._log = unit, log

    def execute(self, scheduled: SchedulerOutput, *_: Any) -> None:
        self._log.append(f"tp{self.unit.layout.tp} of {scheduled.total_num_scheduled_tokens}")

    def sample(self, _grammar: object) -> None:
        self._log.append(f"tp{self.unit.layout.tp} samples")


class LoggedMarks(HostMarks):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def set(self, name: str) -> None:
        self._log.append(name)
        super().set(name)

    def take(self) -> Mapping[str, float]:
        self._log.append("take")
        return super().take()


class Recorded:
    """A recording runner of an engine that is second in its group, and the ends of its queues."""

    def __init__(self, directory: Path, context: zmq.Context[Any], log: list[str]) -> None:
        node = NodeConfig(
            engines=4,
            max_group=2,
            policy="manual",
            runtime_dir=str(directory),
            recording_dir=str(directory),
        )
        workers = {unit.layout: LoggedWorker(unit, log) for unit in (OWN, GROUP)}
        loader: Any = SimpleNamespace(workers=workers)
        self.runner = RecordingRunner(node, ENGINE, loader, context)
        self._queues = {unit: context.socket(zmq.PUSH) for unit in (OWN, GROUP)}
        for unit, queue in self._queues.items():
            queue.connect(Addresses(directory).queue(unit, ENGINE))

    def do(self, unit: Unit, *instructions: steps.Instruction) -> None:
        for instruction in instructions:
            self._queues[unit].send(steps.dumps(instruction))
            if not isinstance(instruction, steps.Attach):
                self.runner._turn()

    def own(self, *instructions: steps.Instruction) -> None:
        self.do(OWN, *instructions)

    def group(self, *instructions: steps.Instruction) -> None:
        self.do(GROUP, *instructions)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def recorded(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    monkeypatch.setattr(recorder_module, "device_marks", lambda: LoggedMarks(log))
    context: zmq.Context[Any] = zmq.Context()
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-test-") as directory:
            recorded = Recorded(Path(directory), context, log)
            yield recorded
            recorded.runner._responder.close()
    finally:
        context.destroy(linger=0)


def bind(epoch: int) -> steps.Bind:
    return steps.Bind(epoch, [1], {engine: [1] for engine in GROUP.engines}, seed=0)


def phases_of(recorded: Recorded) -> list[BoundPhase]:
    return read_phases(recorded.runner._recorder._directory, ENGINE)


def test_the_first_step_of_a_group_is_marked_before_it_runs_and_nothing_waits_for_it(
    recorded: Recorded, log: list[str]
) -> None:
    recorded.own(step(64), step(65), steps.Attach(GROUP.layout))
    recorded.group(bind(7), step(0), step(4), step(1))
    assert log == [
        *("tp1 of 64", "tp1 samples", "freed", "tp1 of 65", "tp1 samples", "freed"),
        *("tp2 of 0", "tp2 samples", "began", "tp2 of 4", "tp2 samples"),
        *("tp2 of 1", "tp2 samples"),
    ]
    assert phases_of(recorded) == []
    recorded.group(steps.Detach(7))
    assert log[-1] == "take"
    (phase,) = phases_of(recorded)
    assert phase.epoch == 7
    assert phase.freed is not None
    assert phase.taken is not None
    assert phase.began is not None
    assert phase.freed <= phase.taken <= phase.began


def test_own_steps_that_are_sampled_later_end_with_that(recorded: Recorded, log: list[str]) -> None:
    apart = replace(step(64), sample=False)
    recorded.own(apart, steps.Sample(1, None), steps.Attach(GROUP.layout))
    recorded.group(bind(7), steps.Detach(7))
    assert log == ["tp1 of 64", "freed", "tp1 samples", "freed", "take"]


def test_the_start_of_a_layout_s_core_is_no_phase(recorded: Recorded, log: list[str]) -> None:
    recorded.own(steps.Attach(GROUP.layout))
    recorded.group(steps.Detach(0))
    assert (log, phases_of(recorded)) == ([], [])


def test_a_gpu_s_marks_are_events_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(recorder_module.device_marks(), HostMarks)
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(recorder_module, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(torch.cuda, "Event", lambda **settings: made.append(settings))
    assert isinstance(recorder_module.device_marks(), EventMarks)
    assert made == [{"enable_timing": True}]
