"""``shoal run-batch``: a file of requests in, a file of answers out, as with ``vllm run-batch``."""

import argparse
import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.server.batch.file_job import FileJob
from shoal.server.batch.line_sender import LineSender, NoAnswerError
from shoal.server.commands.command_parser import CommandParser
from shoal.server.errors import UserError
from shoal.server.gate.priority_and_deadline import PRIORITY_HEADER, PRIORITY_LIMIT

API_KEY_VARIABLE = "OPENAI_API_KEY"
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
_ADDRESS = re.compile(r"Shoal serves .* on (https?://[^\s\"]+)")
_PR_SET_PDEATHSIG = 1
_END_SECONDS = 60.0


def main(argv: Sequence[str]) -> int:
    """Run ``shoal run-batch`` and return the exit code.

    Returns:
        0 when every line has its result, 130 after a run that was stopped.

    Raises:
        UserError: an argument or the input is not valid, or the server has ended.
    """
    args, serve_options = _parser().parse_known_args(argv)
    if args.url is not None and serve_options:
        raise UserError(f"{serve_options[0]}: with --url no server is started")
    if args.url is not None and not args.url.startswith(("http://", "https://")):
        raise UserError(f"--url {args.url}: it must begin with http:// or https://")
    named = filter(None, (args.input_file, args.output_file, args.error_file))
    files = [path.resolve() for path in named]
    if len(set(files)) < len(files):
        raise UserError("-i, -o and -e: each must be a file of its own")
    with _progress() as show:
        job = FileJob(args.input_file, args.output_file, args.error_file, show)
        job.prepare()
        try:
            _run(args, serve_options, job)
        except KeyboardInterrupt:
            print("shoal: stopped: the same command goes on with the rest", file=sys.stderr)
            return INTERRUPTED_EXIT_CODE
        job.finish()
    answers, failures = job.results.completed, job.results.failed
    print(f"{answers} answers, {failures} failures: {args.output_file}", file=sys.stderr)
    return 0


def _run(args: Namespace, serve_options: Sequence[str], job: FileJob) -> None:
    key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    headers = {PRIORITY_HEADER: str(PRIORITY_LIMIT)}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if args.url is not None:
        asyncio.run(_work(args.url, headers, job, lambda: True))
        return
    with _served(serve_options) as (url, is_alive):
        asyncio.run(_work(url, headers, job, is_alive))


async def _work(
    url: str, headers: dict[str, str], job: FileJob, is_alive: Callable[[], bool]
) -> None:
    async with LineSender(url.rstrip("/").removesuffix("/v1"), headers=headers) as sender:
        try:
            # Later on, lines are sent again until the server is back; now the address may be wrong.
            await sender.get("/health")
        except NoAnswerError as error:
            raise UserError(f"cannot reach {url}: {error}") from error
        await job.work(sender, is_alive)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Show a progress bar on stderr."""
    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed")),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("run-batch", total=None, failed=0)

        def show(completed: int, failed: int, total: int) -> None:
            bar.update(task, completed=completed + failed, total=total, failed=failed)

        yield show


@contextmanager
def _served(options: Sequence[str]) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Run a node of its own for as long as the context lasts; its output goes to stderr.

    Yields:
        Its URL, and a function that says whether it runs.

    Raises:
        UserError: it does not start.
    """
    command = [sys.executable, "-m", "shoal.server.commands.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # this process ends it, not the terminal
        preexec_fn=partial(_end_with, os.getpid()),
    )
    assert process.stdout is not None
    copying = threading.Thread(target=_copy, args=(process.stdout,), daemon=True)
    try:
        url = _address(process)
        copying.start()
        yield url, lambda: process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if copying.is_alive():
            copying.join(_END_SECONDS)
        process.stdout.close()


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        found = _ADDRESS.search(line)
        if found is not None:
            return found[1]
    raise UserError(f"the server has not started: exit code {process.wait()}")


def _copy(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(line)


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shoal run-batch",
        usage="shoal run-batch -i IN -o OUT [--url URL | MODEL and options of 'shoal serve']",
        description="Answer a file of requests in the format of 'vllm run-batch'. Stopped or "
        "killed, the same command goes on with the lines that have no result.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-i", "--input-file", type=Path, required=True, metavar="IN", help="file of requests")
    add("-o", "--output-file", type=Path, required=True, metavar="OUT", help="file of results")
    add(
        *("-e", "--error-file"),
        type=Path,
        metavar="FILE",
        help="file of the lines without an answer (default: they are in OUT, too)",
    )
    add(
        "--url",
        help="a running server, such as http://127.0.0.1:8000 (default: a server is started for "
        "the job, with all other options)",
    )
    add("--api-key", metavar="KEY", help=f"key of that server (default: ${API_KEY_VARIABLE})")
    return parser
