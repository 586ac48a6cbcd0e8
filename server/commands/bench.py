"""``shoal bench``: finds the benchmark that the command line names, and runs it."""

import importlib
from collections.abc import Sequence

from shoal.server.commands.command_parser import CommandParser

BENCHMARKS = {
    "steps": (
        "shoal.loadgen.bench.steps",
        "step times by layout, and the hardware file that fits them",
    ),
    "fit": ("shoal.loadgen.bench.fit", "the hardware file that fits results of 'shoal bench gpu'"),
    "gpu": (
        "shoal.loadgen.bench.compare",
        "static DP and static TP of stock vLLM, and Shoal, side by side",
    ),
    "traffic": (
        "shoal.loadgen.bench.traffic",
        "stock vLLM's DP and TP, and Shoal, with their own defaults, on any traffic",
    ),
    "regret": (
        "shoal.loadgen.bench.regret",
        "a policy beside every fixed layout, on random loads or your own, simulated",
    ),
    "batch": (
        "shoal.loadgen.bench.batch_beside_people",
        "people's latencies without a batch and with one beside them",
    ),
    "sharing": (
        "shoal.loadgen.bench.sharing",
        "engines that share weights, and groups of them, by batch size; also projected",
    ),
    "overload": (
        "shoal.loadgen.bench.overload",
        "a node that is asked for many times what it can do",
    ),
    "failures": (
        "shoal.loadgen.bench.engine_failures",
        "engines that are killed and stopped under streams",
    ),
}
"""Benchmarks: the module that runs each, and what it measures."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench`` and return the exit code.

    Raises:
        UserError: the arguments are not valid.
    """
    parser = CommandParser(prog="shoal bench", description="Measure a node.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (_, summary) in BENCHMARKS.items():
        commands.add_parser(name, help=summary, add_help=False)
    benchmark = parser.parse_args(argv[:1]).benchmark
    module = importlib.import_module(BENCHMARKS[benchmark][0])
    return int(module.main(argv[1:]))
