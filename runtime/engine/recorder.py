"""A runner that records what its device does while a benchmark asks for it (``recording.py``).

It also notes when the first step of each group that it is in begins (``bound_phases.py``).
It takes the place of ``runner.Runner`` in a node that was started with a directory for it, so that
no other node pays for it.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity
from vllm.platforms import current_platform

from runtime.config import NodeConfig
from runtime.engine import steps
from runtime.engine.bound_phases import BoundPhases, EventMarks, HostMarks, Marks
from runtime.engine.runner import Runner, run_runner
from runtime.engine.shift import Shift
from runtime.engine.turns import OWN
from runtime.messages import Mode
from runtime.recording import (
    RecordedStep,
    Recording,
    ShiftCost,
    phases_file,
    recording_file,
    request_file,
    trace_file,
    write_atomically,
)

LOOPS = 1000
"""Repetitions of what takes less than a microsecond or two."""


class Stopwatch:
    """Adds up the time that entering context managers, and leaving them, takes.

    Args:
        clock: nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._elapsed = 0

    @contextmanager
    def timed(
        self, manager: Callable[..., AbstractContextManager[None]], *args: Any
    ) -> Iterator[None]:
        """Be in ``manager(*args)``; what the body takes does not count (``ulysses.Entering``)."""
        start = self._clock()
        with manager(*args):
            self._elapsed += self._clock() - start
            try:
                yield
            finally:
                start = self._clock()
        self._elapsed += self._clock() - start

    def take(self) -> float:
        """Return the seconds since this was last asked."""
        elapsed, self._elapsed = self._elapsed, 0
        return elapsed / 1e9


class Recorder:
    """One runner's recordings.

    Args:
        directory: of requests and recordings.
        engine: the runner's engine.
    """

    def __init__(self, directory: Path, engine: int) -> None:
        self._directory = directory
        self._engine = engine
        self._name = ""
        self._profile: Any = None
        self._steps: list[RecordedStep] = []
        self._entering: defaultdict[Mode, list[float]] = defaultdict(list)

    def look(self, step: steps.Step) -> None:
        """Begin or end a recording before ``step``, if the request says so."""
        wanted = self._wanted()
        if wanted != self._name:
            if self._name:
                self._end(step)
            self._name = wanted
            if wanted:
                self._begin()
        if self._name:
            tokens = step.scheduler_output.total_num_scheduled_tokens
            self._steps.append(RecordedStep(time.time(), tokens, step.mode))

    def entered(self, mode: Mode, seconds: float) -> None:
        """Take note of what the way into a mode, and out of it, took in the step that has run."""
        if not self._name:  # a profiler that records what the host does makes it slower
            self._entering[mode].append(seconds)

    def _wanted(self) -> str:
        try:
            return request_file(self._directory).read_text().strip()
        except FileNotFoundError:
            return ""

    def _begin(self) -> None:
        # What the host does is left out on a GPU: to record it would be to slow it down.
        activity = ProfilerActivity.CUDA if current_platform.is_cuda() else ProfilerActivity.CPU
        self._steps = []
        self._profile = torch.profiler.profile(activities=[activity])
        self._profile.start()

    def _end(self, step: steps.Step) -> None:
        if current_platform.is_cuda():
            torch.cuda.synchronize()
        self._profile.stop()
        trace = trace_file(self._directory, self._name, self._engine)
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        recording = Recording(self._steps, shift_cost(step, self._entering))
        self._entering.clear()
        path = recording_file(self._directory, self._name, self._engine)
        write_atomically(path, msgspec.json.encode(recording))


def shift_cost(step: steps.Step, entering: dict[Mode, list[float]]) -> ShiftCost:
    """Return what the mode of a step costs, with what entering it was seen to take.

    Args:
        step: whose message is written and read, with its mode and without.
        entering: see ``ShiftCost``.
    """
    tokens = step.scheduler_output.total_num_scheduled_tokens
    shift = Shift(floor=0, threshold=tokens)
    bare = replace(step, mode=None)  # type: ignore[arg-type]  # nobody runs it
    with_mode, without = (_median(partial(_there_and_back, one)) for one in (step, bare))
    return ShiftCost(
        choice=_median(partial(shift.mode, tokens)),
        message=max(0.0, with_mode - without),
        entering={mode: list(times) for mode, times in entering.items()},
    )


def _there_and_back(step: steps.Step) -> None:
    steps.loads(steps.dumps(step))


def _median(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    times = []
    for _ in range(LOOPS):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e9


def device_marks() -> Marks:
    """Return the marks of the platform's device, with CUDA of the one that is current."""
    if current_platform.is_cuda():
        return EventMarks(partial(torch.cuda.Event, enable_timing=True))
    return HostMarks()


class RecordingRunner(Runner):
    """See the module; the arguments are those of ``Runner``."""

    def __init__(self, node: NodeConfig, engine: int, *args: Any) -> None:
        super().__init__(node, engine, *args)
        assert node.recording_dir is not None
        directory = Path(node.recording_dir)
        self._recorder = Recorder(directory, engine)
        self._phases = BoundPhases(phases_file(directory, engine), device_marks())
        self._stopwatch = Stopwatch()
        for layout in self._layouts.values():
            layout.enter_through(self._stopwatch.timed)

    def _on_step(self, step: steps.Step) -> None:
        if self._degree != OWN:
            self._phases.group_step(step.scheduler_output.total_num_scheduled_tokens)
        self._recorder.look(step)
        super()._on_step(step)
        self._recorder.entered(step.mode, self._stopwatch.take())
        self._phases.step_queued()

    def _on_sample(self, sample: steps.Sample) -> None:
        super()._on_sample(sample)
        self._phases.step_queued()

    def _on_bind(self, bind: steps.Bind) -> None:
        super()._on_bind(bind)
        self._phases.bound(bind.epoch)

    def _on_detach(self, detach: steps.Detach) -> None:
        super()._on_detach(detach)
        self._phases.left()


def run_recording_runner(node: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: ``run_runner`` with a ``RecordingRunner``."""
    run_runner(node, engine, incarnation, RecordingRunner)
