"""The options of ``shoal simulate`` and ``shoal replay`` that describe the load."""

import inspect
import math
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shoal.loadgen.shapes import SHAPES, Lengths, make_up
from shoal.loadgen.summary import Objective
from shoal.loadgen.traces import TraceError, read_trace
from shoal.loadgen.workload import Workload
from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least, check_positive, flag_of

_SHAPE_OPTIONS = (
    *("rate", "burst_rate", "burstiness"),
    *("quiet_seconds", "burst_seconds", "hill_seconds"),
    *("turns", "think_seconds", "shared_tokens"),
)
_LENGTH_OPTIONS = ("prompt_tokens", "output_tokens")
_POSITIVE = (
    *("rate_scale", "length_scale", "requests", "duration", "max_request_tokens"),
    *("burstiness", "quiet_seconds", "burst_seconds", "hill_seconds", "think_seconds"),
)

N = TypeVar("N", int, float)


def add_workload_options(parser: ArgumentParser) -> None:
    """Add the options that ``read_workload`` reads."""
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add(
        "--trace",
        required=True,
        metavar="FILE|SHAPE",
        help="a trace (Azure or BurstGPT CSV, Mooncake or Bailian JSONL, or one's own), or one of "
        f"{', '.join(SHAPES)}",
    )
    add("--rate-scale", type=float, default=1.0, metavar="X", help="send requests X times as fast")
    add("--length-scale", type=float, default=1.0, metavar="X", help="scale prompts and outputs")
    add("--start", type=float, default=0.0, metavar="S", help="leave out the first S seconds")
    add("--requests", type=int, metavar="N", help="only the first N requests")
    add("--duration", type=float, metavar="S", help="only the first S seconds")
    add(
        "--max-request-tokens",
        type=int,
        metavar="N",
        help="leave out requests with more tokens, prompt and output together",
    )
    add(
        "--priorities",
        type=_shares,
        metavar="P:SHARE,...",
        help="draw priorities in these proportions (as --priorities=-10:1,0:4)",
    )
    add("--seed", type=int, default=0, help="seed of random draws (default: %(default)s)")
    add("--delay", type=float, default=0.0, metavar="S", help="begin after S seconds")
    add(
        "--beside",
        action="append",
        metavar="OPTIONS",
        help="options of another workload, in quotes, that comes at the same time; may be repeated "
        "(--beside='--trace bursty --delay 30')",
    )
    made_up = parser.add_argument_group("made-up workloads")
    add = made_up.add_argument
    add("--rate", type=_rates, metavar="LOW[:HIGH]", help="requests per second; of a ramp FROM:TO")
    add("--burst-rate", type=_rates, metavar="LOW[:HIGH]", help="of bursty: rate of its bursts")
    add("--burstiness", type=float, metavar="X", help="of gamma: its shape; 1 is Poisson")
    add("--quiet-seconds", type=float, metavar="S", help="of bursty: quiet phases")
    add("--burst-seconds", type=float, metavar="S", help="of bursty: bursts")
    add("--hill-seconds", type=float, metavar="S", help="of hill: up and down")
    add("--turns", type=_lengths, metavar="LOW[:HIGH]", help="of chats: turns of each")
    add("--think-seconds", type=float, metavar="S", help="of chats: mean time between two turns")
    add("--shared-tokens", type=_tokens, metavar="N", help="of chats: tokens of their common start")
    add("--prompt-tokens", type=_lengths, metavar="LOW[:HIGH]", help="length of prompts")
    add("--output-tokens", type=_lengths, metavar="LOW[:HIGH]", help="length of outputs")


class QuotedWorkloadParser(ArgumentParser):
    """Reads the options of a workload that is one argument of a command."""

    def __init__(self, seed: int) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        add_workload_options(self)
        self.set_defaults(seed=seed)

    def error(self, message: str) -> NoReturn:
        """Refuse the options.

        Raises:
            UserError: always.
        """
        raise UserError(message)


