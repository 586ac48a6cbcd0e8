"""``shoal bench``: finds what is to be measured."""

import argparse
import importlib
from collections.abc import Sequence

BENCHMARKS = {
    "switch": ("server.bench.switch", "idle binds and releases, fake and real engines"),
    "steps": ("server.bench.steps", "step times by layout, and the hardware file that fits them"),
    "fit": ("server.bench.fit", "the hardware file that fits results of 'shoal bench gpu'"),
    "gpu": (
        "server.bench.compare",
        "static DP and static TP of stock vLLM, and Shoal, side by side",
    ),
    "defaults": (
        "server.bench.defaults",
        "the same three systems with their own defaults, under vLLM's own client",
    ),
    "overload": ("server.bench.overload", "a node that is asked for many times what it can do"),
    "failures": ("server.bench.failures", "engines that are killed and stopped under streams"),
    "serve-compare": ("server.bench.compare", "the same three systems under open-loop workloads"),
}
"""Benchmarks: the module that runs each, and what it measures."""
COMPARISONS = ("gpu", "serve-compare")
"""Those of one module, which is told by their name."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench`` and return the exit code.

    Raises:
        UserError: the arguments are not valid.
    """
    parser = argparse.ArgumentParser(prog="shoal bench", description="Measure a node.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (_, summary) in BENCHMARKS.items():
        commands.add_parser(name, help=summary, add_help=False)
    benchmark = parser.parse_args(argv[:1]).benchmark
    module = importlib.import_module(BENCHMARKS[benchmark][0])
    return int(module.main(argv if benchmark in COMPARISONS else argv[1:]))
