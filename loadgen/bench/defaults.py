"""``shoal bench defaults``: compares stock vLLM and Shoal, each with its own defaults.

Only the model, the port and the GPUs are fixed. Each server chooses its step sizes, context, prefix
caching and model runner. vLLM's own client makes the load, and replays a real trace in its own way.
Ratios compare servers that ran one after the other on the same GPUs.
"""

import argparse
import json
import os
import sys
import time
from argparse import Namespace
from asyncio import run as run_async
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench import system_info
from shoal.loadgen.bench.campaign import devices_idle, say
from shoal.loadgen.bench.defaults_tables import KEPT, STATISTICS, Figures, SystemFigures, markdown
from shoal.loadgen.bench.dummy_model import read_shape, write_model
from shoal.loadgen.bench.measures import switch
from shoal.loadgen.bench.server_process import ServerFailedError, ServerProcess, free_port
from shoal.loadgen.bench.systems import (
    ADMIN_PORT,
    PORT,
    SERVED_NAME,
    SHOAL,
    STOCK_DP,
    STOCK_TP,
    Layout,
    System,
    dp_layout,
    tp_layout,
)
from shoal.loadgen.bench.token_client import Client
from shoal.loadgen.bench.vllm_client import LoadFailedError, VllmClient
from shoal.runtime.config import ENGINE_COUNTS
from shoal.server.errors import UserError

SYSTEMS = (STOCK_DP, STOCK_TP, SHOAL)
HASH_TOKENS = 512
"""Tokens that one of a Mooncake trace's ``hash_ids`` stands for."""
NEW_PROMPTS = 10_000_000
"""Added to a trace's ``hash_ids`` for each seed: this makes other prompts, which no cache has."""
PROMPTS_OF_A_WAY = 1_000_000
"""Added for each way of a system, whose server still caches the prompts of the way before."""
_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Load:
    """One run of vLLM's client.

    Attributes:
        name: the name of its row.
        arguments: arguments of ``vllm bench serve`` beside those of every load.
    """

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a server works: in a fixed layout, or under a policy that chooses."""

    name: str
    layout: Layout | None = None
    policy: str | None = None


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and return the exit code: 3 while something is missing.

    Raises:
        UserError: the arguments are not valid.
    """
    args = _parser().parse_args(argv)
    path = args.out / "results.json"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_model(args.out / "model", read_shape(args.model_shape))
        traces = _write_traces(args) if args.trace else []
    except OSError as error:
        raise UserError(f"cannot read {error.filename}, or write it: {error.strerror}") from error
    figures = _taken_up(path, args)
    complete = run_async(_measure_all(args, figures, path, traces))
    report = markdown(figures)
    (args.out / "report.md").write_text(report, encoding="utf-8")
    print(report)
    return 0 if complete else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal bench defaults",
        description="Compare stock vLLM's static DP and static TP with Shoal, each with its own "
        "defaults, under vLLM's own client.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-shape", required=True, metavar="NAME|FILE", help="a built-in one, or config.json")
    add("--engines", type=int, required=True, choices=ENGINE_COUNTS, help="GPUs to use")
    add("--out", type=Path, required=True, metavar="DIR", help="results, report, logs")
    add("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="only these")
    add("--policies", nargs="*", default=[], help="of Shoal, measured beside its layouts")
    add("--trace", type=Path, metavar="FILE", help="JSON lines as Mooncake's traces have them")
    add("--seconds", type=float, default=60.0, help="of the trace (default: %(default)g)")
    add("--seeds", type=int, nargs="+", default=[0], help="one replay each, of other prompts")
    add("--budget-seconds", type=float, default=540.0, help="(default: %(default)g)")
    add("--trace-only", action="store_true", help="leave out the loads that are made up")
    return parser


def _taken_up(path: Path, args: Namespace) -> Figures:
    trace = args.trace.name if args.trace else None
    fresh = Figures(Path(args.model_shape).name, args.engines, trace, system_info.environment())
    if not path.exists():
        return fresh
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Figures)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    if (found.shape, found.engines, found.trace) != (fresh.shape, fresh.engines, fresh.trace):
        raise UserError(f"{path} has results of another comparison: choose another --out")
    return found


