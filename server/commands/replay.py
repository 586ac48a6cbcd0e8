"""``shoal replay``: send a workload to a server as its users would, and say how it was served."""

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from shoal.loadgen import max_rate, page, text_tables
from shoal.loadgen.client import Client, ClientError, Endpoint, Settings
from shoal.loadgen.counters import Count, compare, read_counters, settled_counters
from shoal.loadgen.open_loop import EventLoopClock, Replay, Run
from shoal.loadgen.progress import StatusLine
from shoal.loadgen.prompts import DEFAULT_TOKEN_IDS, Prompts, text_prompts, token_prompts
from shoal.loadgen.replay_results import Result, encode
from shoal.loadgen.summary import Objective
from shoal.loadgen.validity import MAX_LAG_SECONDS, judge
from shoal.loadgen.workload import Workload
from shoal.server.commands.command_parser import CommandParser
from shoal.server.errors import UserError
from shoal.server.files import write_file
from shoal.server.number_options import flag_of
from shoal.server.options.dataset_options import add_dataset_options, with_dataset
from shoal.server.options.rate_search_options import (
    add_rate_search_options,
    check_search,
    search,
)
from shoal.server.options.workload_options import (
    add_target_option,
    add_workload_options,
    read_objectives,
    read_workload,
)
from shoal.server.word_options import one_of

INVALID_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT


@dataclass(frozen=True)
class Finished:
    """The outcome of a replay."""

    result: Result
    counts: list[Count]
    """The client's totals beside the server's, if ``--check-metrics`` asked for them."""
    uncounted: str | None = None
    """Why there are none although ``--check-metrics`` asked for them."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.result.run.interrupted:
            return INTERRUPTED_EXIT_CODE
        agrees = self.uncounted is None and all(count.agrees for count in self.counts)
        return 0 if self.result.verdict.valid and agrees else INVALID_EXIT_CODE


def main(argv: Sequence[str]) -> int:
    """Run ``shoal replay`` and return the exit code.

    Returns:
        0 after a valid run, 1 after an invalid run or one whose totals differ from the server's,
        130 after a run that was stopped.

    Raises:
        UserError: an argument is not valid, or the server cannot be used.
    """
    args = _parser().parse_args(argv)
    _check(args)
    objectives = read_objectives(args)
    _allow_many_connections()
    try:
        if args.find_max_rate is not None:
            return _find_max_rate(args, objectives)
        finished = uvloop.run(_replay(args, with_dataset(args, read_workload(args))))
    except ClientError as error:
        raise UserError(str(error)) from error
    _print(finished, objectives)
    _write_files(args, finished, objectives)
    return finished.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shoal replay",
        description="Send a workload to an OpenAI-compatible server, each request when it is due.",
    )
    _add_server_options(parser)
    _add_request_options(parser)
    _add_run_options(parser)
    add_target_option(parser)
    add_workload_options(parser)
    add_dataset_options(parser)
    add_rate_search_options(parser)
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    add("--model", metavar="NAME", help="(default: the first that the server names)")
    add("--api-key", metavar="KEY", help="(default: the environment's OPENAI_API_KEY)")
    add(
        "--admin-url",
        metavar="URL",
        help="Shoal's admin API, to draw the layout over time (default: not drawn)",
    )
    add("--admin-key", metavar="KEY", help="its key (default: the environment's SHOAL_ADMIN_KEY)")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--endpoint",
        type=one_of(Endpoint),
        choices=list(Endpoint),
        default=Endpoint.COMPLETIONS,
        help="(default: %(default)s)",
    )
    add("--text-prompts", action="store_true", help="completions of text, not of token ids")
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the model's tokenizer.json, for texts of exact length (default: the server's "
        "/tokenize route)",
    )
    add(
        "--no-extensions",
        action="store_true",
        help="send only what OpenAI's API has: no ignore_eos, no priority",
    )
    add("--deadline-ms", type=int, metavar="MS", help="drop requests that wait longer than this")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for flag, default, unit, text in (
        ("--timeout", 600.0, "S", "give up a response after this time"),
        ("--grace", 5.0, "S", "how long responses may go on after Ctrl-C"),
        ("--max-lag-ms", 1000 * MAX_LAG_SECONDS, "MS", "a run with more lag (p99) is not valid"),
    ):
        said = f"{text} (default: %(default)g)"
        add(flag, type=float, default=default, metavar=unit, help=said)
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="closed loop: N users send one request, or chat, after another (default: open loop)",
    )
    add("--check-metrics", action="store_true", help="compare all totals with the server's metrics")
    add("--name", help="name of the run in reports (default: the workload's)")
    add("--json", type=Path, metavar="FILE", help="write figures and all requests")
    add("--html", type=Path, metavar="FILE", help="write a report with a picture")


def _check(args: Namespace) -> None:
    for name in ("deadline_ms", "timeout", "max_lag_ms", "concurrency"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"{flag_of(name)} {value:g}: it must be more than 0")
    if not args.grace >= 0:
        raise UserError(f"--grace {args.grace:g}: it must not be negative")
    for name in ("base_url", "admin_url"):
        url = getattr(args, name)
        if url is not None and not url.startswith(("http://", "https://")):
            raise UserError(f"{flag_of(name)} {url}: it must begin with http:// or https://")
    for path in (args.json, args.html):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no such directory")


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed: every response takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- the run --------------------------------------------------------------------------------------


async def _replay(args: Namespace, workload: Workload) -> Finished:
    clock = EventLoopClock()
    async with Client(_settings(args), clock.now) as client:
        model = await client.find_model(args.model)
        before = await read_counters(client) if args.check_metrics else None
        prompts = await _prompts(args, client)
        if before is not None and prompts.probes:
            before = await settled_counters(client, prompts.probes, before)
        replay = Replay(
            *(client, prompts, workload, clock),
            grace_seconds=args.grace,
            concurrency=args.concurrency,
        )
        run = await _run(replay)
        counts: list[Count] = []
        uncounted = None
        if before is not None:
            try:
                after = await settled_counters(client, run.exchanges, before)
                counts = compare(run.exchanges, after.since(before))
            except ClientError as error:  # the run has been made: it is reported anyway
                uncounted = str(error)
    result = Result(
        name=args.name or workload.name,
        workload=workload.name,
        endpoint=args.endpoint.path,
        model=model,
        verdict=judge(run, args.max_lag_ms / 1000),
        run=run,
    )
    return Finished(result, counts, uncounted)


def _settings(args: Namespace) -> Settings:
    return Settings(
        base_url=args.base_url,
        endpoint=args.endpoint,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        extensions=not args.no_extensions,
        deadline_ms=args.deadline_ms,
        timeout_seconds=args.timeout,
        admin_url=args.admin_url,
        admin_key=args.admin_key or os.environ.get("SHOAL_ADMIN_KEY"),
    )


async def _prompts(args: Namespace, client: Client) -> Prompts:
    if args.dataset is not None:
        return Prompts(DEFAULT_TOKEN_IDS, args.seed)
    if args.text_prompts or args.endpoint is Endpoint.CHAT:
        return await text_prompts(client, args.seed, args.tokenizer)
    return await token_prompts(client, args.seed)


async def _run(replay: Replay) -> Run:
    """Run to the end or until a signal, with a status line for whoever watches."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, replay.stop)
    status = asyncio.create_task(StatusLine(sys.stderr, replay).show())
    # The garbage collector must not walk through the workload while times are measured.
    gc.collect()
    gc.freeze()
    try:
        return await replay.run()
    finally:
        gc.unfreeze()
        status.cancel()
        await asyncio.wait({status})


