"""``shoal bench gpu``: stock vLLM and Shoal on the same devices.

It fills a results file in a directory, and writes a report beside it. Measures that are already in
the file are not taken again, so the same command continues a run that was cut short.
"""

import argparse
import asyncio
import math
import signal
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal.loadgen.bench import comparison_tables, system_info
from shoal.loadgen.bench.campaign import OF_RECORDINGS, Campaign, say
from shoal.loadgen.bench.carry_measure import CARRY
from shoal.loadgen.bench.comparison_results import Results, ResultsFile
from shoal.loadgen.bench.dummy_model import (
    built_in_shapes,
    has_experts,
    read_shape,
    write_model,
)
from shoal.loadgen.bench.measures import IN_LAYOUTS, OF_SWITCHES, Sizes
from shoal.loadgen.bench.modes import MODES
from shoal.loadgen.bench.open_loop_workloads import MADE_UP, TRACE, WORKLOADS, trace_cut
from shoal.loadgen.bench.rates import CHOOSING, RATES, Sweep, read_sweep
from shoal.loadgen.bench.systems import (
    CHECK,
    COMPARED,
    SHOAL,
    STOCK_BETWEEN,
    Settings,
    System,
    all_systems,
    last_value,
    recording,
)
from shoal.loadgen.traces import TraceError
from shoal.loadgen.workload import Workload
from shoal.policies.registry import UnknownPolicyError, get_policy
from shoal.runtime.config import ENGINE_COUNTS
from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least, check_positive

N = TypeVar("N", int, float)
MEASURES = (*IN_LAYOUTS, *OF_SWITCHES, CARRY, MODES, RATES, *OF_RECORDINGS, *WORKLOADS)
DEFAULT_MEASURES = (*IN_LAYOUTS, *OF_SWITCHES)
"""``trace`` is added if a trace is given."""
DURATION_SECONDS = 60.0
INCOMPLETE_EXIT_CODE = 3
"""Exit code if measures are still missing: run the same command again."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench gpu``, and return the exit code.

    Raises:
        UserError: the arguments, or the directory of the results, are not valid.
    """
    args, options = _parser().parse_known_args(argv)
    check_positive(args, "rate_seconds")
    settings = _settings(args, options)
    config = read_shape(args.model_shape)
    workloads = _workloads(args)
    measures = args.measures or (*DEFAULT_MEASURES, *([TRACE] if args.trace else []))
    if TRACE in measures and args.trace is None:
        raise UserError(f"--measures {TRACE} needs --trace")
    if recorded := tuple(name for name in OF_RECORDINGS if name in measures):
        if set(measures) - set(OF_RECORDINGS):
            # Their server is started with recording, which makes every step a little slower.
            raise UserError(
                f"--measures {','.join(recorded)}: take no other with that; the same --out takes "
                "it up"
            )
        measures = recorded
    sweep = read_sweep(args) if RATES in measures else Sweep()
    file = ResultsFile(args.out / "results.json")
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
        write_model(args.out / "model", config)
    except OSError as error:
        raise UserError(f"cannot write to {args.out}: {error.strerror}") from error
    results = file.take_up(Results(settings, _sizes(args), config, system_info.environment()))
    for name in (name for name in WORKLOADS if name in measures):
        results.add_workload(name, _about(args, name, workloads[name]))
    for name, about in sweep.about.items():
        results.add_workload(name, about)
    file.write(results)
    campaign = Campaign(
        systems=_chosen(args, _systems(args, settings, measures, has_experts(config))),
        measures=measures,
        workloads=workloads,
        policy=args.policy,
        results=results,
        file=file,
        logs=args.out / "logs",
        step_seconds=args.step_seconds,
        sweep=sweep,
    )
    complete = run(campaign, args.budget_seconds)
    report = comparison_tables.markdown(results)
    (args.out / "report.md").write_text(report, encoding="utf-8")
    print(report)
    say(f"written: {args.out / 'results.json'}, {args.out / 'report.md'}")
    return 0 if complete else INCOMPLETE_EXIT_CODE


def run(campaign: Campaign, budget_seconds: float) -> bool:
    """Run a campaign; SIGTERM ends it as Ctrl-C does, and no server is left behind."""

    async def measure() -> bool:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await campaign.run(budget_seconds)

    try:
        return asyncio.run(measure())
    except asyncio.CancelledError:
        return False


