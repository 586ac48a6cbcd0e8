"""A runner that records what its device does while a benchmark asks for it (``recording.py``).

It also notes when the first step of each group that it is in begins (``bound_phases.py``).
It replaces ``runner.Runner`` in a node that was started with a directory for recordings, so that no
other node pays for recording.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity
from vllm.platforms import current_platform

from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.runner.bound_phases import BoundPhases, EventMarks, HostMarks, Marks
from shoal.runtime.engine.runner.runner import Runner, run_runner
from shoal.runtime.protocol.recording import (
    RecordedStep,
    Recording,
    phases_file,
    recording_file,
    request_file,
    trace_file,
    write_atomically,
)


class Recorder:
    """One runner's recordings.

    Args:
        directory: where requests for recordings, and recordings, are.
        engine: the runner's engine.
    """

    def __init__(self, directory: Path, engine: int) -> None:
        self._directory = directory
        self._engine = engine
        self._name = ""
        self._profile: Any = None
        self._steps: list[RecordedStep] = []

    def look(self, step: instructions.Step) -> None:
        """Begin or end a recording before ``step``, if the request says so."""
        wanted = self._wanted()
        if wanted != self._name:
            if self._name:
                self._end()
            self._name = wanted
            if wanted:
                self._begin()
        if self._name:
            tokens = step.scheduler_output.total_num_scheduled_tokens
            self._steps.append(RecordedStep(time.time(), tokens, step.mode))

    def _wanted(self) -> str:
        try:
            return request_file(self._directory).read_text().strip()
        except FileNotFoundError:
            return ""

    def _begin(self) -> None:
        # With a GPU, the host's work is not recorded: recording would slow it down.
        activity = ProfilerActivity.CUDA if current_platform.is_cuda() else ProfilerActivity.CPU
        self._steps = []
        self._profile = torch.profiler.profile(activities=[activity])
        self._profile.start()

    def _end(self) -> None:
        if current_platform.is_cuda():
            torch.cuda.synchronize()
        self._profile.stop()
        trace = trace_file(self._directory, self._name, self._engine)
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        path = recording_file(self._directory, self._name, self._engine)
        write_atomically(path, msgspec.json.encode(Recording(self._steps)))


def device_marks() -> Marks:
    """Return marks of the platform's device; with CUDA, of the current device."""
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

    def _on_step(self, step: instructions.Step) -> None:
        self._phases.group_step(step.scheduler_output.total_num_scheduled_tokens)
        self._recorder.look(step)
        super()._on_step(step)
        self._phases.step_queued()

    def _on_sample(self, sample: instructions.Sample) -> None:
        super()._on_sample(sample)
        self._phases.step_queued()

    def _on_bind(self, bind: instructions.Bind) -> None:
        super()._on_bind(bind)
        self._phases.bound(bind.epoch)

    def _on_detach(self, detach: instructions.Detach) -> None:
        super()._on_detach(detach)
        self._phases.left()


def run_recording_runner(node: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: ``run_runner`` with a ``RecordingRunner``."""
    run_runner(node, engine, incarnation, RecordingRunner)
