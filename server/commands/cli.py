"""The ``shoal`` command: finds the subcommand, and prints what users did wrong as one line."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from shoal.server.commands.bench import BENCHMARKS
from shoal.server.errors import USAGE_EXIT_CODE, UserError

COMMANDS = {
    "serve": ("shoal.server.commands.serve", "serve a model: shoal serve [MODEL]"),
    "bench": ("shoal.server.commands.bench", f"measure a node: shoal bench {'|'.join(BENCHMARKS)}"),
    "replay": (
        "shoal.server.commands.replay",
        "send a workload to a server and say how it was served",
    ),
    "report": ("shoal.server.commands.report", "show replays side by side"),
    "openapi": (
        "shoal.server.commands.openapi",
        "print the OpenAPI document: shoal openapi public|admin",
    ),
    "simulate": ("shoal.server.commands.simulate", "try policies on a workload, in virtual time"),
}
"""Subcommands: the module whose ``main(argv) -> int`` runs each, imported when it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``shoal`` command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A subcommand parses its own arguments, because its parser may need a slow import.
    command = _parser().parse_args(words[:1]).command
    try:
        return int(importlib.import_module(COMMANDS[command][0]).main(words[1:]))
    except UserError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
