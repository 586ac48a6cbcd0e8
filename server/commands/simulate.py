"""``shoal simulate``: one workload under several policies, in virtual time, side by side.

The controller, its policies and the engines' protocol are the server's own; only the engines' step
times come from a model of the hardware.
"""

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shoal.loadgen import plot, text_tables
from shoal.loadgen import summary as figures
from shoal.loadgen.curves import Timeline
from shoal.loadgen.workload import Arrival, Workload
from shoal.policies.cost.correction import Correction
from shoal.policies.installed_policies import load_policies
from shoal.policies.registry import PolicyError
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.snapshot import Target
from shoal.runtime.config import ENGINE_COUNTS, FULL_GRAPH_TOKENS
from shoal.runtime.fit_file import FitFileError, read_fit
from shoal.runtime.simulation.data_sheets import all_hardware, hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import MEMORY_SHARE, FileError, built_in, read_shape
from shoal.runtime.simulation.simulated_node import Run, SimulationError, simulate
from shoal.server.commands.command_parser import CommandParser
from shoal.server.errors import UserError
from shoal.server.files import write_file
from shoal.server.number_options import check_at_least
from shoal.server.options.pool_options import add_placement_options
from shoal.server.options.sharing_options import (
    add_sharing_options,
    check_share,
    fewest_sharers,
    weight_limits,
)
from shoal.server.options.shift_options import AUTO, add_shift_options, check_shift
from shoal.server.options.step_options import add_mixed_option
from shoal.server.options.tier_option import add_tier_option
from shoal.server.options.urgent_options import add_urgent_option, check_urgent
from shoal.server.options.workload_options import (
    add_target_option,
    add_workload_options,
    read_objectives,
    read_workload,
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """How one policy served the workload."""

    node: Node
    run: Run[Arrival]
    records: Sequence[figures.Record]
    report: figures.Report
    seconds: float
    """How long the simulation took."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal simulate`` and return the exit code.

    Raises:
        UserError: an argument or a file is not valid.
    """
    args = _parser().parse_args(argv)
    workload = read_workload(args)
    runs = []
    try:
        for one in _simulate_all(args, workload):
            _tell(args, one)
            runs.append(one)
    except SimulationError as error:
        print(f"shoal: the simulated node failed: {error}", file=sys.stderr)
        return 1
    _show(args, workload, runs)
    return 0


def simulate_options(argv: Sequence[str]) -> list[Simulated]:
    """Return what ``shoal simulate`` finds with these arguments, for each policy; print nothing.

    Raises:
        UserError: an argument or a file is not valid.
        SimulationError: a node stopped with requests left.
    """
    args = _parser().parse_args(argv)
    return [*_simulate_all(args, read_workload(args))]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shoal simulate",
        description="Serve a workload in virtual time under one policy after the other.",
    )
    add = parser.add_argument
    add("--policy", required=True, metavar="NAME[,NAME]", help="policies to compare")
    _add_layout_options(parser)
    _add_hardware_options(parser)
    for name in ("--max-num-seqs", "--max-num-batched-tokens"):
        add(name, type=int, metavar="N", help="(default: vLLM's own on this hardware)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV of prompts that others may begin with, as vLLM does (default: on)",
    )
    add_placement_options(parser)
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--plot", type=Path, metavar="FILE.svg", help="draw layouts, load and latencies over time")
    add(
        "--captured-tokens",
        type=int,
        default=FULL_GRAPH_TOKENS,
        metavar="N",
        help="size of the largest CUDA graph: a step in SP batches more tokens, whatever the "
        "threshold (default: %(default)s)",
    )
    add_mixed_option(parser)
    add_tier_option(parser)
    add_shift_options(parser)
    add_sharing_options(parser)
    add_target_option(parser)
    add_urgent_option(parser)
    add_workload_options(parser)
    return parser