# --- arguments ------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal bench gpu",
        description="Compare stock vLLM's static DP and static TP with Shoal. Options that are not "
        "listed here go to every server.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    shapes = ", ".join(built_in_shapes())
    add("--model-shape", required=True, metavar="NAME|FILE", help=f"{shapes}, or a config.json")
    add("--engines", type=int, required=True, choices=ENGINE_COUNTS, help="GPUs to use")
    add("--out", type=Path, required=True, metavar="DIR", help="results, report, logs")
    add("--systems", type=_names(*COMPARED, CHECK), help=f"only these of {', '.join(COMPARED)}")
    add(
        "--degrees",
        type=_integers,
        default=(),
        metavar="N,...",
        help="degrees of TP between one GPU and all of them, measured too: stock replicas of N "
        "GPUs each, and Shoal's groups of N",
    )
    add("--measures", type=_names(*MEASURES), help=f"only these of {', '.join(MEASURES)}")
    add(
        "--budget-seconds",
        type=float,
        default=540.0,
        metavar="S",
        help="end after so long; the same command goes on from there (default: %(default)g)",
    )
    add("--step-seconds", type=float, default=150.0, help="start no system with less time left")
    add(
        "--check-model",
        type=Path,
        metavar="DIR",
        help="a real checkpoint, on which Shoal's layouts shall agree",
    )
    _add_server_options(parser.add_argument_group("every server"))
    _add_size_options(parser.add_argument_group("sizes"))
    _add_workload_options(parser.add_argument_group("open-loop workloads"))
    _add_rate_options(parser.add_argument_group(RATES))
    return parser


def _add_server_options(group: Any) -> None:
    add = group.add_argument
    add("--dtype", default="bfloat16", help="(default: %(default)s)")
    add("--quantization", help="of the weights, as vLLM names it")
    add("--max-model-len", type=int, default=32768, help="(default: %(default)s)")
    add("--max-num-seqs", type=int, default=256, help="(default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=8192, help="(default: %(default)s)")
    add("--gpu-memory-utilization", type=float, default=0.9, help="(default: %(default)s)")
    add("--prefix-caching", action="store_true", help="leave vLLM's prefix caching on")
    add("--api-servers", type=int, help="front ends (default: as many as GPUs)")
    add("--shoal-option", action="append", default=[], help="for Shoal alone; may be repeated")


def _add_size_options(group: Any) -> None:
    add, sizes = group.add_argument, Sizes()
    add("--batches", type=_integers, default=sizes.batches, help="requests per unit")
    add("--prompts", type=_integers, default=sizes.prompts, help="prompt tokens of TTFT")
    add(
        "--saturation",
        type=_integers,
        default=sizes.saturation,
        help="requests per GPU, their prompt and output tokens",
    )
    add("--long-prompts", type=_integers, help="prompt tokens of modes and breakdown")
    add(
        "--throughput-repeats",
        type=int,
        default=sizes.throughput_repeats,
        help="runs of modes' throughputs, of which the best counts (default: %(default)s)",
    )
    add("--switches", type=int, default=sizes.switches, help="binds, idle and loaded")
    add("--load", type=int, default=sizes.load, help="requests that every engine decodes")
    add(
        "--carry-cases",
        type=_cases,
        metavar="REQUESTSxPROMPT,...",
        help="requests on the node that switches carry, and their prompt tokens (default: "
        f"{','.join(f'{n}x{tokens}' for n, tokens in sizes.carry_cases)})",
    )
    add(
        "--carry-tokens",
        type=int,
        default=sizes.carry_tokens,
        help="the most output tokens of each of them (default: %(default)s)",
    )
    add(
        "--carry-switches",
        type=int,
        default=sizes.carry_switches,
        help="binds of each case, and releases (default: %(default)s)",
    )


def _add_workload_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--duration",
        type=_by_workload,
        default={},
        metavar="S|NAME=S,...",
        help=f"seconds of {', '.join(WORKLOADS)} (default: {DURATION_SECONDS:g} each)",
    )
    add(
        "--rate-scale",
        type=_by_workload,
        default={},
        metavar="X|NAME=X,...",
        help="how many times as fast they come (default: 1 each)",
    )
    add("--trace", type=Path, metavar="FILE", help="cut the busiest part out of this trace")
    add("--policy", default="flying", help="decides Shoal's layout (default: %(default)s)")
    add("--seed", type=int, default=0, help="of what is made up (default: %(default)s)")


def _add_rate_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--rates",
        type=partial(_numbers, float),
        default=(1.0, 2.0, 4.0, 6.0),
        metavar="R,...",
        help="requests per second (default: 1,2,4,6)",
    )
    add(
        "--rate-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="how long they come at each rate (default: %(default)g)",
    )
    add(
        "--rate-request",
        default="8000,250",
        metavar="PROMPT,OUTPUT",
        help="tokens of every request, or LOW:HIGH of each (default: %(default)s)",
    )
    add(
        "--policies",
        type=_names(*CHOOSING),
        default=("flying",),
        metavar="NAME,...",
        help=f"of Shoal, beside its fixed ways: {', '.join(CHOOSING)} (default: flying)",
    )


def _settings(args: Namespace, options: Sequence[str]) -> Settings:
    return Settings(
        shape=Path(args.model_shape).name,
        engines=args.engines,
        dtype=args.dtype,
        quantization=args.quantization,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        prefix_caching=args.prefix_caching,
        api_servers=args.api_servers or args.engines,
        options=tuple(options),
        shoal_options=_shoal_options(args),
        degrees=_degrees(args),
    )


