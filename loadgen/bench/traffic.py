"""``shoal bench traffic``: compares stock vLLM and Shoal on any traffic, with their own defaults.

Only the model, the port and the GPUs are fixed. Each server chooses its step sizes, context, prefix
caching and model runner. vLLM's own client makes the load, or ours does. The servers run
one after the other on the same GPUs.
"""

import argparse
import os
import sys
import time
from argparse import Namespace
from asyncio import run as run_async
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench import system_info
from shoal.loadgen.bench.campaign import devices_idle, say
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
from shoal.loadgen.bench.token_client import Client, RequestFailedError
from shoal.loadgen.bench.traffic_clients import (
    Load,
    random_load,
    replay_by_ours,
    replay_by_vllm,
    vllm_arguments,
)
from shoal.loadgen.bench.traffic_pictures import draw_all, keep_requests, kept_requests
from shoal.loadgen.bench.traffic_simulated import Simulated, simulate_way
from shoal.loadgen.bench.traffic_tables import (
    KEPT,
    STATISTICS,
    Figures,
    SystemFigures,
    column_of,
    markdown,
)
from shoal.loadgen.bench.traffic_workloads import TraceWriter, Traffic, read_traffic
from shoal.loadgen.bench.vllm_client import LoadFailedError, VllmClient
from shoal.policies.installed_policies import load_policies
from shoal.policies.registry import PolicyError
from shoal.runtime.config import ENGINE_COUNTS
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import FileError
from shoal.runtime.simulation.shape_files import read_shape as read_simulated
from shoal.server.errors import UserError

SYSTEMS = (STOCK_DP, STOCK_TP, SHOAL)
CLIENTS = ("vllm", "shoal")
"""Who makes the load: ``vllm bench serve``, or ``shoal replay``."""
MAX_FAILED = 0.01
"""The share of failed requests that a run may have. vLLM's client keeps unused connections open for
longer than vLLM's server does, and now and then uses one that the server is about to close."""
_WARM_UP = 8


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
    _check_ways(args)
    traffic = [read_traffic(text, seed) for text in args.workload for seed in args.seeds]
    if args.no_made_up and not traffic:
        raise UserError("--no-made-up: name a --workload, or there is nothing to measure")
    node = _simulated(args)
    path = args.out / "results.json"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_model(args.out / "model", read_shape(args.model_shape))
        figures = _taken_up(path, args)
        complete = run_async(_measure_all(args, figures, path, traffic))
        if node is not None:
            _simulate_all(node, figures, traffic)
            _write(path, figures)
        kept = kept_requests(args.out / "requests")
        pictures = draw_all(kept, args.out)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}, or write it: {error.strerror}") from error
    report = markdown(figures, kept)
    (args.out / "report.md").write_text(report, encoding="utf-8")
    print(report)
    for picture in pictures:
        say(f"drawn: {picture}")
    return 0 if complete else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal bench traffic",
        description="Compare stock vLLM's static DP and static TP with Shoal on any traffic, each "
        "with its own defaults.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-shape", required=True, metavar="NAME|FILE", help="a built-in one, or config.json")
    add("--engines", type=int, required=True, choices=ENGINE_COUNTS, help="GPUs to use")
    add("--out", type=Path, required=True, metavar="DIR", help="results, report, pictures, logs")
    add("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="only these")
    add("--policies", nargs="*", default=[], help="of Shoal, measured beside its layouts")
    add("--layouts", nargs="*", metavar="NAME", help="of Shoal: only these, or none (default: all)")
    add(
        "--workload",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="a trace or a shape, and options of 'shoal replay' for it, in quotes; repeat",
    )
    add(
        "--clients",
        nargs="+",
        choices=CLIENTS,
        default=CLIENTS[:1],
        help="whose client sends the workloads (default: vLLM's)",
    )
    add("--seeds", type=int, nargs="+", default=[0], help="one run of every workload each")
    add(
        "--budget-seconds",
        type=float,
        default=540.0,
        metavar="S",
        help="end after so long; the same command goes on from there (default: %(default)g)",
    )
    add("--no-made-up", action="store_true", help="leave out the loads that vLLM's client makes up")
    add(
        "--simulated-shape",
        metavar="NAME|FILE",
        help="simulate the workloads too, with this shape of 'shoal simulate', and say the errors",
    )
    add(
        "--hardware",
        default="h200",
        metavar="NAME|FILE",
        help="of the simulation (default: %(default)s)",
    )
    return parser


def _check_ways(args: Namespace) -> None:
    """Refuse names that are no policy or no layout, before a server starts.

    Raises:
        UserError: a name is none.
    """
    try:
        load_policies(*args.policies)
    except PolicyError as error:
        raise UserError(f"--policies: {error}") from error
    known = [layout.name for layout in systems(args.engines, "")[-1].layouts]
    for name in args.layouts or ():
        if name not in known:
            raise UserError(f"--layouts {name}: choose of {', '.join(known)}")


def _taken_up(path: Path, args: Namespace) -> Figures:
    fresh = Figures(Path(args.model_shape).name, args.engines, system_info.environment())
    if not path.exists():
        return fresh
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Figures)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    if (found.shape, found.engines) != (fresh.shape, fresh.engines):
        raise UserError(f"{path} has results of another comparison: choose another --out")
    return found


def _write(path: Path, figures: Figures) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def _simulated(args: Namespace) -> Simulated | None:
    if args.simulated_shape is None:
        return None
    try:
        shape, hardware = read_simulated(args.simulated_shape), hardware_named(args.hardware)
    except FileError as error:
        raise UserError(str(error)) from error
    most, tokens = hardware.batch_limits
    sizes = {"engines": args.engines, "max_group": args.engines, "max_sp": args.engines}
    node = Node(shape, hardware, **sizes, max_num_seqs=most, max_num_batched_tokens=tokens)
    return Simulated(node)


