"""``shoal bench failures``: kills and stops engines of a node during greedy streams.

It reports how soon the controller knows, how long the engine's streams pause, what becomes of them,
how soon the engine serves again, and for how long no new request could start meanwhile.
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench import one_node
from shoal.loadgen.bench.markdown import MISSING, ms, rows
from shoal.loadgen.bench.measures import metric
from shoal.loadgen.bench.process_memory import name_and_mib, tree
from shoal.loadgen.bench.server_process import ServerProcess, free_port
from shoal.loadgen.bench.system_info import environment
from shoal.loadgen.bench.token_client import Answer, Client, RequestFailedError
from shoal.server.number_options import check_at_least

FAKE_OPTIONS = ("--fake-engine", "--fake-step-ms", "20")
"""Default options of the node: two engines that run no model."""
MODEL = "failing"
VICTIM = 0
"""The engine that fails."""
FAULTS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
MIGRATED = "shoal_requests_migrated_total"

LOOK_SECONDS = 0.01
"""Pause between two looks at the node, and so the resolution of their times."""
PROBE_SECONDS = 0.05
"""Pause between two one-token requests that test whether new requests can start."""
RUN_IN_SECONDS = 1.0
"""From the start of the streams to the fault."""
RECOVERY_SECONDS = 180.0
"""The benchmark fails if an engine does not serve again in this time."""


class Failure(msgspec.Struct, frozen=True):
    """The figures of one fault. Times are in seconds, from the signal unless stated otherwise."""

    fault: str
    detection: float
    """Until the controller no longer counts the engine as serving."""
    interrupted: int
    """Streams that the engine ran."""
    gaps: list[float]
    """The longest pause between two chunks of each interrupted stream that went on."""
    migrated: int
    """Requests put back into the task pool, as the node counts them."""
    failed: int
    """Streams that ended with an error."""
    restart: float
    """Until the engine serves again."""
    whole: float
    """Until every group can be formed again."""
    downtime: float
    """The longest time without a new request's first token, until the engine serves again."""
    forming: float
    """The same after that: while its groups are formed again, the members' steps wait."""


class Failures(msgspec.Struct, frozen=True):
    """The figures of one run."""

    command: list[str]
    environment: dict[str, Any]
    streams: int
    output_tokens: int
    undisturbed: float
    """The longest time without a first token of a new request while nothing failed, seconds."""
    failures: list[Failure]


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench failures`` and return the exit code.

    Raises:
        UserError: an argument is not valid, or the node did not start or recover.
    """
    args, serve_options = _parser().parse_known_args(argv)
    check_at_least(args, 1, "times", "streams", "output_tokens")
    return one_node.run(lambda log: _measure(args, serve_options, log), report, args)


def _parser() -> argparse.ArgumentParser:
    parser = one_node.parser(
        "failures", "Kill and stop an engine of a node under streams.", FAKE_OPTIONS
    )
    add = parser.add_argument
    add("--times", type=int, default=5, help="of each fault (default: %(default)s)")
    add("--streams", type=int, default=8, help="at the same time (default: %(default)s)")
    add("--output-tokens", type=int, default=300, help="of a stream (default: %(default)s)")
    return parser


# --- the run --------------------------------------------------------------------------------------


async def _measure(args: Namespace, serve_options: Sequence[str], log: Path) -> Failures:
    port, admin_port = free_port(), free_port()
    # The limit of restarts in ten minutes must not end a long run.
    own = ("--admin-port", str(admin_port), "--restart-limit", str(len(FAULTS) * args.times))
    command = one_node.serve_command(MODEL, serve_options or FAKE_OPTIONS, port, *own)
    server = ServerProcess(command, log, os.environ)
    url, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
    try:
        async with Client(url, MODEL, admin) as client:
            await server.wait_until_ready(client, "/ready")
            run = _Run(client, server, args.streams, args.output_tokens)
            undisturbed = await run.undisturbed()
            failures = [await run.fail(fault) for fault in FAULTS for _ in range(args.times)]
    finally:
        server.stop()
    return Failures(
        command=one_node.shown(command),
        environment=environment(),
        streams=args.streams,
        output_tokens=args.output_tokens,
        undisturbed=undisturbed,
        failures=failures,
    )


class _Run:
    """The faults of one node, one after the other."""

    def __init__(self, client: Client, server: ServerProcess, streams: int, tokens: int) -> None:
        self._client = client
        self._server = server
        self._streams = streams
        self._tokens = tokens

    async def undisturbed(self) -> float:
        """Return the longest time without a first token while nothing fails."""
        probes = _Probes(self._client)
        start = time.perf_counter()
        answers = await asyncio.gather(*self._start_streams())
        end = time.perf_counter()
        await probes.stop()
        if None in answers:
            raise RequestFailedError("a stream failed before anything was done to the node")
        return longest_pause(probes.firsts, start, end)

    async def fail(self, fault: str) -> Failure:
        """Make the victim fail, and wait until the node is whole again."""
        migrated, restarts = await self._migrated(), (await self._engine())["restarts"]
        probes = _Probes(self._client)
        streams = self._start_streams()
        await asyncio.sleep(RUN_IN_SECONDS)
        sent = time.perf_counter()
        os.kill(engine_process(self._server.pid, VICTIM), FAULTS[fault])
        detection = await self._until(sent, lambda view: not _serves(view, restarts))
        restart = await self._until(sent, lambda view: _serves(view, restarts + 1))
        whole = await self._until(sent, lambda view: not view["unavailable"])
        answers = await asyncio.gather(*streams)
        end = time.perf_counter()
        await probes.stop()
        good = [answer for answer in answers if answer is not None]
        interrupted = [
            answer
            for answer in good
            if answer.ended > sent and str(VICTIM) in (answer.unit or "").split(",")
        ]
        failed = len(answers) - len(good)
        return Failure(
            fault=fault,
            detection=detection,
            interrupted=len(interrupted) + failed,
            gaps=[longest_gap(answer, sent) for answer in interrupted],
            migrated=await self._migrated() - migrated,
            failed=failed,
            restart=restart,
            whole=whole,
            downtime=longest_pause(probes.firsts, sent, sent + restart),
            forming=longest_pause(probes.firsts, sent + restart, end),
        )

    def _start_streams(self) -> list[asyncio.Task[Answer | None]]:
        return [asyncio.create_task(self._stream(number)) for number in range(self._streams)]

    async def _stream(self, number: int) -> Answer | None:
        """Return a greedy stream; None if it failed."""
        try:
            return await self._client.generate(_prompt(number), self._tokens, stream=True)
        except RequestFailedError:
            return None

    async def _engine(self) -> dict[str, Any]:
        return _victim(await self._client.call("GET", "/admin/layout"))

    async def _migrated(self) -> int:
        return int(metric(await self._client.text("/metrics"), MIGRATED))

    async def _until(self, start: float, happened: Callable[[dict[str, Any]], bool]) -> float:
        """Return the time from ``start`` until the node's view satisfies ``happened``.

        Raises:
            RequestFailedError: that takes too long.
        """
        while True:
            view = await self._client.call("GET", "/admin/layout")
            passed = time.perf_counter() - start
            if happened(view):
                return passed
            if passed > RECOVERY_SECONDS:
                raise RequestFailedError(f"engine {VICTIM} is still {_victim(view)['state']}")
            self._server.check_alive()
            await asyncio.sleep(LOOK_SECONDS)


class _Probes:
    """One-token requests at a fixed rate, whatever becomes of the earlier ones.

    Attributes:
        firsts: when each successful request got its token, in ``time.perf_counter`` seconds.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.firsts: list[float] = []
        self._sent: set[asyncio.Task[None]] = set()
        self._sending = asyncio.create_task(self._send())

    async def stop(self) -> None:
        """Stop sending requests, and wait for those that are in progress."""
        self._sending.cancel()
        await asyncio.gather(*self._sent)

    async def _send(self) -> None:
        while True:
            task = asyncio.create_task(self._probe())
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self) -> None:
        try:
            answer = await self._client.generate(_prompt(0), 1)
        except RequestFailedError:
            return  # it did not start, which the pause until the next that does will show
        self.firsts.append(answer.first)


