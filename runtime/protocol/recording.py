"""The files, all in one directory, through which runners give recordings to a benchmark.

A benchmark writes the name of a recording to the file ``REQUEST``. Every runner reads it before
each step. It records from the first step that finds a name until a step finds another name or none.
No HTTP route or message asks for a recording; only the user who started the node can write there.

Runners also record binds without being asked: they write one line each time they leave a group.
"""

from pathlib import Path

import msgspec

from shoal.runtime.protocol.messages import Mode

REQUEST = "record"
"""Name of the file that names the wanted recording."""


class RecordedStep(msgspec.Struct, frozen=True):
    """One step that a runner took while it recorded."""

    begin: float
    """When the runner began to work on it, in seconds since the epoch."""
    tokens: int
    mode: Mode


class Recording(msgspec.Struct, frozen=True):
    """What one runner recorded. Its file appears only when the recording is complete."""

    steps: list[RecordedStep]


class BoundPhase(msgspec.Struct, frozen=True):
    """What one runner saw while its engine was in a group, from bind to release.

    Times are seconds since the epoch (1970).
    """

    epoch: int
    """The controller's epoch of the bind."""
    freed: float | None
    """When the device finished the last of the engine's own steps before the bind; None: there were
    none since the last phase."""
    taken: float | None
    """When the runner began to work on the group's first step with tokens; None: there was none."""
    began: float | None
    """When the device reached that step, after all work that was queued before it."""


def request_file(directory: Path) -> Path:
    """Return the file that names the wanted recording; without the file, none is wanted."""
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

    A last line without a line end is left out, because it is still being written.
    """
    try:
        content = phases_file(directory, engine).read_bytes()
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=BoundPhase) for line in lines]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that no reader ever sees a part of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