def _simulate_all(simulated: Simulated, figures: Figures, traffic: Sequence[Traffic]) -> None:
    """Simulate what was measured and not yet simulated."""
    for name, system in figures.systems.items():
        for way, loads_of_way in system.ways.items():
            stand_in = simulated.of(name, way)
            done = system.simulated.setdefault(way, {})
            for one in traffic:
                if stand_in and one.name in loads_of_way and one.name not in done:
                    done[one.name] = simulate_way(*stand_in, one.workload)
                    say(f"simulated {name} {way}: {one.name}")


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


def ways(
    system: System, policies: Sequence[str], layouts: Sequence[str] | None = None
) -> list[Way]:
    """Return the ways of a system: its layouts, and for Shoal the policies.

    Args:
        system: one of ``systems``.
        policies: names of policies, which only Shoal has.
        layouts: the names of Shoal's layouts to take; None: all.
    """
    if not system.switches:
        policies, layouts = (), None
    found = [
        Way(layout.name, layout=layout)
        for layout in system.layouts
        if layouts is None or layout.name in layouts
    ]
    return found + [Way(name, policy=name) for name in policies]


async def enter(client: Client, system: System, way: Way) -> None:
    """Make a server work in a way, if it has several."""
    if not system.switches:
        return
    await client.call("POST", "/admin/policy", {"policy": way.policy or "manual"})
    if way.layout is not None:
        await switch(client, way.layout, "sequential")


# --- loads ----------------------------------------------------------------------------------------


def made_up(units: int) -> Iterator[Load]:
    """Yield the loads that vLLM's client makes up.

    Args:
        units: number of units of the layout, by which the concurrent requests are multiplied.
    """
    for batch in (1, 8, 64):
        at_once, number = batch * units, max(6, 3 * batch) * units
        yield random_load(f"128 + 128 tokens, {batch} at once per unit", at_once, number, 128, 128)
    for tokens in (512, 4096):
        yield random_load(f"{tokens:,} tokens, one at a time", 1, 6, tokens, 2)


def replays(
    traffic: Sequence[Traffic], clients: Sequence[str], writer: TraceWriter
) -> Iterator[Load]:
    """Yield the replays of workloads by each client.

    Raises:
        OSError: a trace cannot be written.
    """
    for client in clients:
        for one in traffic:
            trace = writer.write(one.workload)
            if client == "vllm":
                yield Load(one.name, replay_by_vllm(trace), trace)
            else:
                yield Load(f"{one.name} by shoal replay", (), trace)


# --- measuring ------------------------------------------------------------------------------------


async def _measure_all(
    args: Namespace, figures: Figures, path: Path, traffic: Sequence[Traffic]
) -> bool:
    """Take the missing loads; return whether nothing is missing then."""
    deadline = time.monotonic() + args.budget_seconds
    complete = True
    writer = TraceWriter(args.out / "traces")
    async with VllmClient(args.out / "client.log") as vllm:
        for system in systems(args.engines, str(args.out / "model")):
            if system.name not in args.systems:
                continue
            kept = figures.systems.setdefault(system.name, SystemFigures([]))
            plan = [
                (way, load)
                for way in ways(system, args.policies, args.layouts)
                for load in _loads(args, way, traffic, writer)
                if load.name not in kept.ways.get(way.name, {})
            ]
            if plan:
                save = partial(_write, path, figures)
                complete &= await _Taker(args, system, kept, vllm, deadline, save).take(plan)
                save()
    return complete


def _loads(
    args: Namespace, way: Way, traffic: Sequence[Traffic], writer: TraceWriter
) -> Iterator[Load]:
    if not args.no_made_up:
        yield from made_up(_units(way, args.engines))
    yield from replays(traffic, args.clients, writer)


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
    save: Callable[[], None]
    """Writes all results: a run that is killed has those of the loads that have ended."""

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
        except (ServerFailedError, LoadFailedError, RequestFailedError) as error:
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
                await enter(client, self.system, way)
                warm_up = random_load("warm-up", _WARM_UP, _WARM_UP, 2000, 8)
                await self._run(address, way, warm_up)
                entered = way
            figures = await self._run(address, way, load)
            self.kept.ways.setdefault(way.name, {})[load.name] = figures
            self.save()
            say(f"{self.system.name} {way.name}: {load.name} took {figures['duration']:.1f} s")
        return True

    async def _run(self, address: str, way: Way, load: Load) -> dict[str, Any]:
        # Each way and load has its own prompts, because the prefix cache is on.
        column = column_of(self.system.name, way.name)
        name = f"{column} {load.name}"
        if load.trace is not None and not load.arguments:
            log = self.args.out / "client.log"
            result = await replay_by_ours(address, load.trace, seed_of(name), log)
        else:
            result = await self._run_vllm(address, load, seed_of(name))
        failed = result.get("failed", 0)
        if failed > MAX_FAILED * result["completed"]:
            raise LoadFailedError(f"{name}: {failed} requests failed")
        if load.trace is not None:
            keep_requests(self.args.out / "requests", load.name, column, result)
        return {name: result[name] for name in result if name in KEPT or _is_statistic(name)}

    async def _run_vllm(self, address: str, load: Load, seed: int) -> dict[str, Any]:
        return await self.vllm.run(vllm_arguments(address, self.args.out / "model", load, seed))


def seed_of(name: str) -> int:
    """Return a seed that depends on the name."""
    return int.from_bytes(name.encode()) % 1_000_003


def _is_statistic(name: str) -> bool:
    return any(name.endswith(f"_{kind}_ms") for kind in STATISTICS)
