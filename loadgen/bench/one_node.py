"""What the benchmarks of one node share: ``overload`` and ``failures``."""

import argparse
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from shoal.loadgen.bench.server_process import ServerFailedError
from shoal.loadgen.bench.token_client import RequestFailedError
from shoal.server.errors import UserError
from shoal.server.files import write_file

T = TypeVar("T")


def parser(name: str, does: str, node: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all of these benchmarks have.

    Args:
        name: the benchmark's name.
        does: one sentence that says what it does.
        node: options of ``shoal serve`` if the user gives none.
    """
    default = f" (default: {' '.join(node)})" if node else ""
    found = argparse.ArgumentParser(
        prog=f"shoal bench {name}",
        description=f"{does} Other options are those of 'shoal serve'{default}.",
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return found


def serve_command(model: str, options: Sequence[str], port: int, *own: str) -> list[str]:
    """Return the command that serves ``model`` on ``port``, with the benchmark's own options."""
    return [
        *(sys.executable, "-m", "shoal.server.commands.cli", "serve", *options),
        *("--port", str(port), "--served-model-name", model, "--disable-uvicorn-access-log", *own),
    ]


def shown(command: Sequence[str]) -> list[str]:
    """Return the words of a ``serve_command`` that a user would type after ``shoal``."""
    return list(command[3:])


def run(
    measure: Callable[[Path], Coroutine[Any, Any, T]], report: Callable[[T], str], args: Namespace
) -> int:
    """Measure, print the report, and write the figures if asked to; return the exit code.

    Args:
        measure: takes the measures; it is given the file for the node's log.
        report: makes Markdown of the results.
        args: the parsed arguments.

    Raises:
        UserError: the node did not start, or failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            result = uvloop.run(measure(Path(directory) / "server.log"))
        except (ServerFailedError, RequestFailedError) as error:
            raise UserError(str(error)) from error
    print(report(result))
    if args.json is not None:
        write_file(args.json, msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return 0
