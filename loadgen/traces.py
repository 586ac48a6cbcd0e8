"""Readers of traces: files of requests that were served elsewhere, without their text."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.loadgen.workload import Arrival, Block, Workload, with_phases

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one id of a Mooncake trace's ``hash_ids`` stands for."""
BAILIAN_BLOCK_TOKENS = 16
"""The same of a trace of Qwen on Bailian."""
_MICROSECONDS = len("2023-11-16 18:17:03.979960")

Row = Mapping[str, str]


class TraceError(ValueError):
    """A trace cannot be read; the message is one line that names the file and its line."""


class HashedLine(msgspec.Struct, frozen=True):
    """One request of a Mooncake trace, or of Bailian's, which has the same fields and others."""

    timestamp: float
    """Milliseconds in Mooncake's traces, seconds in Bailian's."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace in the project's own format."""

    at: float
    """Seconds."""
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    prefix: str | int | None = None
    """Prompts with the same ``prefix`` begin with the same ``prefix_tokens`` tokens."""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_trace(path: Path) -> Workload:
    """Read a trace, whose format is recognised by its columns or fields (``docs/replay.md``).

    Requests come in the order of their time stamps, the first at 0 s. Requests without prompt or
    output tokens are left out.

    Raises:
        TraceError: the file does not exist or is not such a trace.
    """
    try:
        with path.open(newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            found = _json_lines(path, file) if is_json else _csv_rows(path, file)
            arrivals = [a for a in found if a.prompt_tokens > 0 and a.output_tokens > 0]
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not arrivals:
        raise TraceError(f"{path}: no request in it")
    arrivals.sort(key=lambda arrival: arrival.at)
    start = arrivals[0].at
    return Workload(path.stem, with_phases([replace(a, at=a.at - start) for a in arrivals]))


# --- CSV ------------------------------------------------------------------------------------------


def _azure(row: Row) -> Arrival:
    # Cut off the seventh digit of the seconds, which Python 3.11 cannot read, and any time zone.
    at = datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS]).replace(tzinfo=UTC)
    return Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(row: Row) -> Arrival:
    return Arrival(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


CSV_FORMATS: Mapping[tuple[str, ...], Callable[[Row], Arrival]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burstgpt,
}
"""Functions that read a row, by the columns that they need."""


def _csv_rows(path: Path, file: Iterable[str]) -> Iterator[Arrival]:
    reader = csv.DictReader(file)
    columns = set(reader.fieldnames or ())
    read = next((read for needed, read in CSV_FORMATS.items() if columns >= set(needed)), None)
    if read is None:
        known = " nor ".join(", ".join(needed) for needed in CSV_FORMATS)
        raise TraceError(f"{path}: its columns are neither {known}")
    for number, row in enumerate(reader, start=2):
        try:
            yield read(row)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error


# --- JSON lines -----------------------------------------------------------------------------------


def _mooncake(line: str) -> Arrival:
    return _hashed(line, 1000, MOONCAKE_BLOCK_TOKENS)


def _bailian(line: str) -> Arrival:
    return _hashed(line, 1, BAILIAN_BLOCK_TOKENS)


def _hashed(line: str, second: int, block: int) -> Arrival:
    """Read a line whose time is in parts of a second, and whose ids stand for so many tokens."""
    one = msgspec.json.decode(line, type=HashedLine)
    prefix = tuple(Block(str(id_), block) for id_ in one.hash_ids)
    return Arrival(one.timestamp / second, one.input_length, one.output_length, prefix=prefix)


def _own(line: str) -> Arrival:
    one = msgspec.json.decode(line, type=Line)
    prefix = () if one.prefix is None else (Block(str(one.prefix), one.prefix_tokens),)
    return Arrival(one.at, one.prompt_tokens, one.output_tokens, one.priority, prefix=prefix)


def _reader(first: str) -> Callable[[str], Arrival]:
    """Return what reads the lines of a trace, by the fields of its first line."""
    fields = msgspec.json.decode(first)
    if "timestamp" not in fields:
        return _own
    return _bailian if "chat_id" in fields else _mooncake


def _json_lines(path: Path, file: Iterable[str]) -> Iterator[Arrival]:
    read = None
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            read = read or _reader(line)
            yield read(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