def _find_max_rate(args: Namespace, objectives: Sequence[Objective]) -> int:
    """Search for the largest rate, say what was tried, and return the exit code."""
    check_search(args, objectives)
    stopped = False

    async def once(window: Namespace, workload: Workload) -> Result:
        nonlocal stopped
        result = (await _replay(window, workload)).result
        stopped = result.run.interrupted
        print(f"  {window.rate[0]:.2f} requests/s: done", file=sys.stderr)
        return result

    found = uvloop.run(search(args, objectives, once))
    print(max_rate.table(found))
    if args.json is not None:
        content = {"find_max_rate": found, "targets": objectives, "attainment": args.attainment}
        write_file(args.json, msgspec.json.encode(content) + b"\n")
    if stopped:
        return INTERRUPTED_EXIT_CODE
    return 0 if found.kept is not None and not found.problem else INVALID_EXIT_CODE


# --- what comes of it -----------------------------------------------------------------------------


def _print(finished: Finished, objectives: Sequence[Objective]) -> None:
    result = finished.result
    report = result.report(objectives)
    print(result.summary(objectives))
    if len(report.groups) > 1 or report.switching is not None:
        print(f"\n{text_tables.side_by_side([report])}")
    for line in (*result.notes(), *text_tables.counts(finished.counts)):
        print(line)
    if finished.uncounted is not None:
        print(f"the server's counters are not known: {finished.uncounted}")
    verdict = result.verdict
    print(f"sending lagged {verdict.send_lag}; the event loop {verdict.loop_lag}")
    for problem in verdict.problems:
        print(f"INVALID RUN: {problem}")


def _write_files(args: Namespace, finished: Finished, objectives: Sequence[Objective]) -> None:
    result = finished.result
    if args.json is not None:
        content = encode(
            result,
            objectives,
            seed=args.seed,
            rate_scale=args.rate_scale,
            length_scale=args.length_scale,
            concurrency=args.concurrency,
            counts=finished.counts,
        )
        write_file(args.json, content)
    if args.html is not None:
        write_file(args.html, page.page([result], objectives).encode())