def _add_hardware_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-shape",
        default="llama-3-70b-fp8",
        metavar="FILE|NAME",
        help=f"(default: %(default)s; built in: {', '.join(built_in('shapes'))})",
    )
    add(
        "--hardware",
        default="h200",
        metavar="FILE|NAME",
        help=f"(default: %(default)s; built in: {', '.join(all_hardware())})",
    )
    add(
        "--fit-file",
        type=Path,
        metavar="FILE",
        help="what the fit of a node at its start has found (--fit-dir): steps take these times, "
        "and policies know them from the start",
    )


def _add_layout_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engines", type=int, default=8, choices=ENGINE_COUNTS, help="(default: %(default)s)")
    add("--max-group", type=int, choices=ENGINE_COUNTS, help="(default: all engines)")
    add(
        "--max-pp",
        type=int,
        choices=ENGINE_COUNTS,
        default=1,
        help="most stages of a pipeline (default: no pipelines)",
    )
    add(
        "--layout",
        metavar="NAME",
        help="layout of all engines under the policy manual, such as tp2 or tp2-pp2 (default: dp)",
    )


def _node(
    args: Namespace, policies: Sequence[str], objectives: Sequence[figures.Objective]
) -> Node:
    max_group = args.max_group or args.engines
    if max_group > args.engines:
        raise UserError(f"--max-group {max_group}: there are only {args.engines} engines")
    if args.max_pp > max_group:
        raise UserError(f"--max-pp {args.max_pp}: a group has at most {max_group} engines")
    if args.layout is not None and [*policies] != ["manual"]:
        raise UserError("--layout is for --policy manual: the other policies decide the layout")
    hardware = hardware_named(args.hardware)
    if args.max_num_seqs is None:
        args.max_num_seqs = hardware.batch_limits.requests
    if args.max_num_batched_tokens is None:
        args.max_num_batched_tokens = hardware.batch_limits.tokens
    check_at_least(args, 1, "max_num_seqs", "max_num_batched_tokens")
    check_at_least(args, 0, "captured_tokens", "mixed_step_tokens", "kv_tier_gib")
    shape = read_shape(args.model_shape)
    if args.max_sp == AUTO:
        # Models with experts are not among those that ``automatic_max_sp`` knows.
        args.max_sp = max_group if hardware.is_gpu and not shape.experts else 1
    check_shift(args, policies, max_group)
    check_share(args.share_weights, args.engines)
    check_urgent(args, policies, args.engines, max_group)
    if shape.layers % args.max_pp:
        raise UserError(
            f"--max-pp {args.max_pp}: {shape.layers} layers make no {args.max_pp} equal stages"
        )
    return Node(
        shape=shape,
        hardware=hardware,
        engines=args.engines,
        max_group=max_group,
        max_pp=args.max_pp,
        layout=_layout(args.layout, max_group, args.max_pp),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        mixed_step_tokens=args.mixed_step_tokens,
        targets=tuple(Target(o.priority, o.ttft, o.tpot) for o in objectives),
        urgent_engines=args.urgent_engines,
        seed=args.seed,
        max_sp=args.max_sp,
        move_memory=args.move_memory,
        shift_threshold=args.shift_threshold,
        captured_tokens=args.captured_tokens,
        prefix_caching=args.enable_prefix_caching,
        place_by_prefix=args.place_by_prefix,
        short_first=args.short_first,
        corrections=_corrections(args.fit_file),
        tier_gib=args.kv_tier_gib,
    )


def _share(args: Namespace, node: Node, policy: str) -> int:
    """Return how many engines share weights under a policy, as a node that starts chooses it."""
    if isinstance(args.share_weights, int):
        return int(args.share_weights)
    room = node.hardware.memory_bytes * MEMORY_SHARE
    limits = weight_limits(policy, node.max_group, has_experts=node.shape.experts > 0)
    return fewest_sharers(node.shape, room, node.engines, node.max_sp, limits) or node.engines


def _corrections(path: Path | None) -> tuple[Correction, ...]:
    """Return what a fit has found."""
    if path is None:
        return ()
    try:
        found = read_fit(path)
    except FitFileError as error:
        raise UserError(f"--fit-file {error}") from error
    if not found:
        raise UserError(f"--fit-file {path}: {'it is empty' if found == () else 'no such file'}")
    return found


