"""``shoal bench overload``: sends a node many times the requests that it can serve.

First it measures the node's capacity with as many clients as requests may wait; each client asks
again when it is answered. Then requests come at many times that rate, whatever becomes of them (an
open loop). It reports how soon refusals are answered, how soon the other requests begin, how the
memory of every process grows, and how soon requests are no longer refused.
"""

import argparse
import asyncio
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench import one_node
from shoal.loadgen.bench.markdown import ms, number, rows
from shoal.loadgen.bench.process_memory import Growth, MemoryLog
from shoal.loadgen.bench.server_process import ServerProcess, free_port
from shoal.loadgen.bench.system_info import environment
from shoal.loadgen.bench.token_client import Client
from shoal.loadgen.client import Client as LoadClient
from shoal.loadgen.client import Settings
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.open_loop import Clock, EventLoopClock, Replay, Run
from shoal.loadgen.prompts import DEFAULT_TOKEN_IDS, Prompts
from shoal.loadgen.shapes import Lengths, make_up
from shoal.loadgen.summary import Distribution
from shoal.loadgen.validity import judge
from shoal.loadgen.workload import Arrival
from shoal.server.errors import UserError
from shoal.server.number_options import check_positive

FAKE_OPTIONS = ("--fake-engine", "--fake-step-ms", "20", "--max-num-seqs", "8")
"""Default options of the node: two engines that run no model."""
MODEL = "overloaded"
CAPACITY_SECONDS = 10.0
"""How long the capacity is measured; the first fifth does not count."""
PROBE_SECONDS = 0.02
"""Pause between two requests that test whether the node accepts requests again."""
SAMPLE_SECONDS = 1.0


