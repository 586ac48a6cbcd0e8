"""Stock vLLM's own server in a process of its own: what Shoal's answers are compared with."""

import asyncio
import inspect
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests import preloaded

_READY = "Application startup complete"
"""What uvicorn says when requests are taken."""
_OPTIONS = ("--disable-uvicorn-access-log",)
"""Nobody reads its log once it is ready."""


def count_ranks_uncompiled() -> None:
    """Have vLLM compile nothing, in this process and its forks: a compiler would take most time."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)


def serve(arguments: list[str]) -> int:
    """Be ``vllm serve``, as ``api_server.entry.main`` is, in a process that has vLLM imported."""
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    # On CPUs its engine and this one's worker are new processes, which would import vLLM again.
    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    count_ranks_uncompiled()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    asyncio.run(run_server(args))
    return 0


@contextmanager
def stock_server(directory: Path, *arguments: str) -> Iterator[httpx.AsyncHTTPTransport]:
    """Run the server for as long as the block lasts; yields the way to it.

    Args:
        directory: for its socket and its temporary files.
        arguments: those of ``vllm serve``.
    """
    address = str(directory / "stock.sock")
    process = preloaded.Process(
        f"{__name__}:{serve.__name__}",
        [["--uds", address, *_OPTIONS, *arguments]],
        {**os.environ, "TMPDIR": str(directory)},
    )
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if _READY in line:
                break
        else:
            raise AssertionError("".join(lines)[-4000:])
        yield httpx.AsyncHTTPTransport(uds=address)
    finally:
        process.send_signal(signal.SIGTERM)  # its engine is a process of its own, which it ends
        process.communicate(timeout=240)
