"""Compares TP and SP on the same group as in Shift Parallelism's Figure 9: latency and throughput.

A way of working is a layout with a threshold that decides the mode of its steps. Each server of
stock vLLM has one way, and is measured in the same manner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec

from shoal.loadgen.bench import measures
from shoal.loadgen.bench.measures import Bench, Sizes, switch
from shoal.loadgen.bench.systems import Layout, System
from shoal.loadgen.bench.token_client import Answer, Client

MODES = "modes"
"""Name of the measure."""
OFF = "off"
"""A threshold for ``POST /admin/shift``: every step runs as TP."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a server works through its steps."""

    name: str
    """``dp``, ``tp<p>``, ``sp<p>`` or ``shift``."""
    layout: Layout
    threshold: int | str = OFF
    """Tokens above which a step is SP, as ``POST /admin/shift`` takes it."""


def ways(system: System, sizes: Sizes) -> list[Way]:
    """Return the ways to measure; SP only where the system was started with it."""
    found = pure_ways(system)
    if system.shifts:
        found.append(Way("shift", system.layouts[-1], sizes.shift_threshold))
    return found


def pure_ways(system: System) -> list[Way]:
    """Return the ways in which every step has the same mode, if it can."""
    found = [Way(layout.name, layout) for layout in system.layouts]
    if system.shifts:
        groups = [layout for layout in system.layouts if len(layout.units[0]) > 1]
        found += [Way(f"sp{len(group.units[0])}", group, 1) for group in groups]
    return found


async def enter(client: Client, system: System, way: Way) -> None:
    """Make a server work in this way, if it can change its way."""
    if system.switches:
        await switch(client, way.layout, "sequential")
    if system.shifts:
        await client.call("POST", "/admin/shift", {"threshold": way.threshold})


async def leave(client: Client, system: System) -> None:
    """Make a server work as it did when it started."""
    await enter(client, system, Way("", system.layouts[0], system.shift_threshold))


async def modes(client: Client, system: System, sizes: Sizes) -> dict[str, Any]:
    """Return the latency of single requests and the throughput of many, by way of working."""
    found = {}
    for way in ways(system, sizes):
        await enter(client, system, way)
        found[way.name] = await _measure(Bench(client, system, way.layout, sizes, Random(way.name)))
    await leave(client, system)
    return found


async def _measure(bench: Bench) -> dict[str, Any]:
    sizes = bench.sizes
    alone = replace(
        bench,
        sizes=msgspec.structs.replace(
            sizes, prompts=sizes.long_prompts, batches=(1,), prompt_repeats=sizes.long_repeats
        ),
    )
    prompts = await measures.prefill(alone)
    return {
        "ttft": {tokens: one["ttft"] for tokens, one in prompts.items()},
        "ttft_range": {tokens: (one["lowest"], one["highest"]) for tokens, one in prompts.items()},
        "tpot": (await measures.decode(alone))["1"]["tpot"],
        "prompt_tokens_per_second": await _throughput(bench, sizes.prompt_load),
        "combined_tokens_per_second": await _throughput(bench, sizes.combined_load),
    }


async def _throughput(bench: Bench, load: Sequence[int]) -> float:
    """Return the best run's prompt and output tokens per second."""
    runs = [await _run(bench, load) for _ in range(bench.sizes.throughput_repeats)]
    return max(runs)


async def _run(bench: Bench, load: Sequence[int]) -> float:
    """Return the tokens per second from the first request to the last answer."""
    per_engine, prompt, output = load
    engines = sum(len(unit) for unit in bench.layout.units)
    per_unit = per_engine * engines // len(bench.layout.units)
    answers: list[Answer] = await bench.batch(per_unit, prompt, output, 0)
    took = max(a.ended for a in answers) - min(a.sent for a in answers)
    return len(answers) * (prompt + output) / took
