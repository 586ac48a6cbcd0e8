"""Where the time of a prefill goes in DP, TP and SP, as in Shift Parallelism's Figure 13.

The node's runners record (``runtime/protocol/recording.py``) while one prompt is computed. A
request before it makes every member of a group begin to record; otherwise a member that only begins
to record would keep the others waiting in a collective. That first request is left out of the
figures.
"""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, dropwhile, takewhile
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from shoal.loadgen.bench.kernels import Activity, Kind, divided, read_trace
from shoal.loadgen.bench.measures import Bench, Sizes, first_tokens
from shoal.loadgen.bench.modes import Way, enter, leave, pure_ways
from shoal.loadgen.bench.systems import System
from shoal.loadgen.bench.token_client import Answer, Client
from shoal.runtime.protocol.messages import Mode
from shoal.runtime.protocol.recording import (
    RecordedStep,
    Recording,
    recording_file,
    request_file,
    trace_file,
    write_atomically,
)

BREAKDOWN = "breakdown"
"""Name of the measure."""
BESIDE_TOKENS = 4
"""Prompt length of the requests that begin and end a recording: shorter than measured ones."""
CLOSING_ROUNDS = 20
"""How many rounds of such requests may be sent until the engine that recorded has had one."""
POLL_SECONDS = 0.05
WRITING_SECONDS = 120.0
"""How long a runner may take to write a recording after the request that ends it was answered."""


class NotRecordedError(RuntimeError):
    """A recording does not show what it was made for; the message is one line."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt that its engines recorded while they computed it. Times are seconds."""

    mode: Mode
    """Mode of its first step."""
    steps: int
    span: float
    """From the moment when the first runner took it up to the end of the last kernel."""
    kinds: Mapping[Kind, float]
    """The span by what it was spent on: means over the engines."""
    ttft: float
    """The client's time to first token, which includes HTTP, tokenisation and scheduling."""


async def breakdown(client: Client, system: System, sizes: Sizes) -> dict[str, Any]:
    """Return the parts of a prefill's time, for each way of working.

    Raises:
        NotRecordedError: engines have not recorded what they should have.
    """
    assert system.recording_dir is not None
    session = _Session(system.recording_dir)
    found: dict[str, Any] = {}
    for way in pure_ways(system):
        await enter(client, system, way)
        bench = Bench(client, system, way.layout, sizes, Random(way.name))
        parts = {tokens: await _parts(session, bench, way, tokens) for tokens in sizes.long_prompts}
        _check_lengths(way.name, parts)
        found[way.name] = {str(tokens): part for tokens, part in parts.items()}
    await leave(client, system)
    return {"ways": found}


def _check_lengths(way: str, parts: Mapping[int, Any]) -> None:
    """Check that only the shortest prompts did not run as SP: TP has CUDA graphs for those."""
    without = [tokens for tokens, part in parts.items() if part is None]
    if without and max(without) > min(parts.keys() - without, default=0):
        raise NotRecordedError(f"{way}: a step of {max(without)} tokens ran as {Mode.TP}")


