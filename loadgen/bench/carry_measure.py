"""Running requests that switches carry: their gaps, and whether their tokens stay the same.

Greedy streams of random prompts run while the engines are bound and released. Each part is a step
of its own in the results, so that a run that is cut short loses one part:

- ``carry 8x4096``: a case of ``Sizes.carry_cases``, here eight requests of 4,096 prompt tokens.
- ``carry bystanders``: the time per token of engines that take no part; it needs four engines.
- ``carry prefix-hit``: the TTFT of a prompt that is in the prefix cache of a group only because a
  request was carried to the group; it needs prefix caching.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.loadgen.bench.measures import (
    Bench,
    Sizes,
    Step,
    change_layout,
    metric,
    requests_by_unit,
    switch,
)
from shoal.loadgen.bench.stream_processes import Following, Running, followed
from shoal.loadgen.bench.switch_gaps import (
    CarrySwitch,
    count_differing,
    of_bystanders,
    of_direction,
)
from shoal.loadgen.bench.systems import Layout, System
from shoal.loadgen.bench.token_client import Client, Prompt

CARRY = "carry"
"""Name of the measure, with which the names of its parts begin."""
BYSTANDERS, PREFIX_HIT = f"{CARRY} bystanders", f"{CARRY} prefix-hit"
TREATMENT = "carry"
FEWEST_ENGINES = 4
"""Engines of a node of which some can stand by while others are bound."""
LEAD_TOKENS = 48
"""Tokens that every stream gets before the first switch. Engines report their steps at least as
often as a KV block is full, so the metrics include all prefills by then."""
GROW_POLL_SECONDS = 0.002
IDLE_POLL_SECONDS = 0.02


def carry_name(requests: int, prompt_tokens: int) -> str:
    """Return the name of a case in the results."""
    return f"{CARRY} {requests}x{prompt_tokens}"


def carry_steps(system: System, sizes: Sizes) -> dict[str, Step]:
    """Return the steps that measure a system, by their names in the results, in order."""
    found: dict[str, Step] = {
        carry_name(requests, tokens): partial(
            carried, system=system, sizes=sizes, requests=requests, prompt_tokens=tokens
        )
        for requests, tokens in sizes.carry_cases
    }
    if not found:
        return {}
    if len(system.layouts[0].units) >= FEWEST_ENGINES:
        found[BYSTANDERS] = partial(bystanders, system=system, sizes=sizes)
    if system.caches_prefixes:
        found[PREFIX_HIT] = partial(prefix_hits, system=system, sizes=sizes)
    return found


async def carried(
    client: Client,
    *,
    system: System,
    sizes: Sizes,
    requests: int,
    prompt_tokens: int,
    following: Following = followed,
) -> dict[str, Any]:
    """Return what binds and releases do to running requests, and check the requests' tokens.

    The tokens are compared with those of the same prompts without a switch. Random weights may lead
    to a loop of few tokens, which damaged KV need not leave: ``distinct_tokens`` tells of that.
    In 16 bits the layouts round differently, so that greedy tokens may differ without any fault:
    ``differing_without_switch`` says of how many prompts the first and the last layout differ.

    Raises:
        RequestFailedError: a switch or a stream failed.
    """
    bench = Bench(
        client, system, system.layouts[0], sizes, random.Random(carry_name(requests, prompt_tokens))
    )
    lots = list[_Lot]()
    for begun in range(0, sizes.carry_switches, sizes.carry_lot):
        size = min(sizes.carry_lot, sizes.carry_switches - begun)
        prompts = [bench.prompt(prompt_tokens) for _ in range(requests)]
        lots.append(await _lot(bench, following, prompts, size))
        if len(lots[-1].releases) < size:
            break  # a request has all of its tokens
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "bind": of_direction([(lot.binds, lot.times) for lot in lots], sizes.carry_steps),
        "release": of_direction([(lot.releases, lot.times) for lot in lots], sizes.carry_steps),
        "copies": {name: sum(lot.copies[name] for lot in lots) for name in lots[0].copies},
        "prefilled_again": sum(lot.prefilled_again for lot in lots),
        "compared_tokens": sum(lot.compared for lot in lots),
        "longest": prompt_tokens + max(lot.longest for lot in lots),
        "distinct_tokens": min(lot.distinct for lot in lots),
        "differing": sum(lot.differing for lot in lots),
        "differing_without_switch": sum(lot.differing_without_switch for lot in lots),
    }


@dataclass(frozen=True, slots=True)
class _Lot:
    """Some switches, for the same requests."""

    binds: list[CarrySwitch]
    releases: list[CarrySwitch]
    times: list[Sequence[float]]
    copies: dict[str, float]
    prefilled_again: int
    compared: int
    longest: int
    distinct: int
    differing: int
    differing_without_switch: int


async def _lot(
    bench: Bench, following: Following, prompts: Sequence[Prompt], switches: int
) -> _Lot:
    """Bind and release the engines so often while some prompts are answered."""
    client, alone, together = bench.client, bench.layout, bench.system.layouts[-1]
    async with _streaming(bench, following, prompts) as running:
        before = await client.text("/metrics")
        found = await _rounds(bench, running, together, switches)
    after = await client.text("/metrics")
    got = [list(stream.tokens) for stream in running.streams]
    counts = [len(tokens) for tokens in got]
    apart, joint = [
        await _without_switch(client, one, prompts, counts) for one in (alone, together)
    ]
    await switch(client, alone, "sequential")
    copied, former = copies(after), copies(before)
    return _Lot(
        binds=found.binds,
        releases=found.releases,
        times=[stream.times for stream in running.streams],
        copies={name: copied[name] - former[name] for name in copied},
        prefilled_again=prefill_tokens(after) - prefill_tokens(before),
        compared=sum(counts),
        longest=max(counts),
        distinct=min(len(set(tokens)) for tokens in got),
        differing=count_differing(apart, got),
        differing_without_switch=count_differing(apart, joint),
    )


async def bystanders(
    client: Client, *, system: System, sizes: Sizes, following: Following = followed
) -> dict[str, Any]:
    """Return the time per token of the other engines while the first two are bound and released.

    Raises:
        RequestFailedError: a switch or a stream failed.
    """
    alone = system.layouts[0]
    first, second, *others = alone.units
    pair = Layout("tp2", ((*first, *second), *others))
    requests, prompt_tokens = sizes.carry_cases[0]
    bench = Bench(client, system, alone, sizes, random.Random(BYSTANDERS))
    prompts = [bench.prompt(prompt_tokens) for _ in range(max(requests, len(alone.units)))]
    async with _streaming(bench, following, prompts) as running:
        switches = await _rounds(bench, running, pair, sizes.carry_switches)
    names = {",".join(map(str, unit)) for unit in others}
    times = [stream.times for stream in running.streams if stream.unit in names]
    return {
        "bind": of_bystanders(switches.binds, times, sizes.carry_steps),
        "release": of_bystanders(switches.releases, times, sizes.carry_steps),
    }


async def prefix_hits(
    client: Client, *, system: System, sizes: Sizes, following: Following = followed
) -> dict[str, Any]:
    """Return a group's TTFT of a prompt that was carried, of its repetition, and of a new prompt.

    The group has never computed the carried prompt. One request decodes beside each of them.

    Raises:
        RequestFailedError: a switch or a request failed.
    """
    alone, together = system.layouts[0], system.layouts[-1]
    _, tokens = sizes.carry_cases[0]
    bench = Bench(client, system, alone, sizes, random.Random(PREFIX_HIT))
    found: dict[str, list[float]] = {"carried": [], "repeated": [], "new": []}
    for _ in range(sizes.prompt_repeats):
        prompt = bench.prompt(tokens)
        async with _streaming(bench, following, [prompt]) as running:
            await change_layout(client, together, TREATMENT)
            await _grow(running, sizes.carry_steps)
            for name, one in zip(found, (prompt, prompt, bench.prompt(tokens)), strict=True):
                answer = await client.generate(one, 1, stream=True)
                found[name].append(answer.first - answer.sent)
            await change_layout(client, alone, TREATMENT)
    return {
        "prompt_tokens": tokens,
        **{name: statistics.median(times) for name, times in found.items()},
    }


async def _grow(running: Running, tokens: int) -> bool:
    """Wait until every stream has so many more tokens; return False if one has ended before.

    Raises:
        RequestFailedError: a stream failed.
    """
    wanted = [stream.count + tokens for stream in running.streams]
    while any(s.count < n for s, n in zip(running.streams, wanted, strict=True)):
        if running.one_has_ended():
            return False
        await asyncio.sleep(GROW_POLL_SECONDS)
    return True


@asynccontextmanager
async def _streaming(
    bench: Bench, following: Following, prompts: Sequence[Prompt]
) -> AsyncIterator[Running]:
    """Stream answers to prompts on the idle node; begin once all decode, and leave it idle."""
    await switch(bench.client, bench.layout, "sequential")  # a failed part may have left another
    async with following(bench.client, prompts, bench.sizes.carry_tokens) as running:
        await _grow(running, LEAD_TOKENS)
        yield running
    while sum((await requests_by_unit(bench.client)).values()):
        await asyncio.sleep(IDLE_POLL_SECONDS)
    await switch(bench.client, bench.layout, "sequential")


@dataclass(frozen=True, slots=True)
class _Switches:
    binds: list[CarrySwitch] = field(default_factory=list)
    releases: list[CarrySwitch] = field(default_factory=list)


async def _rounds(bench: Bench, running: Running, together: Layout, switches: int) -> _Switches:
    """Bind and release so often, unless a stream has all of its tokens before.

    After each switch every stream goes on for some tokens, and then for a random time: otherwise
    all switches would begin at the same moment of a step.
    """
    found = _Switches()
    await _grow(running, bench.sizes.carry_steps)  # a page of metrics was just asked for
    for _ in range(switches):
        for layout, ones in ((together, found.binds), (bench.layout, found.releases)):
            await asyncio.sleep(bench.rng.uniform(0, bench.sizes.pause_seconds))
            begun = time.perf_counter()
            answer = await change_layout(bench.client, layout, TREATMENT)
            ended = time.perf_counter()
            if not await _grow(running, bench.sizes.carry_steps):
                return found
            ones.append(CarrySwitch.of(begun, ended, answer))
    return found


async def _without_switch(
    client: Client, layout: Layout, prompts: Sequence[Prompt], counts: Sequence[int]
) -> list[list[int]]:
    """Return so many tokens after each prompt, all of them in one layout."""
    await switch(client, layout, "sequential")
    return await asyncio.gather(
        *(client.token_ids(prompt, count) for prompt, count in zip(prompts, counts, strict=True))
    )


def prefill_tokens(page: str) -> int:
    """Return the prompt tokens that all engines have computed, from Shoal's page of metrics."""
    return int(metric(page, "shoal_step_tokens_total", kind="prefill"))


def copies(page: str) -> dict[str, float]:
    """Return how many copies of KV the page tells of, and their bytes and seconds.

    What was copied ahead is left out: its seconds are not those of the copy alone.
    """
    return {
        "count": metric(page, "shoal_carry_seconds_count", phase="copy"),
        "bytes": metric(page, "shoal_carried_bytes_total"),
        "seconds": metric(page, "shoal_carry_seconds_sum", phase="copy"),
    }
