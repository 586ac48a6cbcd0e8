"""Completion time against the arrival rate, as in Shift Parallelism's Figure 11.

Every way of working gets the same arrivals, one way after the other on a running server: fixed
ways, and policies that choose among them. A cell is one way at one rate. Each cell is a step of its
own, so a run that is cut short loses only one cell.
"""

import asyncio
import zlib
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from shoal.loadgen.bench.measures import Bench, Sizes, Step
from shoal.loadgen.bench.modes import Way, enter, leave, ways
from shoal.loadgen.bench.open_loop_serving import (
    asdict_or_none,
    check_answered,
    of_node,
    replay,
    take_back,
)
from shoal.loadgen.bench.systems import System
from shoal.loadgen.bench.token_client import Client
from shoal.loadgen.open_loop import Run
from shoal.loadgen.shapes import Lengths, make_up
from shoal.loadgen.summary import Distribution
from shoal.loadgen.validity import judge
from shoal.loadgen.workload import Workload
from shoal.policies.registry import POLICIES
from shoal.policies.shift import SHIFT
from shoal.policies.static import MANUAL
from shoal.server.errors import UserError

RATES = "rates"
"""Name of the measure."""
CHOOSING = tuple(name for name in POLICIES if name not in (MANUAL.name, SHIFT.name))
"""Policies that can be measured; the two that are left out work like fixed ways."""
WARM_UP_PER_UNIT = 2
"""Requests on every unit before a cell is measured: a layout's first request is slow."""
WARM_UP_TOKENS = 8
LEAD_SECONDS = 5.0
"""Time that a policy has on an idle node to choose its first layout, as in the simulator."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of working at one rate."""

    name: str
    """Such as ``rates 2 tp2``."""
    workload: Workload
    way: Way
    """The way; for a policy, the way in which it begins."""
    policy: str | None = None
    """The policy that decides the layout; None: the layout is fixed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The arrivals of all rates, and the policies that are measured with them."""

    workloads: Mapping[str, Workload] = field(default_factory=dict)
    """By the rate's name, such as ``rates 2``."""
    policies: Sequence[str] = ()
    lead_seconds: float = LEAD_SECONDS
    about: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The parameters of the arrivals, by the rate's name, in JSON's types."""

    def steps(self, system: System, sizes: Sizes) -> dict[str, Step]:
        """Return the steps that measure a system, by the cell's name, in the order of the rates."""
        return {
            cell.name: partial(
                _measure, system=system, sizes=sizes, cell=cell, lead_seconds=self.lead_seconds
            )
            for cell in self._cells(system, sizes)
        }

    def _cells(self, system: System, sizes: Sizes) -> Iterator[Cell]:
        """Yield the fixed ways and then the policies at every rate, if the system has policies."""
        first, threshold = system.layouts[0], system.shift_threshold
        for name, workload in self.workloads.items():
            for way in ways(system, sizes):
                yield Cell(f"{name} {way.name}", workload, way)
            for policy in self.policies if system.switches else ():
                way = Way(policy, first, threshold)
                yield Cell(f"{name} {policy}", workload, way, policy)


def rate_name(rate: float) -> str:
    """Return the name of a rate, in requests per second, with which its cells' names begin."""
    return f"{RATES} {rate:g}"


def arrivals(rate: float, seconds: float, lengths: Lengths, seed: int) -> Workload:
    """Return Poisson arrivals, as ``shoal simulate --trace poisson`` makes them.

    Args:
        rate: requests per second.
        seconds: the time after which no more requests come.
        lengths: of the requests.
        seed: the same seed gives the same arrivals, only compressed in time at higher rates.
    """
    return make_up("poisson", seed, seconds=seconds, lengths=lengths, rate=rate)


# --- from options ---------------------------------------------------------------------------------


