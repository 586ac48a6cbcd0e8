"""Recordings asked for and put together, over a server whose runners are made up."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from shoal.loadgen.bench.breakdown import NotRecordedError, breakdown, joined
from shoal.loadgen.bench.breakdown_tables import breakdown_table
from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.kernels import Activity, Kind
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.systems import SHOAL, Settings, System, dp_layout, recording, tp_layout
from shoal.loadgen.bench.token_client import Answer
from shoal.runtime.protocol.messages import Mode
from shoal.runtime.protocol.recording import (
    RecordedStep,
    Recording,
    recording_file,
    request_file,
    trace_file,
)

SIZES = Sizes(long_prompts=(100,), long_repeats=3)
SYSTEM = System(
    SHOAL, ("serve", "--max-sp", "2"), (dp_layout(2, pinned=False), tp_layout(2)), switches=True
)
BESIDE, PROMPT = 4, 100
SETTINGS = Settings("x", 2, "bfloat16", None, 32768, 256, 8192, 0.9, False, 1, ())


def steps(*tokens: int, mode: Mode = Mode.TP) -> list[RecordedStep]:
    """Return steps that begin one second after the other, the first at 0."""
    return [RecordedStep(float(place), count, mode) for place, count in enumerate(tokens)]


# --- one prompt ---


def test_a_prefill_is_what_its_engines_did_since_its_first_step() -> None:
    before = Activity(Kind.GEMM, 0.1, 0.9)
    first = [before, Activity(Kind.GEMM, 1.5, 2.5), Activity(Kind.ALL_REDUCE, 2.5, 4.0)]
    second = [before, Activity(Kind.GEMM, 2.0, 3.0), Activity(Kind.ALL_REDUCE, 3.0, 5.0)]
    after = Activity(Kind.GEMM, 6.5, 7.0)
    recorded = steps(BESIDE, PROMPT, 20, mode=Mode.SP)
    told = [*recorded, RecordedStep(6.0, 0, Mode.TP)]
    found = joined([(told, [*first, after]), (recorded, second)], ttft=6.0)
    assert (found.mode, found.steps, found.span, found.ttft) == (Mode.SP, 2, 4.0, 6.0)
    kinds = {kind: seconds for kind, seconds in found.kinds.items() if seconds}
    assert kinds == {Kind.GEMM: 1.0, Kind.ALL_REDUCE: 1.75, Kind.HOST: 1.25}


@pytest.mark.parametrize(
    ("tokens", "activities", "reason"),
    [
        ((BESIDE, 0, BESIDE), [Activity(Kind.GEMM, 0.0, 5.0)], "no step of the prompt"),
        ((BESIDE, PROMPT), [Activity(Kind.GEMM, 0.0, 0.5)], "no kernel was recorded"),
    ],
)
def test_a_recording_without_the_prompt_is_refused(
    tokens: tuple[int, ...], activities: list[Activity], reason: str
) -> None:
    with pytest.raises(NotRecordedError, match=reason):
        joined([(steps(*tokens), activities)], ttft=1.0)


# --- the measure ---


class Engines:
    """Two engines as a client sees them; they record as ``engine.recorder`` does.

    A step takes ten seconds more than its tokens' milliseconds. Alone, engines are taken by chance.
    """

    def __init__(
        self, directory: Path, floor: int = 0, ceiling: int = 10**9, *, always: bool = False
    ) -> None:
        self.directory, self.floor, self.ceiling, self.always = directory, floor, ceiling, always
        self.together, self.threshold = False, 10**9
        self.now = 0.0
        self.recordings: dict[int, tuple[str, list[RecordedStep]]] = {}
        self._draw = Random(1)

    async def call(self, _method: str, path: str, body: Any = None) -> Any:
        if path == "/admin/layout":
            self.together = body["units"] == [[0, 1]]
        else:
            self.threshold = 10**9 if body["threshold"] == "off" else body["threshold"]
        return {"duration_seconds": 0.0}

    async def generate(self, prompt: list[int], tokens: int, **_: Any) -> Answer:
        assert tokens == 1
        engines = [0, 1] if self.together else [self._draw.randrange(2)]
        above = self.always or max(self.threshold, self.floor) < len(prompt) <= self.ceiling
        shifts = self.together and above
        for engine in engines:
            self._look(engine)
            mode = Mode.SP if shifts else Mode.TP
            if engine in self.recordings:
                self.recordings[engine][1].append(RecordedStep(self.now, len(prompt), mode))
        sent = self.now
        self.now += 10.0 + len(prompt) / 1000
        return Answer(sent, self.now, unit=",".join(map(str, engines)))

    def _look(self, engine: int) -> None:
        request = request_file(self.directory)
        wanted = request.read_text() if request.exists() else ""
        name, recorded = self.recordings.get(engine, ("", []))
        if name == wanted:
            return
        if name:
            self._write(name, engine, recorded)
            del self.recordings[engine]
        if wanted:
            self.recordings[engine] = (wanted, [])

    def _write(self, name: str, engine: int, recorded: list[RecordedStep]) -> None:
        kernels = [
            {"ph": "X", "cat": "kernel", "name": kernel, "ts": begin * 1e6, "dur": seconds * 1e6}
            for step in recorded
            for kernel, begin, seconds in (
                ("nvjet", step.begin + 1, 2.0),
                ("ncclDevKernel_SendRecv" if step.mode is Mode.SP else "gemm", step.begin + 3, 1.0),
            )
        ]
        content = {"baseTimeNanoseconds": 0, "traceEvents": kernels}
        trace_file(self.directory, name, engine).write_text(json.dumps(content))
        written = msgspec.json.encode(Recording(recorded))
        recording_file(self.directory, name, engine).write_bytes(written)


def measured(
    directory: Path, prompts: tuple[int, ...] = (PROMPT,), **settings: Any
) -> dict[str, Any]:
    engines: Any = Engines(directory, **settings)
    sizes = msgspec.structs.replace(SIZES, long_prompts=prompts)
    return asyncio.run(breakdown(engines, recording(SYSTEM, directory), sizes))


def reported(found: dict[str, Any]) -> list[str]:
    results = Results(SETTINGS, SIZES, read_shape("llama-3-8b"), {})
    results.systems[SHOAL] = SystemResults([], measures={"breakdown": found})
    return breakdown_table(results)


def test_every_way_of_working_is_recorded(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert list(found["ways"]) == ["dp", "tp2", "sp2"]
    for way, figures in found["ways"].items():
        part = figures["100"]
        assert [part["ttft"], part["ttft_recorded"]] == pytest.approx([10.1, 10.1])
        assert (part["span"], part["steps"]) == (pytest.approx(4.0), 1)
        exchanged = part["kinds"][Kind.ALL_TO_ALL]
        assert exchanged == pytest.approx(1.0 if way == "sp2" else 0.0)
        assert part["kinds"][Kind.HOST] == pytest.approx(1.0)
    assert not request_file(tmp_path).exists()


def test_a_prompt_that_cannot_run_as_sp_is_no_figure_of_sp(tmp_path: Path) -> None:
    """And of the other ways it is one, as longer ones are of SP."""
    found = measured(tmp_path, floor=512, prompts=(600, 100))
    assert [way for way, figures in found["ways"].items() if figures["100"]] == ["dp", "tp2"]
    assert list(found["ways"]["sp2"]) == ["600", "100"]
    lines = reported(found)
    assert "| 100 tokens, ms (of the runner's time) | dp | tp2 |" in lines
    assert "| 600 tokens, ms (of the runner's time) | dp | tp2 | sp2 |" in lines
    assert "| host | 1000.00 (25%) | 1000.00 (25%) |" in lines


@pytest.mark.parametrize("prompts", [(100,), (300, 100)])
def test_that_no_prompt_runs_as_sp_is_told(prompts: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(NotRecordedError, match=f"sp2: a step of {prompts[0]} tokens ran as tp"):
        measured(tmp_path, floor=512, prompts=prompts)
    assert not request_file(tmp_path).exists()


def test_shorter_prompts_alone_may_run_as_tp(tmp_path: Path) -> None:
    """A longer one beside one that ran as SP is a fault."""
    with pytest.raises(NotRecordedError, match="sp2: a step of 900 tokens ran as tp"):
        measured(tmp_path, ceiling=800, prompts=(600, 900))


def test_a_prompt_that_should_run_as_tp_and_does_not_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotRecordedError, match="tp2: a step of 100 tokens ran as sp"):
        measured(tmp_path, always=True)
    assert not request_file(tmp_path).exists()


def test_the_report_has_a_column_for_each_way(tmp_path: Path) -> None:
    assert breakdown_table(Results(SETTINGS, SIZES, read_shape("llama-3-8b"), {})) == []
    lines = reported(measured(tmp_path))
    assert "| 100 tokens, ms (of the runner's time) | dp | tp2 | sp2 |" in lines
    assert "| all-to-all | 0.00 (0%) | 0.00 (0%) | 1000.00 (25%) |" in lines
    assert "| host | 1000.00 (25%) | 1000.00 (25%) | 1000.00 (25%) |" in lines
    assert not any(line.startswith("| all-reduce") for line in lines)


def test_shoal_alone_is_started_to_record(tmp_path: Path) -> None:
    started = recording(SYSTEM, tmp_path)
    assert started.command == (*SYSTEM.command, "--recording-dir", str(tmp_path))
    assert replace(started, command=SYSTEM.command, recording_dir=None) == SYSTEM