# --- systems and their ways -----------------------------------------------------------------------


def systems(engines: int, model: str) -> list[System]:
    """Return the systems, started with no more options than the model and the number of GPUs."""
    alike = ["--load-format", "dummy", "--served-model-name", SERVED_NAME, "--port", PORT]
    stock = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *alike]
    shoal = [sys.executable, "-m", "shoal.server.commands.cli", "serve", model, *alike]
    dp, tp = dp_layout(engines, pinned=False), tp_layout(engines)
    sizes = str(engines)
    return [
        System(STOCK_DP, (*stock, "--data-parallel-size", sizes), (dp,)),
        System(STOCK_TP, (*stock, "--tensor-parallel-size", sizes), (tp,)),
        System(
            SHOAL,
            (*shoal, "--engines", sizes, "--admin-port", ADMIN_PORT),
            (dp, tp) if engines > 1 else (dp,),
            switches=True,
        ),
    ]


def ways(system: System, policies: Sequence[str]) -> list[Way]:
    """Return the ways of a system: its layouts, and for Shoal the policies."""
    found = [Way(layout.name, layout=layout) for layout in system.layouts]
    return found + [Way(name, policy=name) for name in policies if system.switches]


async def _enter(client: Client, system: System, way: Way) -> None:
    if not system.switches:
        return
    await client.call("POST", "/admin/policy", {"policy": way.policy or "manual"})
    if way.layout is not None:
        await switch(client, way.layout, "sequential")


# --- loads ----------------------------------------------------------------------------------------


def loads(units: int, traces: Sequence[Path], *, made_up: bool) -> Iterator[Load]:
    """Yield the loads of a layout.

    Args:
        units: number of units of the layout, by which the concurrent requests are multiplied.
        traces: the traces to replay, one after the other.
        made_up: whether to yield made-up loads, too.
    """
    if made_up:
        for batch in (1, 8, 64):
            at_once, number = batch * units, max(6, 3 * batch) * units
            yield _random(f"128 + 128 tokens, {batch} at once per unit", at_once, number, 128, 128)
        for tokens in (512, 4096):
            yield _random(f"{tokens:,} tokens, one at a time", 1, 6, tokens, 2)
    for path in traces:
        yield Load(
            path.stem,
            (
                *("--dataset-name", "timed_trace", "--dataset-path", str(path)),
                *("--timed-trace-chunk-hash-size", str(HASH_TOKENS)),
                *("--timed-trace-sec-multiplier", "0.001", "--num-prompts", "1000000"),
            ),
        )


def _random(name: str, at_once: int, number: int, prompt: int, output: int) -> Load:
    return Load(
        name,
        (
            *("--dataset-name", "random", "--random-input-len", str(prompt)),
            *("--random-output-len", str(output), "--num-prompts", str(number)),
            *("--max-concurrency", str(at_once)),
        ),
    )


def _write_traces(args: Namespace) -> list[list[Path]]:
    """Return the traces of each way of a system, one for each seed."""
    places = range(2 + len(args.policies))
    return [[_write_trace(args, seed, place) for seed in args.seeds] for place in places]


