"""What a recording runner tells the benchmark that asked for it: files of one directory.

A benchmark names a recording in the file ``REQUEST``. Every runner looks there before each step: it
records from the first step that finds a name, and ends with the first that finds another or none.
There is no route and no message: whoever can write to the directory is who started the node.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from runtime.messages import Mode

REQUEST = "record"
"""Name of the file that says which recording is to be made."""


class RecordedStep(msgspec.Struct, frozen=True):
    """One step that a runner took while it recorded."""

    begin: float
    """When the runner took it up, in seconds since the epoch."""
    tokens: int
    mode: Mode


class ShiftCost(msgspec.Struct, frozen=True):
    """What a step costs on the host because it may run in either mode, in seconds."""

    choice: float
    """The leader's choice (``engine.shift.Shift.mode``): a median over many."""
    message: float
    """What the mode adds to writing the step's message once and reading it once: likewise."""
    entering: Mapping[Mode, list[float]]
    """A member's way into the mode and out of it, of every step that was taken while nothing was
    recorded: whatever ``Layout`` and ``SequenceParallelModel`` do around the model."""


class Recording(msgspec.Struct, frozen=True):
    """What one runner recorded. Its file is there once all of it is."""

    steps: list[RecordedStep]
    shift: ShiftCost


def request_file(directory: Path) -> Path:
    """Return the file that names the recording to be made; without it there is none."""
    return directory / REQUEST


def recording_file(directory: Path, name: str, engine: int) -> Path:
    """Return where a runner writes its ``Recording``, as JSON."""
    return directory / f"{name}-{engine}.json"


def trace_file(directory: Path, name: str, engine: int) -> Path:
    """Return where a runner writes what ``torch.profiler`` saw, as a Chrome trace."""
    return directory / f"{name}-{engine}.trace.json"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file of which no reader sees a part."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
