"""The measures of a running server: latencies, throughput, switches, numerics.

A measure returns JSON's types; times are in seconds. Every prompt is drawn anew, so that no prefix
cache has it.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shoal.loadgen.bench.systems import Layout, System
from shoal.loadgen.bench.token_client import Answer, Client, Prompt
from shoal.loadgen.summary import quantile

FIRST_TOKEN_ID, SMALLEST_VOCABULARY = 3, 2048
"""Prompts are drawn from these ids, which every vocabulary has."""
MOST_REPEATS = 32
"""The most repeats of a prompt length that ``Sizes.repeated_tokens`` asks for."""
STREAMS_PER_UNIT = 4
"""Requests of a batch whose tokens are timed: few, so that client and front end keep up."""
POLL_SECONDS = 0.05
IDLE_REQUESTS = 20
HEAD_START_SECONDS = 0.001
"""How much earlier a switch under load is asked for than the request that runs after it."""
PATIENCE_SECONDS = 1.0
FIRST_REQUEST, FIRST_ROUNDS = (16, 2), 8
"""Prompt and output tokens of a layout's first requests, and how many requests a unit gets."""


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    """Requests per unit that decode together."""
    decode_tokens: int = 128
    """Prompt tokens of each, and output tokens of each."""
    decode_repeats: int = 3
    prompts: tuple[int, ...] = (512, 4096, 16384)
    """Prompt tokens whose TTFT is measured."""
    prompt_repeats: int = 5
    repeated_tokens: int = 16384
    """Tokens that all prompts of a length have together. So short prompts, which the host delays
    now and then, are repeated more often, up to ``MOST_REPEATS`` times."""
    saturation: tuple[int, int, int] = (256, 512, 128)
    """Requests per engine, their prompt tokens, their output tokens."""
    saturation_repeats: int = 3
    switches: int = 200
    load: int = 64
    """Requests that every engine decodes in loaded switches."""
    load_tokens: int = 4096
    """Output tokens of each request; another request follows it."""
    pause_seconds: float = 0.03
    """Pause between loaded switches, in which the engines go on decoding."""
    carry_cases: tuple[tuple[int, int], ...] = ((8, 4096), (8, 16384), (64, 1024))
    """Requests on the node that switches carry, and the prompt tokens of each."""
    carry_switches: int = 100
    """Binds of each case, and releases."""
    carry_lot: int = 4
    """After so many of both, other requests run, because requests grow from switch to switch."""
    carry_tokens: int = 8192
    """The most output tokens of each of them; a case ends earlier if a request has them all."""
    carry_steps: int = 8
    """Tokens that every request gets between two switches."""
    long_prompts: tuple[int, ...] = (4096, 16384, 65536)
    """Prompt tokens whose TTFT is measured in every way of working (``modes.py``)."""
    long_repeats: int = 3
    prompt_load: tuple[int, int, int] = (12, 8192, 1)
    """Requests per engine, their prompt tokens, their output tokens: mostly prompts."""
    combined_load: tuple[int, int, int] = (32, 4096, 250)
    """The same for prompts and outputs, as in Shift Parallelism's Figure 9."""
    throughput_repeats: int = 2
    shift_threshold: int = 256
    """The paper's threshold, for the way of working that changes its mode."""
    scored: tuple[int, int, int] = (8, 700, 24)
    """Prompts whose log probabilities are compared, their prompt tokens, their output tokens. The
    prompts are longer than the largest captured graph, so that SP can compute them."""

    def repeats_of(self, tokens: int) -> int:
        """Return how often the TTFT of a prompt of so many tokens is measured."""
        return max(self.prompt_repeats, min(MOST_REPEATS, self.repeated_tokens // tokens))


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Return token ids that every vocabulary has."""
    return [rng.randrange(FIRST_TOKEN_ID, SMALLEST_VOCABULARY) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Bench:
    """A server to measure, in one of its layouts."""

    client: Client
    system: System
    layout: Layout
    sizes: Sizes
    rng: random.Random

    def prompt(self, tokens: int) -> Prompt:
        """Return a prompt that was not sent before."""
        return random_prompt(self.rng, tokens)

    async def batch(self, per_unit: int, prompt: int, output: int, streams: int) -> list[Answer]:
        """Send requests together, of which ``streams`` per unit are streamed."""
        units = len(self.layout.units)
        return await asyncio.gather(
            *(
                self.client.generate(
                    self.prompt(prompt),
                    output,
                    stream=number < streams,
                    rank=unit if self.layout.pinned else None,
                )
                for number in range(per_unit)
                for unit in range(units)
            )
        )


Measure = Callable[[Bench], Awaitable[dict[str, Any]]]
"""Takes one measure in one layout."""
Step = Callable[[Client], Awaitable[dict[str, Any]]]
"""Takes one measure of a running system, in all layouts that the measure needs."""


async def first(bench: Bench) -> dict[str, Any]:
    """Return the slowest unit's TTFT of a layout's first requests, round by round.

    If the server has done nothing before, this shows whether something still needs a warm-up.
    """
    rounds = [await bench.batch(1, *FIRST_REQUEST, 1) for _ in range(FIRST_ROUNDS)]
    times = [max(answer.first - answer.sent for answer in answers) for answers in rounds]
    return {"rounds": times, "first": times[0], "last": times[-1]}


async def decode(bench: Bench) -> dict[str, Any]:
    """Return the time per output token, by requests per unit; all units are busy."""
    sizes = bench.sizes
    found: dict[str, Any] = {}
    for per_unit in sizes.batches:
        streams = min(per_unit, STREAMS_PER_UNIT)
        shape = (per_unit, sizes.decode_tokens, sizes.decode_tokens, streams)
        await bench.batch(*shape)
        answers = [await bench.batch(*shape) for _ in range(sizes.decode_repeats)]
        times = [
            decode_seconds(a, sizes.decode_tokens) for run in answers for a in run if a.progress
        ]
        found[str(per_unit)] = {
            "tpot": statistics.median(times),
            "lowest": min(times),
            "highest": max(times),
            "placed": placed(answers[-1]),
        }
    return found


def decode_seconds(answer: Answer, tokens: int) -> float:
    """Return the time per output token between one half and seven eighths of an answer.

    Earlier, others of the batch may be in their prefill; later, the first ones may be done.
    """
    begin = next(point for point in answer.progress if point[1] >= tokens // 2)
    end = next(point for point in answer.progress if point[1] >= tokens * 7 // 8)
    return (end[0] - begin[0]) / max(1, end[1] - begin[1])


def decode_context(tokens: int) -> int:
    """Return a request's mean tokens in that time, if its prompt has as many as its output."""
    return tokens + tokens * 11 // 16


def placed(answers: Sequence[Answer]) -> dict[str, int]:
    """Return how many requests each unit got, if the server says so."""
    return dict(sorted(Counter(a.unit for a in answers if a.unit is not None).items()))


async def prefill(bench: Bench) -> dict[str, Any]:
    """Return the time to first token of single requests, by prompt tokens."""
    found: dict[str, Any] = {}
    for tokens in bench.sizes.prompts:
        times = await first_tokens(bench, tokens, bench.sizes.repeats_of(tokens))
        found[str(tokens)] = {
            "ttft": statistics.median(times),
            "lowest": min(times),
            "highest": max(times),
        }
    return found


async def first_tokens(bench: Bench, tokens: int, repeats: int) -> list[float]:
    """Return the times to first token of single requests, after one that does not count."""
    rank = 0 if bench.layout.pinned else None
    answers = [
        await bench.client.generate(bench.prompt(tokens), 1, stream=True, rank=rank)
        for _ in range(1 + repeats)
    ][1:]
    return [answer.first - answer.sent for answer in answers]


async def saturation(bench: Bench) -> dict[str, Any]:
    """Return the node's output tokens per second with full batches, from first to last request.

    Answers are not streamed, so that the engines are the limit.
    """
    per_engine, prompt, output = bench.sizes.saturation
    engines = sum(len(unit) for unit in bench.layout.units)
    per_unit = per_engine * engines // len(bench.layout.units)
    await bench.batch(per_unit // 4 or 1, prompt, output, 0)
    rates, answers = [], []
    for _ in range(bench.sizes.saturation_repeats):
        answers = await bench.batch(per_unit, prompt, output, 0)
        took = max(a.ended for a in answers) - min(a.sent for a in answers)
        rates.append(len(answers) * output / took)
    return {
        "output_tokens_per_second": statistics.median(rates),
        "runs": rates,
        "requests": len(answers),
        "placed": placed(answers),
    }


async def numerics(bench: Bench) -> dict[str, Any]:
    """Return log probabilities and greedy answers of prompts that are the same in every run."""
    prompts, tokens, output = bench.sizes.scored
    rng = random.Random(0)
    draw = [random_prompt(rng, tokens) for _ in range(prompts)]
    scores = [await bench.client.score(prompt, output) for prompt in draw]
    return {
        "logprobs": [score.logprobs for score in scores],
        "best": [score.best for score in scores],
        "generated": [score.generated for score in scores],
    }


# --- switches: only Shoal's ---


async def switch_idle(client: Client, system: System, sizes: Sizes) -> dict[str, Any]:
    """Return the durations of binds and releases with no request on the node."""
    binds, releases = [], []
    alone, together = system.layouts[0], system.layouts[-1]
    for _ in range(sizes.switches):
        binds.append(await switch(client, together, "sequential"))
        releases.append(await switch(client, alone, "sequential"))
    return {"switches": sizes.switches, "bind": spread(binds), "release": spread(releases)}


async def switch_loaded(client: Client, system: System, sizes: Sizes) -> dict[str, Any]:
    """Return the same with every engine decoding, and the time to the group's first token.

    A request is sent just after the switch is asked for, so that it waits in the task pool while
    the group forms, and is the first that the group runs. The time from the decision to its token
    covers the bind, one step of four tokens in the group, and the way back to the client.
    """
    alone, together = system.layouts[0], system.layouts[-1]
    bench = Bench(client, system, together, sizes, random.Random(1))
    await switch(client, together, "sequential")
    idle = [await client.generate(bench.prompt(4), 1) for _ in range(IDLE_REQUESTS)]
    await switch(client, alone, "sequential")
    loaded = await loaded_rounds(bench)
    rounds = loaded.rounds
    tokens = [r.first_token for r in rounds if r.layout == together.name]
    return {
        "switches": sizes.switches,
        "running": loaded.running,
        "running_at_the_end": loaded.running_at_the_end,
        "bind": spread([r.bind for r in rounds]),
        "release": spread([r.release for r in rounds]),
        "decision_to_first_token": spread(tokens),
        "first_token_when_idle": spread([answer.ended - answer.sent for answer in idle]),
        "served_by_the_group": len(tokens),
    }


@dataclass(frozen=True, slots=True)
class Round:
    """One bind and release of decoding engines. The controller measures durations, in seconds."""

    at: float
    """When the bind was decided, in seconds since the epoch."""
    epochs: tuple[int, int]
    """Epochs of the binding switch and of the releasing one; the group's own lies between."""
    bind: float
    release: float
    first_token: float
    """Time from the decision to bind until the client had the answer of the waiting request."""
    layout: str | None
    """The layout in which the request ran."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Binds and releases with every engine decoding."""

    rounds: list[Round]
    running: dict[str, int]
    """Requests by unit when the rounds began."""
    running_at_the_end: dict[str, int]


async def _nothing() -> None:
    pass


async def loaded_rounds(bench: Bench, before: Callable[[], Awaitable[None]] = _nothing) -> Loaded:
    """Bind and release ``sizes.switches`` times, each time with a request waiting for the group.

    Args:
        bench: the bench of the layout that is bound; the engines are alone now.
        before: called before each round with the engines alone, and must leave them alone.
    """
    alone = bench.system.layouts[0]
    rounds: list[Round] = []
    async with _decoding(replace(bench, layout=alone, rng=random.Random(2))) as running:
        for _ in range(bench.sizes.switches):
            await before()
            rounds.append(await _bind_ask_release(bench, alone))
            await asyncio.sleep(bench.sizes.pause_seconds)
        return Loaded(rounds, running, await requests_by_unit(bench.client))


async def _bind_ask_release(bench: Bench, alone: Layout) -> Round:
    binding = asyncio.create_task(change_layout(bench.client, bench.layout, "hard"))
    await asyncio.sleep(HEAD_START_SECONDS)
    asking = asyncio.create_task(bench.client.generate(bench.prompt(4), 1))
    bound = await binding
    # A request that came before the bind is paused with its engine, and ends after the release.
    await asyncio.wait([asking], timeout=PATIENCE_SECONDS)
    released = await change_layout(bench.client, alone, "hard")
    answer = await asking
    to_wall_clock = time.time() - time.perf_counter()
    return Round(
        at=bound["at"],
        epochs=(bound["epoch"], released["epoch"]),
        bind=bound["duration_seconds"],
        release=released["duration_seconds"],
        first_token=answer.ended + to_wall_clock - bound["at"],
        layout=answer.layout,
    )


@asynccontextmanager
async def _decoding(bench: Bench) -> AsyncIterator[dict[str, int]]:
    """Keep every engine decoding; once all requests run, give their number by unit."""

    async def keep_on() -> None:
        while True:
            await bench.client.generate(bench.prompt(16), bench.sizes.load_tokens)

    wanted = bench.sizes.load * len(bench.layout.units)
    tasks = [asyncio.create_task(keep_on()) for _ in range(wanted)]
    try:
        while sum((running := await requests_by_unit(bench.client)).values()) < wanted:
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(POLL_SECONDS)
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def requests_by_unit(client: Client) -> dict[str, int]:
    """Return how many requests each unit has, running or paused."""
    view = await client.call("GET", "/admin/layout")
    return {",".join(map(str, u["engines"])): u["running"] + u["paused"] for u in view["units"]}


async def switch(client: Client, layout: Layout, preempt: str) -> float:
    """Switch, and return the controller's duration: from its decision to the last answer."""
    return float((await change_layout(client, layout, preempt))["duration_seconds"])


async def change_layout(client: Client, layout: Layout, preempt: str) -> dict[str, Any]:
    """Switch, and return the controller's answer, which tells of the whole switch."""
    body = {"units": layout.partition, "preempt": preempt}
    answer: dict[str, Any] = await client.call("POST", "/admin/layout", body)
    return answer


def metric(page: str, name: str, **labels: str) -> float:
    """Return the sum of the series of this name that have these labels, from a page of metrics."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return ``p50``, ``p99`` and ``max``; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "max": ordered[-1]}


IN_LAYOUTS: dict[str, Measure] = {
    "first": first,
    "decode": decode,
    "prefill": prefill,
    "saturation": saturation,
    "numerics": numerics,
}
"""Measures taken in every layout, by name."""

OF_SWITCHES: dict[str, Callable[[Client, System, Sizes], Awaitable[dict[str, Any]]]] = {
    "switch-idle": switch_idle,
    "switch-loaded": switch_loaded,
}
"""Measures of a system that switches, by name."""
