"""Replays an open-loop workload on one system, and returns the load generator's figures."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.loadgen.bench.measures import FIRST_TOKEN_ID, POLL_SECONDS, SMALLEST_VOCABULARY, switch
from shoal.loadgen.bench.systems import SERVED_NAME, System
from shoal.loadgen.bench.token_client import Client, RequestFailedError
from shoal.loadgen.client import Client as LoadClient
from shoal.loadgen.client import Settings as LoadSettings
from shoal.loadgen.exchange import tokens_by_second
from shoal.loadgen.open_loop import EventLoopClock, Replay, Run
from shoal.loadgen.prompts import Prompts
from shoal.loadgen.summary import Distribution, Record, grouped, peak
from shoal.loadgen.workload import Workload
from shoal.policies.static import MANUAL

WARM_UP_REQUESTS = 8
PATIENCE_SECONDS = 10.0


async def serve_workload(
    client: Client, system: System, workload: Workload, policy: str
) -> dict[str, Any]:
    """Send a workload to a system, to Shoal under ``policy``, and return the figures.

    Raises:
        RequestFailedError: a request did not get all of its tokens.
    """
    await _warm_up(client)
    if system.switches:
        await client.call("POST", "/admin/policy", {"policy": policy})
    run = await replay(client, workload)
    if system.switches:
        await take_back(client, system)
    return _figures(run)


async def replay(client: Client, workload: Workload, *, seed: int = 0) -> Run:
    """Send a workload to a server, with prompts drawn from ``seed``, and return what became of it.

    The replay ends when the last response has ended.
    """
    settings = LoadSettings(client.address, admin_url=client.admin)
    ids = range(FIRST_TOKEN_ID, SMALLEST_VOCABULARY)
    clock = EventLoopClock()
    async with LoadClient(settings, clock.now) as load_client:
        load_client.model = SERVED_NAME
        return await Replay(load_client, Prompts(ids, seed), workload, clock).run()


async def take_back(client: Client, system: System) -> None:
    """Stop the policy, and return to the system's first layout.

    Raises:
        RequestFailedError: a switch that the policy began does not end in time.
    """
    await client.call("POST", "/admin/policy", {"policy": MANUAL.name})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            await switch(client, system.layouts[0], "sequential")
            return
        except RequestFailedError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _warm_up(client: Client) -> None:
    prompt = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + 16)
    await asyncio.gather(*(client.generate(prompt, 4) for _ in range(WARM_UP_REQUESTS)))


def check_answered(run: Run) -> None:
    """Refuse a run in which not every request got all of its tokens.

    Raises:
        RequestFailedError: one did not.
    """
    failed = [e for e in run.exchanges if e.outcome != "ok"]
    if failed:
        raise RequestFailedError(
            f"{len(failed)} of {run.planned} requests failed, the first: "
            f"{failed[0].outcome} {failed[0].error}"
        )


def _figures(run: Run) -> dict[str, Any]:
    check_answered(run)
    return {"groups": groups([exchange.record() for exchange in run.exchanges]), **of_node(run)}


def of_node(run: Run) -> dict[str, Any]:
    """Return a run's figures of the node and the client that do not depend on single requests."""
    return {
        "peak_throughput": peak(tokens_by_second(run.exchanges)),
        "seconds": run.duration,
        "latest_request": max((exchange.lag for exchange in run.exchanges), default=0.0),
        "client_lag": asdict_or_none(Distribution.of(run.loop_lags)),
        "switching": asdict_or_none(run.log.switching()),
        "layouts": Counter(exchange.layout or "-" for exchange in run.exchanges),
    }


def groups(records: Sequence[Record]) -> dict[str, Any]:
    """Return TTFT and TPOT of all requests, and of each phase and priority if there are several."""
    return {
        name: {
            "requests": len(group),
            "ttft": asdict_or_none(Distribution.of(t for r in group if (t := r.ttft) is not None)),
            "tpot": asdict_or_none(Distribution.of(t for r in group if (t := r.tpot) is not None)),
        }
        for name, group in grouped(records).items()
    }


def asdict_or_none(value: Any) -> dict[str, Any] | None:
    """Return a dataclass's fields; None for None."""
    return None if value is None else asdict(value)