def _prompt(number: int) -> list[int]:
    """Return a prompt of eight token ids that every model knows, different for each stream."""
    return [10 + (number + k) % 64 for k in range(8)]


def _victim(view: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = view["engines"][VICTIM]
    return engine


def _serves(view: dict[str, Any], restarts: int) -> bool:
    """Return whether the victim serves, after exactly this many restarts."""
    engine = _victim(view)
    return bool(engine["state"] == "serving" and engine["restarts"] == restarts)


def engine_process(root: int, engine: int) -> int:
    """Return the process id of an engine's runner, or of the engine if it has no runner.

    Args:
        root: process id of the server.
        engine: number of the engine.

    Raises:
        RequestFailedError: there is none.
    """
    names = {}
    for pid in tree(root):
        found = name_and_mib(pid)
        if found is not None:
            names[found[0]] = pid
    for name in (f"engine {engine} runner", f"engine {engine}"):
        if name in names:
            return names[name]
    raise RequestFailedError(f"engine {engine} has no process")


# --- what comes of it -----------------------------------------------------------------------------


def longest_gap(answer: Answer, since: float) -> float:
    """Return the longest pause of a stream that ended after ``since``."""
    times = [at for at, _ in answer.progress]
    return max((b - a for a, b in pairwise(times) if b > since), default=0.0)


def longest_pause(moments: Iterable[float], start: float, end: float) -> float:
    """Return the longest time between ``start`` and ``end`` in which none of the moments lies."""
    inside = sorted(moment for moment in moments if start < moment < end)
    return max(b - a for a, b in pairwise([start, *inside, end]))


def report(result: Failures) -> str:
    """Return a run as Markdown."""
    title = (
        f"`shoal {' '.join(result.command)}`: {result.streams} greedy streams of "
        f"{result.output_tokens} tokens; times are median / worst, ms"
    )
    body = []
    for fault in dict.fromkeys(each.fault for each in result.failures):
        group = [each for each in result.failures if each.fault == fault]
        body.append(
            [
                *(fault, str(len(group))),
                _two([each.detection for each in group]),
                _two([gap for each in group for gap in each.gaps]),
                *(str(sum(each.interrupted for each in group)),),
                *(str(sum(each.migrated for each in group)),),
                *(str(sum(each.failed for each in group)),),
                _two([each.restart for each in group]),
                _two([each.whole for each in group]),
                _two([each.downtime for each in group]),
                _two([each.forming for each in group]),
            ]
        )
    head = [
        *("fault", "times", "detected after", "streams paused for"),
        *("streams interrupted", "requests migrated", "streams failed"),
        *("engine serves again after", "groups whole after"),
        *("no request started for", "the same from then on"),
    ]
    quiet = f"While nothing fails, no request starts for at most {ms(result.undisturbed)} ms."
    return "\n".join([title, "", *rows(head, body), "", quiet])


def _two(values: Sequence[float]) -> str:
    return f"{ms(statistics.median(values))} / {ms(max(values))}" if values else MISSING
