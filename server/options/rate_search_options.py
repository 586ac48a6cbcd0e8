"""``shoal replay --find-max-rate``: its options, and the windows of load that it measures."""

import inspect
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Awaitable, Callable, Sequence

from shoal.loadgen.exchange import Outcome
from shoal.loadgen.max_rate import Found, Window, find_max_rate
from shoal.loadgen.replay_results import Result
from shoal.loadgen.shapes import SHAPES
from shoal.loadgen.summary import EVERYTHING, Objective
from shoal.loadgen.workload import Workload
from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least, check_positive, flag_of
from shoal.server.options.dataset_options import with_dataset
from shoal.server.options.workload_options import read_workload

WINDOW_SECONDS = 30.0
STEADY = tuple(
    name
    for name, shape in SHAPES.items()
    if isinstance(inspect.signature(shape).parameters["rate"].default, float)
)
"""Shapes that have one rate."""
_NOT_SEARCHED = ("rate", "concurrency", "html", "requests")

Replay = Callable[[Namespace, Workload], Awaitable[Result]]
"""Sends a workload as the arguments say."""


def add_rate_search_options(parser: ArgumentParser) -> None:
    """Add the options that ``search`` reads."""
    group = parser.add_argument_group("the largest rate")
    add = group.add_argument
    add(
        "--find-max-rate",
        type=_bounds,
        metavar="LOW:HIGH",
        help="find the largest rate between these at which --target is kept, by bisection; each "
        f"window lasts --duration (default: {WINDOW_SECONDS:g} s)",
    )
    add("--windows", type=int, default=3, metavar="N", help="of each rate (default: %(default)s)")
    add(
        "--attainment",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a window's requests that must meet their target (default: %(default)s)",
    )
    add(
        "--precision",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="relative difference of rates at which the search ends (default: %(default)s)",
    )


def _bounds(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not LOW:HIGH") from error
    if not 0 < low <= high < float("inf"):
        raise ArgumentTypeError(f"{text!r}: rates must be more than 0 and ascend")
    return low, high


def check_search(args: Namespace, objectives: Sequence[Objective]) -> None:
    """Refuse what does not go with a search.

    Raises:
        UserError: the options do not go together; the message names one.
    """
    if args.trace not in STEADY:
        raise UserError(f"--find-max-rate needs a --trace with one rate: {', '.join(STEADY)}")
    if not objectives:
        raise UserError("--find-max-rate needs a --target, which the rate is to keep")
    for name in _NOT_SEARCHED:
        if getattr(args, name) is not None:
            raise UserError(f"{flag_of(name)} does not go with --find-max-rate")
    if args.check_metrics:
        raise UserError("--check-metrics does not go with --find-max-rate")
    check_at_least(args, 1, "windows")
    check_positive(args, "precision", "attainment")
    if args.attainment > 1:
        raise UserError(f"--attainment {args.attainment:g}: it is a share, and at most 1")


async def search(args: Namespace, objectives: Sequence[Objective], replay: Replay) -> Found:
    """Return the largest rate that keeps the objectives.

    Each window has its own seed: a prefix cache must not know its prompts.
    """

    async def measure(rate: float, number: int) -> Window:
        chosen = {
            "rate": (rate, rate),
            "seed": args.seed + number,
            "duration": args.duration or WINDOW_SECONDS,
        }
        window = Namespace(**{**vars(args), **chosen})
        result = await replay(window, with_dataset(window, read_workload(window)))
        return window_of(result, objectives)

    return await find_max_rate(
        measure,
        args.find_max_rate,
        windows=args.windows,
        attainment=args.attainment,
        precision=args.precision,
    )


def window_of(result: Result, objectives: Sequence[Objective]) -> Window:
    """Return what a search needs to know of a run."""
    run = result.run
    everything = result.report(objectives).groups[EVERYTHING]
    served = any(exchange.outcome is Outcome.OK for exchange in run.exchanges)
    return Window(
        requests=everything.requests,
        attainment=everything.attainment or 0.0,
        ttft_p90=None if everything.ttft is None else everything.ttft.p90,
        tpot_p90=None if everything.tpot is None else everything.tpot.p90,
        # That nobody was served says something of the server, not of the load.
        problems=result.verdict.problems if served or run.interrupted else (),
    )
