"""The client's counts are held against the server's, exactly where that can be."""

import time

import pytest
from aiohttp import web

from shoal.loadgen.client import Client, ClientError, Settings
from shoal.loadgen.counters import Count, ServerCounters, compare, read_counters, settled_counters
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.workload import Arrival
from tests.loadgen.stand_in import stand_in

METRICS = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 10.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 5.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="length"} 2.0
vllm:request_success_total{engine="1",finished_reason="stop"} 1.0
vllm:request_success_total{engine="1",finished_reason="abort"} 1.0
# TYPE shoal_requests_total counter
shoal_requests_total{outcome="finished"} 3.0
shoal_requests_total{outcome="expired"} 1.0
"""


async def read(text: str) -> ServerCounters:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async with stand_in() as server:
        server.routes["/metrics"] = metrics
        async with Client(Settings(server.url), time.monotonic) as client:
            return await read_counters(client)


async def test_counters_are_summed_over_engines() -> None:
    counters = await read(METRICS)
    assert (counters.prompt_tokens, counters.output_tokens, counters.succeeded) == (15, 7, 3)
    assert counters.outcomes == {"finished": 3, "expired": 1}
    nothing = counters.since(counters)
    assert (nothing.prompt_tokens, nothing.output_tokens, nothing.succeeded) == (0, 0, 0)
    assert set(nothing.outcomes.values()) == {0}


async def test_what_is_not_prometheus_is_refused() -> None:
    with pytest.raises(ClientError, match="not in Prometheus' format"):
        await read("{}")


def exchange(outcome: Outcome, tokens: int = 4) -> Exchange:
    one = Exchange(0, Arrival(0.0, 5, tokens), outcome=outcome)
    if outcome is Outcome.OK:
        one.prompt_tokens, one.output_tokens = 5, tokens
    return one


def differing(exchanges: list[Exchange], server: ServerCounters) -> list[str]:
    return [count.name for count in compare(exchanges, server) if not count.agrees]


async def test_equal_counts_agree_and_each_difference_is_named() -> None:
    server = await read(METRICS)
    exchanges = [exchange(Outcome.OK, tokens) for tokens in (4, 2, 1)]
    exchanges.append(exchange(Outcome.EXPIRED_504))
    assert differing(exchanges, server) == []
    assert differing(exchanges[:-1], server) == ["requests expired"]
    assert differing([*exchanges, exchange(Outcome.REFUSED_503)], server) == ["requests pool_full"]
    exchanges[0].output_tokens = 3
    assert differing(exchanges, server) == ["output tokens"]
    exchanges[0].prompt_tokens = 6
    assert differing(exchanges, server) == ["prompt tokens", "output tokens"]


async def test_a_request_that_broke_off_may_have_cost_the_server_more() -> None:
    server = await read(METRICS)
    exchanges = [exchange(Outcome.OK, tokens) for tokens in (2, 1, 1)]
    exchanges.append(exchange(Outcome.EXPIRED_504))
    assert differing(exchanges, server) == ["output tokens"]
    assert differing([*exchanges, exchange(Outcome.CANCELLED)], server) == []
    more = [*exchanges, exchange(Outcome.CANCELLED), exchange(Outcome.OK, 9)]
    assert "output tokens" in differing(more, server)


async def test_other_servers_have_no_outcomes() -> None:
    server = await read("\n".join(METRICS.splitlines()[:9]))
    names = [count.name for count in compare([], server)]
    assert names == ["requests", "prompt tokens", "output tokens"]


def test_a_difference_is_plain_to_see() -> None:
    assert str(Count("requests", 3, 4)).endswith("DIFFERS")
    assert "agrees (or more" in str(Count("requests", 3, 4, exact=False))


def page(requests: int) -> str:
    """Return the metrics of a server that has answered so many requests of 5 and 4 tokens."""
    return f"""\
vllm:prompt_tokens_total{{engine="0"}} {5 * requests}
vllm:generation_tokens_total{{engine="0"}} {4 * requests}
vllm:request_success_total{{engine="0",finished_reason="stop"}} {requests}
shoal_requests_total{{outcome="finished"}} {requests}
"""


async def settle(*counted: int, timeout: float) -> tuple[list[Count], int]:
    """Return the counts of three requests, and how often the server was asked.

    Args:
        counted: requests that the server has counted, look by look; the last one stays.
        timeout: seconds that it may take.
    """
    asked = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=page(counted[min(asked, len(counted)) - 1]))

    async with stand_in() as server:
        server.routes["/metrics"] = metrics
        async with Client(Settings(server.url), time.monotonic) as client:
            exchanges = [exchange(Outcome.OK) for _ in range(3)]
            before = ServerCounters()
            after = await settled_counters(client, exchanges, before, timeout=timeout, pause=0)
    return compare(exchanges, after.since(before)), asked


async def test_counters_that_trail_are_waited_for() -> None:
    counts, asked = await settle(0, 2, 3, timeout=60)
    assert all(count.agrees for count in counts)
    assert asked == 4


async def test_counts_are_equal_only_if_nothing_more_is_counted() -> None:
    _, asked = await settle(3, timeout=60)
    assert asked == 2


async def test_counters_that_never_agree_are_not_waited_for_for_ever() -> None:
    counts, asked = await settle(2, timeout=0)
    assert not all(count.agrees for count in counts)
    assert asked == 1
