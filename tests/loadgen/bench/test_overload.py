"""The overload benchmark against a server that the test decides about."""

from typing import Any

import pytest
from aiohttp import web

from shoal.loadgen.bench.overload import (
    CAPACITY_SECONDS,
    Overload,
    first_token_times,
    main,
    measure_capacity,
    recovery_seconds,
    refusal_times,
    report,
)
from shoal.loadgen.bench.process_memory import Growth
from shoal.loadgen.client import Client, Settings
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.open_loop import Run
from shoal.loadgen.prompts import DEFAULT_TOKEN_IDS, Prompts
from shoal.loadgen.workload import Arrival
from shoal.server.errors import UserError
from tests.loadgen.stand_in import complete, stand_in

ONE = Arrival(0.0, 4, 2)
PROMPTS = Prompts(DEFAULT_TOKEN_IDS, 0)


class Clock:
    """A clock that every request moves on by ``step`` seconds, and every pause by its length."""

    def __init__(self, step: float) -> None:
        self.time = 0.0
        self._step = step

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.time += self._step
        return await complete(request)


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full"}}, status=503)


async def test_the_capacity_is_what_is_finished_without_a_pause() -> None:
    clock = Clock(step=0.5)
    async with stand_in() as server, Client(Settings(server.url), clock.now) as client:
        server.answer = clock.answer
        capacity = await measure_capacity(client, PROMPTS, ONE, 1, clock)
    assert capacity == pytest.approx(2.0, abs=0.2)
    assert clock.time == pytest.approx(CAPACITY_SECONDS)


async def test_a_node_that_refuses_its_clients_has_no_capacity_to_speak_of() -> None:
    clock = Clock(step=5.0)

    async def refuse_in_time(request: web.Request) -> web.StreamResponse:
        clock.time += 5.0
        return await refuse(request)

    async with stand_in() as server, Client(Settings(server.url), clock.now) as client:
        server.answer = refuse_in_time
        with pytest.raises(UserError, match="refused_503"):
            await measure_capacity(client, PROMPTS, ONE, 2, clock)


async def test_a_node_too_slow_to_finish_a_request_has_no_capacity_to_speak_of() -> None:
    clock = Clock(step=CAPACITY_SECONDS + 1.0)
    async with stand_in() as server, Client(Settings(server.url), clock.now) as client:
        server.answer = clock.answer
        with pytest.raises(UserError, match="no request in 10 s"):
            await measure_capacity(client, PROMPTS, ONE, 1, clock)


async def test_recovery_is_the_time_to_the_first_request_that_is_taken() -> None:
    clock = Clock(step=0.0)
    refusals = iter(range(3))
    alive: list[None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (complete if next(refusals, None) is None else refuse)(request)

    async with stand_in() as server, Client(Settings(server.url), clock.now) as client:
        server.answer = answer
        seconds = await recovery_seconds(client, PROMPTS, ONE, clock, lambda: alive.append(None))
    assert seconds == pytest.approx(0.06)
    assert len(alive) == 4


def exchange(outcome: Outcome, sent: float, ended: float, first: float | None) -> Exchange:
    times = [] if first is None else [first]
    return Exchange(0, ONE, sent=sent, ended=ended, outcome=outcome, chunk_times=times)


def test_refusals_and_answers_are_kept_apart() -> None:
    run = Run(
        [
            exchange(Outcome.REFUSED_503, 1.0, 1.25, None),
            exchange(Outcome.OK, 1.0, 9.0, 3.0),
            exchange(Outcome.CONNECTION_ERROR, 1.0, 1.5, None),
        ]
    )
    assert refusal_times(run) == [0.25]
    assert first_token_times(run) == [2.0]


def result(**other: Any) -> Overload:
    fields: dict[str, Any] = {
        "command": ["serve", "--fake-engine"],
        "environment": {},
        "seconds": 60.0,
        "prompt_tokens": 32,
        "output_tokens": 64,
        "most_waiting": 32,
        "capacity": 16.0,
        "offered": 160.0,
        "outcomes": {"ok": 3, "refused_503": 7},
        "refused": {"p50": 0.001, "p99": 0.0125, "max": 0.1},
        "ttft": None,
        "recovery": 0.25,
        "memory": [Growth("front end 0", 612.5, 600.0, 612.0, 0.5, 7)],
        "problems": [],
    }
    return Overload(**(fields | other))


def test_the_report_has_every_figure() -> None:
    text = report(result())
    assert text.startswith("`shoal serve --fake-engine`: 60 s")
    for row in (
        "| refused after, p50 / p99 / max ms | 1.00 / 12.50 / 100.00 |",
        "| TTFT of the others, p50 / p99 / max ms | - / - / - |",
        "| a full pool empties in, ms | 2000.00 |",
        "| front end 0 | 600 | 612.50 | 612 | +0.50 |",
    ):
        assert row in text
    assert "INVALID" not in text
    assert "INVALID RUN: late" in report(result(problems=["late"]))


@pytest.mark.parametrize("option", ["--seconds", "--times", "--waiting"])
def test_what_cannot_be_is_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} 0"):
        main([option, "0"])
