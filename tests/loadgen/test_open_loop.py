"""Requests are sent when they are due, lag is noticed, and a run that is stopped still reports."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from shoal.loadgen.client import Client, Endpoint, Settings
from shoal.loadgen.exchange import Outcome
from shoal.loadgen.open_loop import Replay, Run
from shoal.loadgen.prompts import Prompts
from shoal.loadgen.validity import judge
from shoal.loadgen.workload import Arrival, Message, Workload, chat_of
from tests.loadgen.stand_in import Clock, StandIn, events, stand_in, stream, token

WORKLOAD = Workload("w", tuple(Arrival(float(k), 4, 2) for k in range(5)))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[StandIn]:
    async with stand_in() as running:
        yield running


class Running:
    """A replay of ``WORKLOAD`` that has begun."""

    def __init__(self, server: StandIn, clock: Clock, grace_seconds: float = 60.0) -> None:
        self.client = Client(Settings(server.url), clock.now)
        self.replay = Replay(
            self.client, Prompts(range(9), 0), WORKLOAD, clock, grace_seconds=grace_seconds
        )

    async def end(self) -> Run:
        async with self.client:
            return await self.replay.run()


async def test_every_request_is_sent_when_it_is_due(server: StandIn) -> None:
    run = await Running(server, Clock()).end()
    assert [exchange.sent for exchange in run.exchanges] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert run.outcomes() == {"ok": 5}
    assert run.unsent == 0
    assert [len(body["prompt"]) for body, _ in server.requests] == [4] * 5


async def test_no_request_waits_for_another(server: StandIn) -> None:
    together = asyncio.Barrier(len(WORKLOAD.arrivals))

    async def wait_for_all(request: web.Request) -> web.StreamResponse:
        await together.wait()
        return await stream(request, *events(4, 2))

    server.answer = wait_for_all
    assert (await Running(server, Clock()).end()).outcomes() == {"ok": 5}


@pytest.mark.parametrize(("late", "valid"), [(0.04, True), (0.06, False)])
async def test_a_run_that_sends_late_is_not_valid(
    server: StandIn, late: float, valid: bool
) -> None:
    run = await Running(server, Clock(late)).end()
    # Lateness does not add up: each request is due at its own time.
    assert [exchange.lag for exchange in run.exchanges] == pytest.approx([late] * 5)
    verdict = judge(run)
    assert verdict.send_lag.max == pytest.approx(late)
    assert verdict.valid is valid
    assert all("sending lagged" in problem for problem in verdict.problems)
    assert judge(run, max_lag_seconds=0.1).valid


async def test_the_event_loops_own_lag_is_taken(server: StandIn) -> None:
    clock = Clock(tick_lags=[0.01, 0.0, 0.07])

    async def slow(request: web.Request) -> web.StreamResponse:
        # The last request has been sent: time goes on with the ticks alone.
        if len(server.requests) == len(WORKLOAD.arrivals):
            clock.tick()
        await clock.ticked.wait()
        return await stream(request, *events(4, 2))

    server.answer = slow
    run = await Running(server, clock).end()
    # The first began before the requests were sent: what they took is none of its lag.
    assert run.loop_lags[1:] == pytest.approx([0.0, 0.07])


@pytest.mark.parametrize(("lag", "valid"), [(0.04, True), (0.06, False)])
async def test_a_run_whose_event_loop_lags_is_not_valid(
    server: StandIn, lag: float, valid: bool
) -> None:
    run = await Running(server, Clock()).end()
    run.loop_lags = [0.0] * 97 + [lag] * 3
    assert judge(run).valid is valid
    assert all("event loop lagged: its p99" in problem for problem in judge(run).problems)


async def test_lag_is_compared_with_what_is_measured(server: StandIn) -> None:
    run = await Running(server, Clock()).end()
    run.loop_lags = [0.002] * 100
    for exchange in run.exchanges:
        assert exchange.sent is not None
        exchange.chunk_times = [exchange.sent + 0.03]
    assert judge(run).valid
    for exchange in run.exchanges:
        assert exchange.sent is not None
        exchange.chunk_times = [exchange.sent + 0.015]
    assert "a tenth of the median TTFT" in judge(run).problems[0]


async def test_a_run_without_success_is_not_valid(server: StandIn) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503)

    server.answer = refuse
    run = await Running(server, Clock()).end()
    assert run.outcomes() == {"refused_503": 5}
    assert judge(run).problems == ("no request succeeded",)


async def test_after_a_stop_running_requests_may_end(server: StandIn) -> None:
    stopped = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(server.requests) == 2:
            running.replay.stop()
            stopped.set()
        await stopped.wait()
        return await stream(request, *events(4, 2))

    server.answer = answer
    running = Running(server, Clock(sends=2))
    run = await running.end()
    assert run.interrupted
    assert run.outcomes() == {"ok": 2}
    assert run.unsent == 3
    assert judge(run).problems == ("it was stopped, with 3 requests not sent",)


async def test_what_outlasts_the_grace_is_cancelled(server: StandIn) -> None:
    run = await stop_with_requests_that_never_end(server, grace_seconds=0.0, stops=1)
    assert run.outcomes() == {"cancelled": 2}


async def test_the_second_stop_ends_the_grace(server: StandIn) -> None:
    run = await stop_with_requests_that_never_end(server, grace_seconds=3600.0, stops=2)
    assert run.outcomes() == {"cancelled": 2}
    assert {exchange.outcome for exchange in run.exchanges} == {Outcome.CANCELLED}


async def stop_with_requests_that_never_end(
    server: StandIn, grace_seconds: float, stops: int
) -> Run:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = await stream(request, token())
        if len(server.requests) == 2:
            for _ in range(stops):
                running.replay.stop()
        await asyncio.Event().wait()
        return response

    server.answer = answer
    running = Running(server, Clock(sends=2), grace_seconds)
    return await running.end()


async def test_the_layout_is_seen_over_time(server: StandIn) -> None:
    units = [[0], [1]]
    switches: list[dict[str, object]] = [switch(1)]

    async def layout(_: web.Request) -> web.Response:
        shown = {"units": [{"engines": unit} for unit in units], "switches": switches, "more": 1}
        return web.json_response(shown)

    async def answer(request: web.Request) -> web.StreamResponse:
        units[:] = [[0, 1]]
        switches[:] = [switch(1), switch(2), switch(3, outcome="failed")]
        return await stream(request, *events(4, 2))

    server.routes["/admin/layout"] = layout
    server.answer = answer
    run = await Running(server, Clock()).end()
    assert [units for _, units in run.log.layouts] == [[[0], [1]], [[0, 1]]]
    switching = run.log.switching()
    assert switching is not None
    # What was before the run is not the run's.
    assert (switching.switches, switching.failed) == (2, 1)
    assert switching.seconds == pytest.approx(0.2)
    assert (switching.paused, switching.moved, switching.carried) == (4, 2, 6)


def switch(epoch: int, outcome: str = "done") -> dict[str, object]:
    requests = {"paused": 2, "resumed": 0, "drained": 0, "moved": 1, "carried": 3}
    return {
        "epoch": epoch,
        "at": 1.0,
        "outcome": outcome,
        "duration_seconds": 0.1,
        "requests": requests,
    }


async def test_other_servers_have_no_layout(server: StandIn) -> None:
    run = await Running(server, Clock()).end()
    assert run.log.switching() is None
    assert run.log.layouts == []


# --- closed loop, chats ---


async def replay(
    server: StandIn, workload: Workload, clock: Clock, concurrency: int | None = None
) -> Run:
    client = Client(Settings(server.url), clock.now)
    async with client:
        made = Replay(client, Prompts(range(9), 0), workload, clock, concurrency=concurrency)
        return await made.run()


async def test_a_closed_loop_has_as_many_requests_as_users(server: StandIn) -> None:
    """Two of five are there at once: a third is sent only when one of them has its answer."""
    pairs, most, here = asyncio.Barrier(2), 0, 0

    async def wait_for_the_other(request: web.Request) -> web.StreamResponse:
        nonlocal most, here
        here += 1
        most = max(most, here)
        await pairs.wait()
        here -= 1
        return await stream(request, *events(4, 2))

    server.answer = wait_for_the_other
    four = Workload("w", WORKLOAD.arrivals[:4])
    run = await replay(server, four, Clock(), concurrency=2)
    assert (most, run.outcomes(), run.unsent) == (2, {"ok": 4}, 0)
    # Nobody waits for the times of an open loop, and nobody is late.
    assert {exchange.sent for exchange in run.exchanges} == {0.0}
    assert {exchange.lag for exchange in run.exchanges} == {0.0}


async def test_a_turn_is_sent_some_time_after_the_answer_before(server: StandIn) -> None:
    clock = Clock()

    async def answer_after_ten_seconds(request: web.Request) -> web.StreamResponse:
        clock.time += 10.0
        return await stream(request, *events(4, 2))

    server.answer = answer_after_ten_seconds
    chat = chat_of([Arrival(1.0, 4, 2), Arrival(3.0, 6, 2), Arrival(0.5, 8, 2)])
    run = await replay(server, Workload("w", (chat,)), clock)
    assert [exchange.sent for exchange in run.exchanges] == [1.0, 14.0, 24.5]
    assert [exchange.lag for exchange in run.exchanges] == [0.0] * 3
    assert [len(body["prompt"]) for body, _ in server.requests] == [4, 6, 8]


async def test_a_chat_ends_with_a_turn_that_fails(server: StandIn) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503)

    server.answer = refuse
    chat = chat_of([Arrival(0.0, 4, 2), Arrival(0.0, 6, 2)])
    run = await replay(server, Workload("w", (chat, Arrival(1.0, 4, 2))), Clock())
    assert (run.planned, len(run.exchanges), run.unsent) == (3, 2, 1)


async def test_what_is_to_be_sent_may_be_given(server: StandIn) -> None:
    said = (Message("system", "Be short."), Message("user", "Hello"))

    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events(7, 2))

    server.answer = answer
    clock = Clock()
    client = Client(Settings(server.url, endpoint=Endpoint.CHAT), clock.now)
    async with client:
        workload = Workload("w", (Arrival(0.0, 0, 2, content=said),))
        run = await Replay(client, Prompts(range(9), 0), workload, clock).run()
    ((body, _),) = server.requests
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
    ]
    (exchange,) = run.exchanges
    assert exchange.arrival.content is None, "results do not repeat the dataset"
    assert (exchange.counted_prompt, list(exchange.flaws())) == (7, [])
