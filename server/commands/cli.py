"""The ``shoal`` command: finds the subcommand, and prints what users did wrong as one line."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from shoal.server.commands.bench import BENCHMARKS
from shoal.server.commands.command_parser import CommandParser
from shoal.server.errors import USAGE_EXIT_CODE, UserError

COMMANDS = {
    "serve": ("shoal.server.commands.serve", "serve a model: shoal serve [MODEL]"),
    "bench": ("shoal.server.commands.bench", f"measure a node: shoal bench {'|'.join(BENCHMARKS)}"),
    "replay": (
        "shoal.server.commands.replay",
        "send a workload to a server and say how it was served",
    ),
    "run-batch": (
        "shoal.server.commands.run_batch",
        "answer a file of requests: shoal run-batch -i IN -o OUT",
    ),
    "report": ("shoal.server.commands.report", "show replays side by side"),
    "openapi": (
        "shoal.server.commands.openapi",
        "print the OpenAPI document: shoal openapi public|admin",
    ),
    "simulate": ("shoal.server.commands.simulate", "try policies on a workload, in virtual time"),
}
"""Subcommands: the module whose ``main(argv) -> int`` runs each, imported when it is called."""

_ENGINE_LIBRARIES = ("vllm", "torch", "transformers", "triton")
_NO_VLLM = (
    "vLLM is not installed: pip install 'shoal[cuda]' installs it for NVIDIA GPUs, and "
    "pip install 'shoal[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu for CPUs"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``shoal`` command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # A subcommand parses its own arguments, because its parser may need a slow import.
        command = _parser().parse_args(words[:1]).command
        return int(importlib.import_module(COMMANDS[command][0]).main(words[1:]))
    except UserError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        # Replays, simulations and reports need no engine, so vLLM is no dependency of all.
        if error.name not in _ENGINE_LIBRARIES:
            raise
        message = _NO_VLLM
    except KeyboardInterrupt:
        return 1
    print(f"shoal: {message}", file=sys.stderr)
    return USAGE_EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shoal",
        description="An LLM server that changes its parallelism while it serves.",
        epilog="'shoal COMMAND --help' shows the options of a command.",
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


class _Version(argparse.Action):
    """Prints the installed version; looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"shoal {importlib.metadata.version('shoal')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