async def _parts(session: "_Session", bench: Bench, way: Way, tokens: int) -> dict[str, Any] | None:
    """Return the recorded prefill with the median span, and the TTFT without recording.

    The result is None if the prompt should have run as SP and did not: TP has CUDA graphs for short
    prompts.
    """
    repeats = bench.sizes.long_repeats
    plain = await first_tokens(bench, tokens, repeats)
    prefills = [await session.prefill(bench, way.name, tokens) for _ in range(repeats)]
    chosen = sorted(prefills, key=lambda prefill: prefill.span)[len(prefills) // 2]
    wanted = Mode.SP if way.name.startswith("sp") else Mode.TP
    if chosen.mode is not wanted:
        if wanted is Mode.SP:
            return None
        raise NotRecordedError(f"{way.name}: a step of {tokens} tokens ran as {chosen.mode}")
    return {
        "ttft": statistics.median(plain),
        "ttft_recorded": chosen.ttft,
        "span": chosen.span,
        "steps": chosen.steps,
        "kinds": dict(chosen.kinds),
    }


class _Session:
    """All recordings of one node.

    Args:
        directory: where its runners look for requests and write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)

    async def prefill(self, bench: Bench, way: str, tokens: int) -> Prefill:
        """Return what the engines recorded while one of them, or their group, computed a prompt."""
        name = f"{way}-{tokens}-{next(self._numbers)}"
        write_atomically(request_file(self._directory), name.encode())
        try:
            await bench.batch(1, BESIDE_TOKENS, 1, 0)
            answer = await bench.client.generate(bench.prompt(tokens), 1, stream=True)
        finally:
            request_file(self._directory).unlink()
        engines = _engines_of(answer)
        await self._close(bench, name, engines)
        parts = [self._read(name, engine) for engine in engines]
        return joined(parts, answer.first - answer.sent)

    async def _close(self, bench: Bench, name: str, engines: Sequence[int]) -> None:
        """Have every engine take a step, which ends its recording."""
        for _ in range(CLOSING_ROUNDS):
            await bench.batch(1, BESIDE_TOKENS, 1, 0)
            if self._is_there(name, engines):
                return
        # The last engine's request may be answered before all engines have written.
        async with asyncio.timeout(WRITING_SECONDS):
            while not self._is_there(name, engines):
                await asyncio.sleep(POLL_SECONDS)

    def _is_there(self, name: str, engines: Sequence[int]) -> bool:
        return all(recording_file(self._directory, name, engine).exists() for engine in engines)

    def _read(self, name: str, engine: int) -> tuple[list[RecordedStep], list[Activity]]:
        content = recording_file(self._directory, name, engine).read_bytes()
        recording = msgspec.json.decode(content, type=Recording)
        return recording.steps, read_trace(trace_file(self._directory, name, engine))


def _engines_of(answer: Answer) -> list[int]:
    if answer.unit is None:
        raise NotRecordedError("the server does not say which engines ran a request")
    return [int(engine) for engine in answer.unit.split(",")]


def joined(
    parts: Sequence[tuple[Sequence[RecordedStep], Sequence[Activity]]], ttft: float
) -> Prefill:
    """Combine the recordings of all engines of a prompt into one prefill.

    Args:
        parts: the steps and the activities of every engine, including those before the prompt.
        ttft: the client's time to first token.

    Raises:
        NotRecordedError: no step of an engine computed the prompt, or none of its kernels ran.
    """
    spans = [_span(steps, activities) for steps, activities in parts]
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    divisions = [divided(activities, begin, end) for _, activities in parts]
    kinds = {kind: statistics.fmean(one[kind] for one in divisions) for kind in Kind}
    steps = spans[0].steps
    return Prefill(steps[0].mode, len(steps), end - begin, kinds, ttft)


@dataclass(frozen=True, slots=True)
class _Span:
    """One engine's part in a prompt."""

    steps: Sequence[RecordedStep]
    begin: float
    end: float


def _span(steps: Sequence[RecordedStep], activities: Sequence[Activity]) -> _Span:
    """Return an engine's part, which begins with the first step of more than ``BESIDE_TOKENS``.

    A step without tokens follows the last step, and tells the runners that the request has ended.
    """
    since = list(dropwhile(lambda step: step.tokens <= BESIDE_TOKENS, steps))
    mine = list(takewhile(lambda step: step.tokens > 0, since))
    if not mine:
        raise NotRecordedError("no step of the prompt was recorded")
    begin = mine[0].begin
    until = since[len(mine)].begin if len(since) > len(mine) else math.inf
    ends = [activity.end for activity in activities if begin <= activity.begin < until]
    if not ends:
        raise NotRecordedError("no kernel was recorded after the prompt's first step began")
    return _Span(mine, begin, max(ends))
