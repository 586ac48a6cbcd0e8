"""``shoal simulate``: one workload under several policies, in virtual time, side by side.

The controller, its policies and the engines' protocol are the server's own; only the engines' step
times come from a model of the hardware.
"""

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loadgen import plot
from loadgen import report as figures
from loadgen.traces import TraceError, read_azure
from loadgen.workload import Workload, bursty, priorities
from policies.registry import UnknownPolicyError, get_policy
from policies.snapshot import Target
from runtime.simulation.files import FileError, built_in, read_hardware, read_shape
from runtime.simulation.node import Node, Run, SimulationError, simulate
from server.errors import UserError

ENGINE_COUNTS = (1, 2, 4, 8)
MADE_UP: dict[str, Callable[[int], Workload]] = {"bursty": bursty, "priority": priorities}
"""Workloads that need no file, by the name that ``--trace`` takes."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal simulate`` and return the exit code.

    Raises:
        UserError: an argument or a file is not valid.
    """
    args = _parser().parse_args(argv)
    try:
        policies = [get_policy(name).name for name in args.policy.split(",")]
        node = _node(args)
        workload = _workload(args)
        runs = [_simulate(node, policy, workload) for policy in policies]
    except (FileError, TraceError, UnknownPolicyError) as error:
        raise UserError(str(error)) from error
    except SimulationError as error:
        print(f"shoal: the simulated node failed: {error}", file=sys.stderr)
        return 1
    _show(args, workload, runs)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal simulate",
        description="Serve a workload in virtual time under one policy after the other.",
    )
    add = parser.add_argument
    add(
        "--trace",
        required=True,
        metavar="FILE|NAME",
        help=f"Azure LLM inference trace (CSV), or one of {', '.join(MADE_UP)}",
    )
    add("--policy", required=True, metavar="NAME[,NAME]", help="policies to compare")
    add("--engines", type=int, default=8, choices=ENGINE_COUNTS, help="(default: %(default)s)")
    add("--max-group", type=int, choices=ENGINE_COUNTS, help="(default: all engines)")
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
        help=f"(default: %(default)s; built in: {', '.join(built_in('hardware'))})",
    )
    add("--rate-scale", type=float, default=1.0, metavar="X", help="let everything come X times")
    add("--requests", type=int, metavar="N", help="only the workload's first N requests")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="(default: %(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="(default: %(default)s)",
    )
    add(
        "--target",
        type=_target,
        action="append",
        metavar="PRIORITY:TTFT:TPOT",
        help="what requests of this priority and more urgent ones are promised, in ms; repeat for "
        "more classes (urgent ones as --target=-10:...)",
    )
    add("--seed", type=int, default=0, help="of workloads that are made up (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--plot", type=Path, metavar="FILE.svg", help="draw requests, layout and TTFT over time")
    return parser


def _target(text: str) -> Target:
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not PRIORITY:TTFT:TPOT")
    try:
        target = Target(int(parts[0]), float(parts[1]) / 1000, float(parts[2]) / 1000)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if not (target.ttft_seconds > 0 and target.tpot_seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: times must be more than 0")
    return target


def _node(args: Namespace) -> Node:
    max_group = args.max_group or args.engines
    if max_group > args.engines:
        raise UserError(f"--max-group {max_group}: there are only {args.engines} engines")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: it must be at least 1")
    return Node(
        shape=read_shape(args.model_shape),
        hardware=read_hardware(args.hardware),
        engines=args.engines,
        max_group=max_group,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        targets=tuple(sorted(args.target or (), key=lambda target: target.priority)),
        seed=args.seed,
    )


def _workload(args: Namespace) -> Workload:
    if args.trace in MADE_UP:
        workload = MADE_UP[args.trace](args.seed)
    else:
        workload = read_azure(Path(args.trace))
    try:
        workload = workload.scaled(args.rate_scale)
    except ValueError as error:
        raise UserError(f"--rate-scale: {error}") from error
    if args.requests is not None and args.requests < 1:
        raise UserError(f"--requests {args.requests}: it must be at least 1")
    return Workload(workload.name, workload.arrivals[: args.requests])


def _simulate(
    node: Node, policy: str, workload: Workload
) -> tuple[Run, Sequence[figures.Record], figures.Report]:
    begin = time.monotonic()
    run = simulate(node, policy, workload.arrivals)
    records = _records(run, workload)
    one = figures.report(
        policy,
        records,
        run.tokens,
        switching=_switching(run),
        objectives=[
            figures.Objective(t.priority, t.ttft_seconds, t.tpot_seconds) for t in node.targets
        ],
        step_errors=run.step_errors,
    )
    last = max((r.ended for r in records if r.ended is not None), default=0.0)
    took = time.monotonic() - begin
    print(f"{policy}: {last:.0f} s simulated in {took:.1f} s", file=sys.stderr)
    if run.policy_errors:
        print(f"{policy}: {run.policy_errors} plans could not be done", file=sys.stderr)
    return run, records, one


def _records(run: Run, workload: Workload) -> list[figures.Record]:
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
        )
        for life, arrival in zip(run.lives, workload.arrivals, strict=True)
    ]


def _switching(run: Run) -> figures.Switching:
    return figures.Switching(
        switches=len(run.switches),
        failed=sum(switch.error is not None for switch in run.switches),
        seconds=sum(switch.duration_seconds for switch in run.switches),
        paused=sum(switch.paused for switch in run.switches),
        moved=run.moves,
    )


def _show(
    args: Namespace,
    workload: Workload,
    runs: Sequence[tuple[Run, Sequence[figures.Record], figures.Report]],
) -> None:
    reports = [one for _, _, one in runs]
    print(figures.table(reports))
    if args.json is not None:
        about = {
            "trace": workload.name,
            "requests": len(workload.arrivals),
            "rate_scale": args.rate_scale,
            "seed": args.seed,
            "engines": args.engines,
            "model_shape": args.model_shape,
            "hardware": args.hardware,
        }
        content = msgspec.json.encode(figures.as_json(reports, **about))
        _write(args.json, msgspec.json.format(content) + b"\n")
    if args.plot is not None:
        timelines = [
            plot.Timeline(
                run.policy, records, [(at, args.engines / len(p)) for at, p in run.layouts]
            )
            for run, records, _ in runs
        ]
        title = f"{workload.name} x {args.rate_scale:g} on {args.engines} engines"
        _write(args.plot, plot.draw(title, timelines).encode())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
