"""Readers of traces: files of requests that were served somewhere, without their text."""

import csv
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from loadgen.workload import Arrival, Workload, with_phases

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Of the Azure LLM inference traces of 2023."""
_MICROSECONDS = len("2023-11-16 18:17:03.979960")


class TraceError(ValueError):
    """A trace that cannot be read; the message is one line that names the file and its line."""


def read_azure(path: Path) -> Workload:
    """Read a trace in the format of Azure's public data set of 2023.

    Requests come in the order of their time stamps, the first at 0 s; one that generated nothing is
    left out.

    Raises:
        TraceError: the file is not there or not such a trace.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if not set(AZURE_COLUMNS) <= set(reader.fieldnames or ()):
                raise TraceError(f"{path}: its columns are not {', '.join(AZURE_COLUMNS)}")
            rows = sorted(_rows(path, reader))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no request in it")
    first = rows[0][0]
    arrivals = [Arrival((at - first).total_seconds(), prompt, out) for at, prompt, out in rows]
    return Workload(path.stem, with_phases(arrivals))


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[tuple[datetime, int, int]]:
    for number, row in enumerate(reader, start=2):
        try:
            at, prompt, output = _row(row)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if prompt > 0 and output > 0:
            yield at, prompt, output


def _row(row: Mapping[str, str]) -> tuple[datetime, int, int]:
    # Seven digits of a second are one more than Python 3.11 reads.
    at = datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS])
    return at, int(row["ContextTokens"]), int(row["GeneratedTokens"])