def _write_trace(args: Namespace, seed: int, place: int = 0) -> Path:
    """Write the first seconds of the trace, with prompts that only this seed and way have."""
    lines = [json.loads(line) for line in args.trace.read_text().splitlines() if line]
    path: Path = args.out / f"prompts-{place}" / f"trace-{seed}.jsonl"
    path.parent.mkdir(exist_ok=True)
    added = seed * NEW_PROMPTS + place * PROMPTS_OF_A_WAY
    begin = lines[0]["timestamp"]
    kept = [line for line in lines if line["timestamp"] - begin < 1000 * args.seconds]
    for line in kept:
        line["hash_ids"] = [number + added for number in line["hash_ids"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return path


# --- measuring ------------------------------------------------------------------------------------


async def _measure_all(
    args: Namespace, figures: Figures, path: Path, traces: Sequence[Sequence[Path]]
) -> bool:
    """Take the missing loads; return whether nothing is missing then."""
    deadline = time.monotonic() + args.budget_seconds
    complete = True
    async with VllmClient(args.out / "client.log") as vllm:
        for system in systems(args.engines, str(args.out / "model")):
            kept = figures.systems.setdefault(system.name, SystemFigures([]))
            plan = [
                (way, load)
                for place, way in enumerate(ways(system, args.policies))
                for load in loads(
                    _units(way, args.engines),
                    traces[place] if traces else (),
                    made_up=not args.trace_only,
                )
                if load.name not in kept.ways.get(way.name, {})
            ]
            if system.name not in args.systems or not plan:
                continue
            taker = _Taker(args, system, kept, vllm, deadline)
            complete &= await taker.take(plan)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return complete


def _units(way: Way, engines: int) -> int:
    return len(way.layout.units) if way.layout is not None else engines


@dataclass(frozen=True)
class _Taker:
    """Starts one system and lets vLLM's client load it."""

    args: Namespace
    system: System
    kept: SystemFigures
    vllm: VllmClient
    deadline: float

    async def take(self, plan: Sequence[tuple[Way, Load]]) -> bool:
        """Start the system, take the loads, end it; return whether all were taken."""
        await devices_idle()
        port, admin_port = free_port(), free_port()
        kept, system = self.kept, self.system
        kept.command, kept.failure = system.argv(port, admin_port), None
        server = ServerProcess(kept.command, self.args.out / f"{system.name}.log", os.environ)
        address, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
        try:
            async with Client(address, SERVED_NAME, admin) as client:
                kept.start_seconds = await server.wait_until_ready(client, system.ready_path)
                say(f"{system.name}: ready after {kept.start_seconds:.1f} s")
                return await self._loads(client, address, plan)
        except (ServerFailedError, LoadFailedError) as error:
            say(f"{system.name}: {error}")
            kept.failure = str(error)
            return False
        finally:
            server.stop()

    async def _loads(self, client: Client, address: str, plan: Sequence[tuple[Way, Load]]) -> bool:
        entered = None
        for way, load in plan:
            if time.monotonic() > self.deadline:
                say(f"{self.system.name}: the budget is spent: run again")
                return False
            if way != entered:
                await _enter(client, self.system, way)
                warm_up = _random("warm-up", _WARM_UP, _WARM_UP, 2000, 8)
                await self._run(address, way, warm_up)
                entered = way
            figures = await self._run(address, way, load)
            self.kept.ways.setdefault(way.name, {})[load.name] = figures
            say(f"{self.system.name} {way.name}: {load.name} took {figures['duration']:.1f} s")
        return True

    async def _run(self, address: str, way: Way, load: Load) -> dict[str, Any]:
        # Each way and load has its own prompts, because the prefix cache is on.
        name = f"{self.system.name} {way.name} {load.name}"
        result = await self.vllm.run(
            [
                *("--backend", "openai", "--base-url", address, "--endpoint", "/v1/completions"),
                *("--model", SERVED_NAME, "--tokenizer", str(self.args.out / "model")),
                *("--ignore-eos", "--percentile-metrics", ",".join(STATISTICS)),
                *("--metric-percentiles", "50,90,99", "--seed", str(seed_of(name))),
                *load.arguments,
            ]
        )
        if result["completed"] < 1 or result.get("failed"):
            raise LoadFailedError(f"{name}: {result.get('failed')} requests failed")
        return {name: result[name] for name in result if name in KEPT or _is_statistic(name)}


def seed_of(name: str) -> int:
    """Return a seed that depends on the name."""
    return int.from_bytes(name.encode()) % 1_000_003


def _is_statistic(name: str) -> bool:
    return any(name.endswith(f"_{kind}_ms") for kind in STATISTICS)
