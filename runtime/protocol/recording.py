"""What a recording runner tells the benchmark that asked for it: files of one directory.

A benchmark names a recording in the file ``REQUEST``. Every runner looks there before each step: it
records from the first step that finds a name, and ends with the first that finds another or none.
There is no route and no message: whoever can write to the directory is who started the node.

Of binds runners write without being asked: a line each, when they are out of the group again.
"""

from pathlib import Path

import msgspec

from shoal.runtime.protocol.messages import Mode

REQUEST = "record"
"""Name of the file that says which recording is to be made."""


class RecordedStep(msgspec.Struct, frozen=True):
    """One step that a runner took while it recorded."""

    begin: float
    """When the runner took it up, in seconds since the epoch."""
    tokens: int
    mode: Mode


class Recording(msgspec.Struct, frozen=True):
    """What one runner recorded. Its file is there once all of it is."""

    steps: list[RecordedStep]


class BoundPhase(msgspec.Struct, frozen=True):
    """What one runner saw of a phase in which its engine was in a group: from bind to release.

    Times are seconds since the epoch (1970).
    """

    epoch: int
    """Of the bind, as the controller counts them."""
    freed: float | None
    """When the device had done the last of the engine's own steps; None: there was none since the
    phase before."""
    taken: float | None
    """When the runner took up the group's first step of any tokens; None: the group ran none."""
    began: float | None
    """When the device, too, had come to that step: all that was queued before it was done."""


def request_file(directory: Path) -> Path:
    """Return the file that names the recording to be made; without it there is none."""
    return directory / REQUEST


def recording_file(directory: Path, name: str, engine: int) -> Path:
    """Return where a runner writes its ``Recording``, as JSON."""
    return directory / f"{name}-{engine}.json"


def trace_file(directory: Path, name: str, engine: int) -> Path:
    """Return where a runner writes what ``torch.profiler`` saw, as a Chrome trace."""
    return directory / f"{name}-{engine}.trace.json"


def phases_file(directory: Path, engine: int) -> Path:
    """Return where a runner writes its ``BoundPhase``s: a line of JSON each, in order of time."""
    return directory / f"bound-{engine}.jsonl"


def append_phase(path: Path, phase: BoundPhase) -> None:
    """Write one more phase to ``phases_file``.

    To write all of them anew at each release (``write_atomically``) would hold the runner up for
    the longer the more there are.
    """
    with path.open("ab") as file:
        file.write(msgspec.json.encode(phase) + b"\n")


def read_phases(directory: Path, engine: int) -> list[BoundPhase]:
    """Return the phases that a runner has written; none while it has written nothing.

    A last line without its end is left out: it is being written.
    """
    try:
        content = phases_file(directory, engine).read_bytes()
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=BoundPhase) for line in lines]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file of which no reader sees a part."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