class Overload(msgspec.Struct, frozen=True):
    """The figures of one run. Times are in seconds."""

    command: list[str]
    environment: dict[str, Any]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    most_waiting: int
    """Requests that may wait in the task pool."""
    capacity: float
    """Requests per second that the node finishes."""
    offered: float
    """Requests per second that came."""
    outcomes: dict[str, int]
    refused: dict[str, float] | None
    """Time from sending a request to the end of its refusal."""
    ttft: dict[str, float] | None
    """TTFT of the requests that were not refused."""
    recovery: float
    """From the end of the load to the sending of the first request that was not refused."""
    memory: list[Growth]
    problems: list[str]
    """Why the figures may show the load generator, not the node."""

    @property
    def wait_bound(self) -> float:
        """How long a full pool takes to empty."""
        return self.most_waiting / self.capacity if self.capacity else 0.0


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench overload`` and return the exit code.

    Raises:
        UserError: an argument is not valid, or the node did not start.
    """
    args, serve_options = _parser().parse_known_args(argv)
    check_positive(args, "seconds", "times", "waiting", "prompt_tokens", "output_tokens")
    return one_node.run(lambda log: _measure(args, serve_options, log), report, args)


def _parser() -> argparse.ArgumentParser:
    parser = one_node.parser("overload", "Ask a node for many times what it can do.", FAKE_OPTIONS)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of overload (default: %(default)g)")
    add("--times", type=float, default=10.0, help="what the node can do (default: %(default)g)")
    add("--waiting", type=int, default=32, help="requests that may wait (default: %(default)s)")
    add("--prompt-tokens", type=int, default=32, help="(default: %(default)s)")
    add("--output-tokens", type=int, default=64, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of the arrivals (default: %(default)s)")
    return parser


# --- the run --------------------------------------------------------------------------------------


async def _measure(args: Namespace, serve_options: Sequence[str], log: Path) -> Overload:
    port = free_port()
    own = ("--admin-port", "off", "--max-waiting-requests", str(args.waiting))
    command = one_node.serve_command(MODEL, serve_options or FAKE_OPTIONS, port, *own)
    url = f"http://127.0.0.1:{port}"
    server = ServerProcess(command, log, os.environ)
    try:
        async with Client(url, MODEL) as client:
            await server.wait_until_ready(client, "/ready")
        clock = EventLoopClock()
        async with LoadClient(Settings(url), clock.now) as load_client:
            load_client.model = MODEL
            return await _overload(args, load_client, clock, server, one_node.shown(command))
    finally:
        server.stop()


async def _overload(
    args: Namespace,
    client: LoadClient,
    clock: Clock,
    server: ServerProcess,
    command: list[str],
) -> Overload:
    prompts = Prompts(DEFAULT_TOKEN_IDS, args.seed)
    one = Arrival(0.0, args.prompt_tokens, args.output_tokens)
    capacity = await measure_capacity(client, prompts, one, args.waiting, clock)
    workload = make_up(
        "poisson",
        args.seed,
        seconds=args.seconds,
        lengths=Lengths((one.prompt_tokens,) * 2, (one.output_tokens,) * 2),
        rate=args.times * capacity,
    )
    memory = MemoryLog(server.pid)
    sampling = asyncio.create_task(_sample(memory, clock))
    replay = Replay(client, prompts, workload, clock)
    running = asyncio.create_task(replay.run())
    await clock.sleep(args.seconds)
    recovery = await recovery_seconds(client, prompts, one, clock, server.check_alive)
    run = await running
    sampling.cancel()
    server.check_alive()
    return Overload(
        command=command,
        environment=environment(),
        seconds=args.seconds,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        most_waiting=args.waiting,
        capacity=capacity,
        offered=len(run.exchanges) / args.seconds,
        outcomes=run.outcomes(),
        refused=_quantiles(refusal_times(run)),
        ttft=_quantiles(first_token_times(run)),
        recovery=recovery,
        memory=memory.growth(),
        problems=list(judge(run).problems),
    )


async def measure_capacity(
    client: LoadClient, prompts: Prompts, one: Arrival, clients: int, clock: Clock
) -> float:
    """Return the requests per second that a server finishes for clients that never pause.

    Raises:
        UserError: a request failed, or none was finished.
    """
    ends: list[float] = []
    outcomes: Counter[Outcome] = Counter()
    start = clock.now()

    async def ask(which: int) -> None:
        while clock.now() < start + CAPACITY_SECONDS:
            exchange = await _send(client, prompts, one, which)
            outcomes[exchange.outcome] += 1
            ends.append(clock.now() - start)

    await asyncio.gather(*(ask(which) for which in range(clients)))
    if set(outcomes) != {Outcome.OK}:
        raise UserError(f"the node did not answer all of {clients} clients: {dict(outcomes)}")
    counted = [end for end in ends if CAPACITY_SECONDS / 5 <= end < CAPACITY_SECONDS]
    if not counted:
        raise UserError(f"the node finished no request in {CAPACITY_SECONDS:g} s: ask for less")
    return len(counted) / (CAPACITY_SECONDS * 4 / 5)


async def recovery_seconds(
    client: LoadClient,
    prompts: Prompts,
    one: Arrival,
    clock: Clock,
    check_alive: Callable[[], None],
) -> float:
    """Return the seconds until the server accepts a request again.

    Args:
        client: the client of the server.
        prompts: make the requests' prompts.
        one: the request to send.
        clock: the client's clock.
        check_alive: raises if the server has ended.
    """
    start = clock.now()
    while True:
        check_alive()
        sent = clock.now()
        exchange = await _send(client, prompts, one, which=0)
        if exchange.status == HTTPStatus.OK:
            return sent - start
        await clock.sleep(PROBE_SECONDS)


async def _send(client: LoadClient, prompts: Prompts, one: Arrival, which: int) -> Exchange:
    exchange = Exchange(which, one)
    await client.send(exchange, client.body(prompts.make(which, one), one.output_tokens))
    return exchange


async def _sample(memory: MemoryLog, clock: Clock) -> None:
    start = clock.now()
    while True:
        memory.sample(clock.now() - start)
        await clock.sleep(SAMPLE_SECONDS)


# --- what comes of it -----------------------------------------------------------------------------


def refusal_times(run: Run) -> list[float]:
    """Return how long each refusal took, from sending the request to its last byte."""
    return [
        exchange.ended - exchange.sent
        for exchange in run.exchanges
        if exchange.outcome is Outcome.REFUSED_503
        and exchange.sent is not None
        and exchange.ended is not None
    ]


def first_token_times(run: Run) -> list[float]:
    """Return the TTFT of each request that was not refused."""
    times = [exchange.record().ttft for exchange in run.exchanges]
    return [time for time in times if time is not None]


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    found = Distribution.of(values)
    return None if found is None else {"p50": found.p50, "p99": found.p99, "max": max(values)}


def report(result: Overload) -> str:
    """Return a run as Markdown."""
    refused, ttft = result.refused or {}, result.ttft or {}
    figures = [
        ("capacity, requests/s", number(result.capacity)),
        ("offered, requests/s", number(result.offered)),
        ("outcomes", ", ".join(f"{name} {count}" for name, count in result.outcomes.items())),
        ("refused after, p50 / p99 / max ms", _three(refused)),
        ("TTFT of the others, p50 / p99 / max ms", _three(ttft)),
        ("a full pool empties in, ms", ms(result.wait_bound)),
        ("first request taken again after, ms", ms(result.recovery)),
    ]
    memory = [
        [
            each.process,
            *(number(v) for v in (each.first_mib, each.peak_mib, each.last_mib)),
            f"{each.slope_mib_per_minute:+.2f}",
        ]
        for each in result.memory
    ]
    title = (
        f"`shoal {' '.join(result.command)}`: {result.seconds:g} s, requests of "
        f"{result.prompt_tokens} + {result.output_tokens} tokens"
    )
    lines = [
        *(title, ""),
        *rows(["figure", "value"], figures),
        "",
        *rows(["process", "first MiB", "peak", "last", "slope, MiB/min"], memory),
        *(f"\nINVALID RUN: {problem}" for problem in result.problems),
    ]
    return "\n".join(lines)


def _three(quantiles: dict[str, float]) -> str:
    return " / ".join(ms(quantiles.get(name)) for name in ("p50", "p99", "max"))
