"""``shoal bench regret``: a policy beside every fixed layout of its node, on loads of any kind.

Simulated. The loads are those of a file, or are drawn at random. What is compared is the mean time
of a request. Where targets are given, it is the share of the requests that get what was promised.
"""

import argparse
import multiprocessing
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from shoal.loadgen.bench.campaign import say
from shoal.loadgen.bench.random_loads import KINDS, Options, draw
from shoal.loadgen.bench.regret_tables import Load, Way, describe, markdown
from shoal.loadgen.summary import EVERYTHING, Distribution
from shoal.loadgen.traces import TraceError
from shoal.policies.installed_policies import load_policies
from shoal.policies.registry import PolicyError
from shoal.policies.values.layouts import layouts_up_to
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.simulated_node import SimulationError
from shoal.server.commands.command_parser import CommandParser
from shoal.server.commands.simulate import Simulated, simulate_options
from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least, check_positive


class Findings(msgspec.Struct):
    """What ``results.json`` holds."""

    policy: str
    loads: list[Load] = []


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench regret`` and return the exit code: 3 if a load could not be simulated.

    Raises:
        UserError: an argument or a file is not valid.
    """
    args = _parser().parse_args(argv)
    check_at_least(args, 0, "random")
    check_positive(args, "jobs")
    try:
        load_policies(args.policy)
    except PolicyError as error:
        raise UserError(f"--policy: {error}") from error
    loads = _loads(args)
    if not loads:
        raise UserError("name a file of loads with --loads, or draw some with --random N")
    path = args.out / "results.json"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        findings = _taken_up(path, args.policy)
        for load in _missing(args, findings, loads):
            findings.loads.append(load)
            _write(path, findings)
            say(describe(load))
        report = markdown(args.policy, _in_order(findings, loads))
        (args.out / "report.md").write_text(report, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {error.filename}, or write it: {error.strerror}") from error
    print(report, end="")
    return 3 if any(load.error for load in findings.loads) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shoal bench regret",
        description="Simulate a policy beside every fixed layout, and say where it is behind.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="results and report")
    add("--policy", default="adaptive", metavar="NAME", help="(default: %(default)s)")
    add(
        "--loads",
        type=Path,
        metavar="FILE",
        help="a load in each line: options of 'shoal simulate', without --policy; # begins a note",
    )
    add("--random", type=int, default=0, metavar="N", help="draw so many loads at random")
    add("--seed", type=int, default=0, help="of random loads (default: %(default)s)")
    add("--traces", type=Path, nargs="+", default=[], metavar="FILE", help="take windows of these")
    add(
        "--kinds",
        nargs="+",
        choices=[*KINDS],
        default=[*KINDS],
        help="of random loads: without priorities, with urgent requests, with targets "
        "(default: all)",
    )
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="loads at a time (default: one for each processor)",
    )
    return parser


def _loads(args: Namespace) -> list[Options]:
    """Return the loads of the file, and then the random ones."""
    found = [] if args.loads is None else [*_read(args.loads)]
    try:
        return found + draw(args.random, args.seed, args.traces, args.kinds)
    except TraceError as error:
        raise UserError(f"--traces: {error}") from error


def _read(path: Path) -> Iterator[Options]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--loads {path}: cannot read it: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"--loads {path}, line {number}: {error}") from error
        if words:
            yield tuple(words)


def _taken_up(path: Path, policy: str) -> Findings:
    """Return what an earlier run has found, without the loads that could not be simulated."""
    if not path.exists():
        return Findings(policy)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Findings)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    if found.policy != policy:
        raise UserError(f"{path} has results of the policy {found.policy}: choose another --out")
    return Findings(policy, [load for load in found.loads if not load.error])


def _write(path: Path, findings: Findings) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


def _in_order(findings: Findings, loads: Sequence[Options]) -> list[Load]:
    known = {tuple(load.options): load for load in findings.loads}
    return [known[options] for options in loads]


def _missing(args: Namespace, findings: Findings, loads: Sequence[Options]) -> Iterator[Load]:
    """Simulate the loads that have no results; yield each one that is done."""
    known = {tuple(load.options) for load in findings.loads}
    missing = [options for options in dict.fromkeys(loads) if options not in known]
    if args.jobs == 1:
        yield from (judge(options, args.policy) for options in missing)
        return
    # A new process imports anew: one that is forked would share locks that a thread may hold.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        started = [pool.submit(judge, options, args.policy) for options in missing]
        try:
            yield from (done.result() for done in as_completed(started))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# --- one load -------------------------------------------------------------------------------------


def judge(options: Options, policy: str) -> Load:
    """Return how a load is served by a policy and in every fixed layout of the same node."""
    load = Load([*options])
    try:
        own = _simulate(options, policy)
        load.requests = len(own.records)
        load.policy = way_of(own)
        for name, choice in fixed_ways(own.node).items():
            load.fixed[name] = way_of(_simulate(options, *choice))
    except (UserError, SimulationError) as error:
        load.error = str(error)
    return load


def _simulate(options: Sequence[str], policy: str, *more: str) -> Simulated:
    return simulate_options([*options, "--policy", policy, *more])[0]


def fixed_ways(node: Node) -> dict[str, tuple[str, ...]]:
    """Return the policies, and further options, that hold a node in one layout, by its name.

    Where the node has SP, its groups run those steps in it that are faster so. TP alone is no way
    of its own there: it is behind, and a node that falls behind takes long to simulate.
    """
    groups = [layout.name for layout in layouts_up_to(node.max_group) if layout.tp > 1]
    widest = ("shift" if node.max_sp > 1 else "static-tp",)
    ways = {name: ("manual", "--layout", name) for name in groups[:-1]}
    return {"dp": ("static-dp",), **ways, **dict.fromkeys(groups[-1:], widest)}


def way_of(simulated: Simulated) -> Way:
    """Return the figures of one way to serve a load."""
    figures = simulated.report.groups[EVERYTHING]
    switching = simulated.report.switching
    return Way(
        e2el=_mean_and_p90(figures.e2el),
        ttft=_mean_and_p90(figures.ttft),
        tpot=_mean_and_p90(figures.tpot),
        kept=figures.attainment,
        switches=0 if switching is None else switching.switches,
    )


def _mean_and_p90(distribution: Distribution | None) -> tuple[float, float]:
    """Return the mean and the P90 in seconds; 0 if no request has such a time."""
    return (0.0, 0.0) if distribution is None else (distribution.mean, distribution.p90)
