"""The figures are those of ``vllm bench serve``, from the same requests.

Tolerance: a relative 1e-9, the rounding of sums in another order.
"""

import json
import random
import time
from pathlib import Path

import aiohttp
import pytest
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    RequestFuncOutput,
    async_request_openai_chat_completions,
    async_request_openai_completions,
)
from vllm.benchmarks.plot import construct_timeline_data
from vllm.benchmarks.serve import calculate_metrics

from shoal.loadgen.client import Client, Endpoint, Settings
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.open_loop import Run
from shoal.loadgen.replay_results import Result, encode
from shoal.loadgen.summary import Objective
from shoal.loadgen.validity import judge
from shoal.loadgen.workload import Arrival
from tests.loadgen.stand_in import StandIn, events, stand_in, stream, token

PERCENTILES = [90.0, 99.0]
TTFT_SECONDS, TPOT_SECONDS = 0.6, 0.05


def exchanges(seed: int, count: int = 200) -> list[Exchange]:
    """Return made-up requests: successes of one token and of many, and failures."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        sent = index * 0.1 + rng.random() * 0.001
        tokens = rng.choice([1, 2, 30, 200])
        one = Exchange(index, Arrival(index * 0.1, rng.randint(1, 900), tokens), sent=sent)
        at = sent + rng.random()
        for _ in range(tokens):
            one.chunk_times.append(at)
            at += rng.expovariate(25.0)
        one.ended = at
        one.outcome = rng.choice([Outcome.OK] * 9 + [Outcome.TRUNCATED])
        one.prompt_tokens, one.output_tokens = one.arrival.prompt_tokens, tokens
        made.append(one)
    return made


def vllm_output(exchange: Exchange) -> RequestFuncOutput:
    assert exchange.sent is not None
    return RequestFuncOutput(
        success=exchange.outcome is Outcome.OK,
        latency=exchange.chunk_times[-1] - exchange.sent,
        output_tokens=exchange.counted_output,
        ttft=exchange.chunk_times[0] - exchange.sent,
        itl=exchange.itls,
        prompt_len=exchange.counted_prompt,
        start_time=exchange.sent,
    )


def result(seed: int) -> Result:
    run = Run(exchanges=exchanges(seed), planned=200, duration=25.0)
    return Result("r", "w", Endpoint.COMPLETIONS.path, "m", judge(run), run)


@pytest.mark.parametrize("seed", [0, 1])
def test_figures_agree(seed: int) -> None:
    run = result(seed).run
    theirs, output_lens = calculate_metrics(
        [],
        [vllm_output(exchange) for exchange in run.exchanges],
        run.duration,
        None,
        PERCENTILES,
        {"ttft": 1000 * TTFT_SECONDS, "tpot": 1000 * TPOT_SECONDS},
    )
    ours = json.loads(encode(result(seed), [Objective(0, TTFT_SECONDS, TPOT_SECONDS)]))
    expected = {
        "completed": theirs.completed,
        "failed": theirs.failed,
        "total_input_tokens": theirs.total_input,
        "total_output_tokens": theirs.total_output,
        "request_throughput": theirs.request_throughput,
        "request_goodput": theirs.request_goodput,
        "output_throughput": theirs.output_throughput,
        "total_token_throughput": theirs.total_token_throughput,
        "max_output_tokens_per_s": theirs.max_output_tokens_per_s,
        "max_concurrent_requests": theirs.max_concurrent_requests,
    }
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for name in ("mean", "median", "std"):
            expected[f"{name}_{metric}_ms"] = getattr(theirs, f"{name}_{metric}_ms")
        for percentile, value in getattr(theirs, f"percentiles_{metric}_ms"):
            expected[f"p{percentile:g}_{metric}_ms"] = value
    assert 0 < expected["failed"] < 200
    assert 0 < expected["request_goodput"] < expected["request_throughput"]
    assert {key: ours[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert ours["output_lens"] == output_lens


def test_their_timeline_reads_our_file(tmp_path: Path) -> None:
    content = json.loads(encode(result(0), []))
    columns = ("start_times", "ttfts", "itls", "latencies", "input_lens", "output_lens")
    names = ("start_time", "ttft", "itl", "latency", "prompt_len", "output_tokens")
    rows = zip(*(content[column] for column in columns), strict=True)
    timeline = construct_timeline_data(
        [dict(zip(names, row, strict=True)) for row in rows], [0.025, 0.05], ["a", "b", "c"]
    )
    assert len({segment["request_id"] for segment in timeline}) == 200


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(events(3, 5), id="whole"),
        pytest.param([token() * 2, *events(3, 2)], id="two-tokens-at-once"),
        pytest.param([b'data: {"choices": []}\n\n'], id="no-token"),
    ],
)
@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_the_same_stream_is_read_alike(endpoint: Endpoint, parts: list[bytes]) -> None:
    chat = endpoint is Endpoint.CHAT
    if chat:
        parts = [part.replace(b'"text": "x"', b'"delta": {"content": "x"}') for part in parts]
    async with stand_in() as server:
        server.answer = lambda request: stream(request, *parts)
        theirs = await send_as_vllm(server, endpoint)
        ours = await send(server, endpoint)
    assert (ours.outcome is Outcome.OK) is theirs.success
    if theirs.success:
        assert ours.counted_prompt == theirs.prompt_len
        assert ours.counted_output == theirs.output_tokens
        assert len(ours.itls) == len(theirs.itl)


async def send_as_vllm(server: StandIn, endpoint: Endpoint) -> RequestFuncOutput:
    call = {
        Endpoint.COMPLETIONS: async_request_openai_completions,
        Endpoint.CHAT: async_request_openai_chat_completions,
    }[endpoint]
    asked = RequestFuncInput("hi", server.url + endpoint.path, 3, 5, "stand-in")
    async with aiohttp.ClientSession() as session:
        return await call(asked, session)


async def send(server: StandIn, endpoint: Endpoint) -> Exchange:
    exchange = Exchange(0, Arrival(0.0, 3, 5))
    settings = Settings(server.url, endpoint)
    async with Client(settings, time.perf_counter) as client:
        await client.send(exchange, client.body("hi", 5))
    return exchange
