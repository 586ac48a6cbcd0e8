"""What ``shoal bench traffic`` keeps of every request, and its pictures over time."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.curves import Timeline
from shoal.loadgen.plot import draw
from shoal.loadgen.summary import Record


class Requests(msgspec.Struct):
    """The requests of one load, as ``vllm bench serve --save-detailed`` has them; seconds."""

    traffic: str
    """The name of the workload."""
    column: str
    """The system, and its way if it has several."""
    start_times: list[float]
    """When each request was sent, by any clock."""
    ttfts: list[float]
    itls: list[list[float]]
    output_lens: list[int]


def keep_requests(folder: Path, traffic: str, column: str, result: dict[str, Any]) -> None:
    """Write the requests of a load, for ``kept_requests``.

    Args:
        folder: where the file goes.
        traffic: the name of the workload.
        column: the system, and its way if it has several.
        result: the result of a client, with details.

    Raises:
        OSError: the file cannot be written.
    """
    requests = msgspec.convert({"traffic": traffic, "column": column, **result}, Requests)
    folder.mkdir(exist_ok=True)
    (folder / f"{_slug(traffic)}--{_slug(column)}.json").write_bytes(msgspec.json.encode(requests))


def kept_requests(folder: Path) -> list[Requests]:
    """Return what ``keep_requests`` has written to a folder."""
    paths = sorted(folder.glob("*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=Requests) for path in paths]


def draw_all(kept: Iterable[Requests], folder: Path) -> list[Path]:
    """Draw one picture for each workload, with a curve for each system; return their files."""
    found: defaultdict[str, list[Requests]] = defaultdict(list)
    for one in kept:
        found[one.traffic].append(one)
    pictures = []
    for traffic, runs in found.items():
        picture = folder / f"{_slug(traffic)}.svg"
        picture.write_text(draw(traffic, [timeline(run) for run in runs]), encoding="utf-8")
        pictures.append(picture)
    return pictures


def timeline(run: Requests) -> Timeline:
    """Return a run's data for a picture; its first request is sent at 0 s."""
    begin = min(run.start_times, default=0.0)
    records, tokens = [], defaultdict[int, float](float)
    for sent, ttft, itls, count in zip(
        run.start_times, run.ttfts, run.itls, run.output_lens, strict=True
    ):
        times = list(accumulate(itls, initial=sent - begin + ttft))
        if count > 0:
            _spread(tokens, times, count)
        records.append(_record(sent - begin, times, count))
    return Timeline(run.column, records, tokens=tokens)


def _record(sent: float, times: Sequence[float], count: int) -> Record:
    done = count > 0
    return Record(
        arrived=sent,
        started=None,
        first_token=times[0] if done else None,
        ended=times[-1] if done else None,
        output_tokens=count,
        finished=done,
    )


def _spread(tokens: defaultdict[int, float], times: Iterable[float], count: int) -> None:
    """Add a request's tokens: a chunk may have several, and all are taken to have equally many."""
    seconds = [int(time) for time in times]
    for second in seconds:
        tokens[second] += count / len(seconds)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