def read_sweep(args: Namespace) -> Sweep:
    """Return the sweep that the options of ``shoal bench gpu`` describe.

    Args:
        args: the benchmark's own options.

    Raises:
        UserError: the options do not go together, or do not fit those of the server.
    """
    lengths = read_lengths(args.rate_request, "--rate-request")
    tokens = lengths.prompt[1] + lengths.output[1]
    if tokens > args.max_model_len:
        raise UserError(
            f"--rate-request: {tokens} tokens are more than --max-model-len {args.max_model_len}"
        )
    workloads = {
        rate_name(rate): arrivals(rate, args.rate_seconds, lengths, args.seed)
        for rate in args.rates
    }
    for name, workload in workloads.items():
        if not workload.arrivals:
            raise UserError(f"--{name}: no request comes within {args.rate_seconds:g} s")
    about = {
        rate_name(rate): {
            "rate": rate,
            "seconds": args.rate_seconds,
            "seed": args.seed,
            "request": [_told(bounds) for bounds in (lengths.prompt, lengths.output)],
            "requests": len(workloads[rate_name(rate)].arrivals),
        }
        for rate in args.rates
    }
    return Sweep(workloads, args.policies, about=about)


def read_lengths(text: str, option: str) -> Lengths:
    """Return the lengths that an option says: a number or LOW:HIGH for prompt and output.

    Args:
        text: the option's value.
        option: its name.

    Raises:
        UserError: it says something else.
    """
    wrong = UserError(f"{option} {text}: it must be PROMPT,OUTPUT, each N or LOW:HIGH")
    try:
        bounds = [tuple(map(int, part.split(":"))) for part in text.split(",")]
    except ValueError:
        raise wrong from None
    pairs = [(each[0], each[-1]) for each in bounds if len(each) <= 2]
    if not len(pairs) == len(bounds) == 2 or any(not 0 < low <= high for low, high in pairs):
        raise wrong
    return Lengths(*pairs)


def _told(bounds: tuple[int, int]) -> int | list[int]:
    """Return bounds as the results have them: one number if all requests are alike."""
    return bounds[0] if bounds[0] == bounds[1] else list(bounds)


# --- the measure ----------------------------------------------------------------------------------


async def _measure(
    client: Client, *, system: System, sizes: Sizes, cell: Cell, lead_seconds: float
) -> dict[str, Any]:
    """Return the figures of one cell; the node is left idle, in its first layout.

    Raises:
        RequestFailedError: a request did not get all of its tokens.
    """
    await _rest(client, system)  # a failed cell may have left the node in another state
    await _begin(client, system, sizes, cell)
    if cell.policy is not None:
        await client.call("POST", "/admin/policy", {"policy": cell.policy})
        await asyncio.sleep(lead_seconds)
    above = await _sp_above(client, system)
    # Each cell has its own prompts: with prefix caching, the cell before would have computed them.
    run = await replay(client, cell.workload, seed=zlib.crc32(cell.name.encode()))
    await _rest(client, system)
    return {"policy": cell.policy, "sp_above": above, **figures(run)}


async def _begin(client: Client, system: System, sizes: Sizes, cell: Cell) -> None:
    """Warm up every layout that the cell may use, and put the node into the cell's first way."""
    first = cell.workload.arrivals[0]
    prompt, output = first.prompt_tokens, min(first.output_tokens, WARM_UP_TOKENS)
    for way in ways(system, sizes) if cell.policy else [cell.way]:
        await enter(client, system, way)
        bench = Bench(client, system, way.layout, sizes, Random(f"{cell.name} {way.name}"))
        await bench.batch(WARM_UP_PER_UNIT, prompt, output, 0)
    await enter(client, system, cell.way)


async def _rest(client: Client, system: System) -> None:
    if system.switches:
        await take_back(client, system)
    await leave(client, system)


async def _sp_above(client: Client, system: System) -> dict[str, int] | None:
    """Return the tokens above which steps are SP, by layout; None for a system without SP."""
    if not system.shifts:
        return None
    view = await client.call("GET", "/admin/layout")
    return dict(view["shift"]["sp_above"])


def figures(run: Run) -> dict[str, Any]:
    """Return the figures of a cell's requests. Times are in seconds.

    Raises:
        RequestFailedError: a request did not get all of its tokens.
    """
    check_answered(run)
    records = [exchange.record() for exchange in run.exchanges]
    return {
        "requests": len(records),
        "e2el": _spread(record.e2el for record in records),
        "ttft": _spread(record.ttft for record in records),
        "tpot": _spread(record.tpot for record in records),
        **of_node(run),
        "problems": list(judge(run).problems),
    }


def _spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    return asdict_or_none(Distribution.of(value for value in values if value is not None))