def _layout(name: str | None, max_group: int, max_pp: int) -> Layout | None:
    if name is None:
        return None
    known = {layout.name: layout for layout in layouts_up_to(max_group, max_pp)}
    if name not in known:
        raise UserError(f"no layout {name!r}: choose one of {', '.join(known)}")
    return known[name]


def _simulate_all(args: Namespace, workload: Workload) -> Iterator[Simulated]:
    """Serve the workload under one policy after the other."""
    try:
        policies = [policy.name for policy in load_policies(*args.policy.split(","))]
        objectives = read_objectives(args)
        node = _node(args, policies, objectives)
        for policy in policies:
            own = replace(node, share_weights=_share(args, node, policy))
            yield _simulate(own, policy, workload, objectives)
    except (FileError, PolicyError) as error:
        raise UserError(str(error)) from error


def _simulate(
    node: Node, policy: str, workload: Workload, objectives: Sequence[figures.Objective]
) -> Simulated:
    begin = time.monotonic()
    run = simulate(node, policy, workload.arrivals)
    records = records_of(run)
    one = figures.report(
        policy,
        records,
        run.tokens,
        switching=_switching(run),
        objectives=objectives,
        step_errors=run.step_errors,
    )
    return Simulated(node, run, records, one, time.monotonic() - begin)


def _tell(args: Namespace, one: Simulated) -> None:
    """Tell the user about a simulation that ended."""
    policy = one.run.policy
    if not isinstance(args.share_weights, int) and one.node.share_weights > 1:
        print(f"{policy}: --share-weights {one.node.share_weights}", file=sys.stderr)
    last = max((r.ended for r in one.records if r.ended is not None), default=0.0)
    print(f"{policy}: {last:.0f} s simulated in {one.seconds:.1f} s", file=sys.stderr)
    for change in one.run.memory_changes:
        print(f"{policy}: {change.line()}", file=sys.stderr)
    if one.run.policy_errors:
        print(f"{policy}: {one.run.policy_errors} plans could not be done", file=sys.stderr)


def records_of(run: Run[Arrival]) -> list[figures.Record]:
    """Return how each request of a simulated run was served (``Run.lives``)."""
    return [
        figures.Record(
            arrived=life.arrived,
            started=life.started,
            first_token=life.first_token,
            ended=life.ended,
            output_tokens=life.tokens,
            finished=life.finished,
            priority=arrival.priority,
            phase=arrival.phase,
            prompt_tokens=arrival.prompt_tokens,
            cached_tokens=life.cached,
        )
        for life, arrival in zip(run.lives, run.arrivals, strict=True)
    ]


def _switching(run: Run[Arrival]) -> figures.Switching:
    return figures.Switching(
        switches=len(run.switches),
        failed=sum(switch.error is not None for switch in run.switches),
        seconds=sum(switch.duration_seconds for switch in run.switches),
        paused=sum(switch.paused for switch in run.switches),
        moved=run.moves,
        carried=sum(switch.carried for switch in run.switches),
    )


def _show(args: Namespace, workload: Workload, runs: Sequence[Simulated]) -> None:
    reports = [one.report for one in runs]
    print(text_tables.side_by_side(reports))
    if args.json is not None:
        about = {
            "trace": workload.name,
            "requests": workload.requests,
            "rate_scale": args.rate_scale,
            "seed": args.seed,
            "engines": args.engines,
            "model_shape": args.model_shape,
            "hardware": args.hardware,
        }
        content = msgspec.json.encode(figures.as_json(reports, **about))
        write_file(args.json, msgspec.json.format(content) + b"\n")
    if args.plot is not None:
        timelines = [
            Timeline(
                one.run.policy,
                one.records,
                tokens=one.run.tokens,
                layouts=[(at, [unit.engines for unit in units]) for at, units in one.run.layouts],
            )
            for one in runs
        ]
        title = f"{workload.name} x {args.rate_scale:g} on {args.engines} engines"
        write_file(args.plot, plot.draw(title, timelines, read_objectives(args)).encode())