def _shoal_options(args: Namespace) -> tuple[str, ...]:
    options = tuple(args.shoal_option)
    largest = last_value(options, "--max-sp")
    if largest is not None and not largest.isdecimal():
        raise UserError(f"--shoal-option=--max-sp={largest}: say a number, on which figures depend")
    return options


def _degrees(args: Namespace) -> tuple[int, ...]:
    for degree in args.degrees:
        if degree not in STOCK_BETWEEN or degree >= args.engines:
            raise UserError(
                f"--degrees {degree}: it must be one of "
                f"{', '.join(map(str, STOCK_BETWEEN))}, and less than --engines {args.engines}"
            )
    return tuple(sorted(set(args.degrees)))


def _sizes(args: Namespace) -> Sizes:
    if len(args.saturation) != 3:
        raise UserError("--saturation: it must be REQUESTS,PROMPT,OUTPUT")
    sizes = Sizes()
    check_at_least(args, 1, "switches", "throughput_repeats", "carry_switches", "carry_tokens")
    return Sizes(
        batches=args.batches,
        prompts=args.prompts,
        saturation=args.saturation,
        switches=args.switches,
        load=args.load,
        throughput_repeats=args.throughput_repeats,
        carry_cases=_carry_cases(args, sizes),
        carry_switches=args.carry_switches,
        carry_tokens=args.carry_tokens,
        long_prompts=args.long_prompts
        or tuple(n for n in sizes.long_prompts if n < args.max_model_len),
    )


def _carry_cases(args: Namespace, sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Return the cases that were asked for, or those of the default that fit the longest context.

    Raises:
        UserError: a case that was asked for does not fit.
    """
    longest = args.max_model_len - args.carry_tokens
    for _, tokens in args.carry_cases or ():
        if tokens > longest:
            raise UserError(
                f"--carry-cases: {tokens} prompt tokens and --carry-tokens {args.carry_tokens} "
                f"are more than --max-model-len {args.max_model_len}"
            )
    return args.carry_cases or tuple(case for case in sizes.carry_cases if case[1] <= longest)


def _workloads(args: Namespace) -> dict[str, Workload]:
    durations = {name: _of_workload(args.duration, name, DURATION_SECONDS) for name in WORKLOADS}
    scales = {name: _of_workload(args.rate_scale, name, 1.0) for name in WORKLOADS}
    try:
        get_policy(args.policy)
        found = {
            name: make(args.seed, durations[name], scales[name]) for name, make in MADE_UP.items()
        }
        if args.trace is not None:
            found[TRACE] = trace_cut(args.trace, durations[TRACE], scales[TRACE])
    except (TraceError, UnknownPolicyError) as error:
        raise UserError(str(error)) from error
    return {name: workload.fitting(args.max_model_len) for name, workload in found.items()}


def _about(args: Namespace, name: str, workload: Workload) -> dict[str, Any]:
    """Return the parameters of a workload."""
    source = {"trace": args.trace.name} if name == TRACE else {"seed": args.seed}
    return {
        **source,
        "seconds": _of_workload(args.duration, name, DURATION_SECONDS),
        "rate_scale": _of_workload(args.rate_scale, name, 1.0),
        "policy": args.policy,
        "requests": len(workload.arrivals),
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in workload.arrivals),
        "output_tokens": sum(arrival.output_tokens for arrival in workload.arrivals),
    }


def _of_workload(given: Mapping[str, float], name: str, default: float) -> float:
    """Return a workload's own value, or the value for all workloads without their own."""
    return given.get(name, given.get("", default))


def _systems(
    args: Namespace, settings: Settings, measures: Sequence[str], experts: bool
) -> list[System]:
    check_model = str(args.check_model) if args.check_model else None
    found = all_systems(settings, str(args.out / "model"), check_model, experts=experts)
    if not set(OF_RECORDINGS).intersection(measures):
        return found
    directory = (args.out / "recordings").absolute()
    directory.mkdir(exist_ok=True)
    return [recording(system, directory) for system in found if system.name == SHOAL]


def _chosen(args: Namespace, systems: Sequence[System]) -> list[System]:
    return [s for s in systems if args.systems is None or s.name in args.systems]


def _names(*known: str) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return tuple(text.split(","))

    return names


def _numbers(kind: type[N], text: str) -> tuple[N, ...]:
    try:
        numbers = tuple(map(kind, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,N,...") from error
    if not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: each must be more than 0")
    return numbers


_integers = partial(_numbers, int)


def _cases(text: str) -> tuple[tuple[int, int], ...]:
    found = tuple(_integers(case.replace("x", ",")) for case in text.split(","))
    if any(len(case) != 2 for case in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTSxPROMPT,...")
    return tuple((requests, tokens) for requests, tokens in found)


def _by_workload(text: str) -> dict[str, float]:
    """Return values by workload; the empty name stands for all others."""
    found = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} is not X or NAME=X") from error
        if name and name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
        if not 0 < found[name] < math.inf:
            raise argparse.ArgumentTypeError(f"{part!r}: it must be more than 0")
    return found