def add_target_option(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add ``--target``, a list of ``Objective``."""
    parser.add_argument(
        "--target",
        type=_target,
        action="append",
        metavar="PRIORITY:TTFT:TPOT",
        help="what requests of this priority and more urgent ones are promised, in ms; repeat for "
        "more classes (urgent ones as --target=-10:...)",
    )


def read_objectives(args: Namespace) -> list[Objective]:
    """Return what requests are promised, the most urgent first."""
    return sorted(args.target or (), key=lambda objective: objective.priority)


def read_workload(args: Namespace) -> Workload:
    """Return the load that the options describe.

    Raises:
        UserError: a trace cannot be read, options do not go together, or no request is left.
    """
    check_positive(args, *_POSITIVE)
    check_at_least(args, 0, "start", "delay")
    try:
        workload = _make_up(args) if args.trace in SHAPES else _read(args)
        if args.priorities is not None:
            workload = workload.with_priorities(args.priorities, args.seed)
    except (TraceError, ValueError) as error:
        raise UserError(str(error)) from error
    workload = workload.scaled(args.rate_scale).resized(args.length_scale)
    if args.max_request_tokens is not None:
        workload = workload.fitting(args.max_request_tokens)
    workload = workload.after(args.start).first(args.requests, args.duration).later(args.delay)
    if not workload.arrivals:
        raise UserError(f"--trace {args.trace}: no request is left of it")
    for number, text in enumerate(args.beside or (), 1):
        workload = workload.beside(_read_beside(args, text, number))
    return workload


def _read_beside(args: Namespace, text: str, number: int) -> Workload:
    """Return a workload of ``--beside``; only windows of one trace have prompts in common."""
    try:
        other = QuotedWorkloadParser(args.seed).parse_args(shlex.split(text))
        workload = read_workload(other)
    except (UserError, ValueError) as error:
        raise UserError(f"--beside {text!r}: {error}") from error
    is_same_trace = other.trace == args.trace and other.trace not in SHAPES
    return workload if is_same_trace else workload.apart(f"{number}")


def _read(args: Namespace) -> Workload:
    for name in (*_shape_options(args), *_LENGTH_OPTIONS):
        if getattr(args, name) is not None:
            raise UserError(f"{flag_of(name)} is for made-up workloads, not for {args.trace}")
    path = Path(args.trace)
    if not path.exists() and args.trace.isalpha():  # meant a shape
        shapes = ", ".join(SHAPES)
        raise UserError(f"--trace {path}: there is no such file; made-up traces are {shapes}")
    return read_trace(path)


def _shape_options(args: Namespace) -> Iterator[str]:
    """Yield the options of shapes; the time between turns may be that of a dataset's chats."""
    has_dataset = getattr(args, "dataset", None) is not None
    return (name for name in _SHAPE_OPTIONS if name != "think_seconds" or not has_dataset)


def _make_up(args: Namespace) -> Workload:
    known = inspect.signature(SHAPES[args.trace]).parameters
    settings: dict[str, Any] = {}
    for name in _shape_options(args):
        value = getattr(args, name)
        if value is None:
            continue
        if name not in known:
            raise UserError(f"{flag_of(name)} is not for {args.trace}")
        if isinstance(value, tuple) and isinstance(known[name].default, float):
            if value[0] != value[1]:
                raise UserError(f"{flag_of(name)}: {args.trace} takes one rate")
            value = value[0]
        settings[name] = value
    lengths = known["lengths"].default
    return make_up(
        args.trace,
        args.seed,
        start=args.start * args.rate_scale,
        requests=args.requests,
        seconds=None if args.duration is None else (args.start + args.duration) * args.rate_scale,
        lengths=Lengths(args.prompt_tokens or lengths.prompt, args.output_tokens or lengths.output),
        **settings,
    )


# --- types of arguments ---------------------------------------------------------------------------


def _rates(text: str) -> tuple[float, float]:
    low, high = _pair(text, float)
    if not 0 < min(low, high) <= max(low, high) < math.inf:
        raise ArgumentTypeError(f"{text}: a rate must be more than 0")
    return low, high


def _lengths(text: str) -> tuple[int, int]:
    low, high = _pair(text, int)
    if not 0 < low <= high:
        raise ArgumentTypeError(f"{text}: lengths must be more than 0 and ascend")
    return low, high


def _tokens(text: str) -> int:
    try:
        tokens = int(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no number of tokens") from error
    if tokens < 0:
        raise ArgumentTypeError(f"{text}: there are no negative lengths")
    return tokens


def _pair(text: str, kind: type[N]) -> tuple[N, N]:
    low, _, high = text.partition(":")
    try:
        return kind(low), kind(high or low)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not LOW or LOW:HIGH") from error


def _shares(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(priority): float(share) for priority, share in pairs}
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not PRIORITY:SHARE,...") from error


def _target(text: str) -> Objective:
    try:
        priority, ttft, tpot = text.split(":")
        target = Objective(int(priority), float(ttft) / 1000, float(tpot) / 1000)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not PRIORITY:TTFT:TPOT") from error
    if not (0 < target.ttft < math.inf and 0 < target.tpot < math.inf):
        raise ArgumentTypeError(f"{text!r}: times must be more than 0, and finite")
    return target
