"""How a node ends while it is asked for things: nothing that it took is lost."""

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import filterfalse
from pathlib import Path
from typing import Any

import httpx

from tests.server.held_steps import VARIABLE, held_steps, holdable_shoal
from tests.server.node import ServedNode, served_node, told_of_work, until
from tests.server.retrying_proxy import retrying_proxy

MODEL = "shoal-demo"
LONG = 300
"""Tokens of an answer that takes seconds."""
SLOW = ("--fake-step-ms", "20")


def ask(max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    return body | more


def events(lines: Iterator[str]) -> list[Any]:
    """Return the events of a stream that are not its end, up to there."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def tokens_of(chunks: list[Any]) -> int:
    return int(chunks[-1]["usage"]["completion_tokens"])


STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def running(view: dict[str, Any]) -> int:
    return sum(unit["running"] + unit["waiting"] for unit in view["units"])


@contextmanager
def served(directory: Path, *arguments: str, **more: Any) -> Iterator[ServedNode]:
    """Run a node, and kill it if the test has not ended it."""
    directory.mkdir(exist_ok=True)
    with served_node(directory, *arguments, **more) as node:
        yield node


async def test_a_client_that_reads_nothing_holds_no_blocks_and_a_drain_takes_nothing_new(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"
    with served(tmp_path, *SLOW, main=holdable_shoal, **{VARIABLE: str(hold)}) as node:
        async with node.async_client() as http:
            host, port = node.url.removeprefix("http://").split(":")
            body = json.dumps(ask(60, n=64, **STREAM)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            with socket.socket() as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                deaf.connect((host, int(port)))
                deaf.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                finished = 'shoal_requests_total{outcome="finished"} 64.0'
                while finished not in (await http.get("/metrics")).text:
                    await asyncio.sleep(0.01)  # polling, which the test's time limit bounds
                assert running((await http.get("/admin/layout")).json()) == 0
                # What it did not take was put together meanwhile, into few chunks.
                unread = b""
                while b"[DONE]" not in unread:
                    unread += deaf.recv(1 << 16)
                assert b'"completion_tokens":3840' in unread
                assert unread.count(b'"choices":[{') < 3840, len(unread)
            kept = node.async_client()
            assert (await kept.get("/ready")).status_code == 200
            async with http.stream("POST", "/v1/completions", json=ask(LONG, **STREAM)) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                with held_steps(hold):  # it does not end meanwhile, and the node with it
                    node.process.send_signal(signal.SIGTERM)
                    while (answer := await kept.get("/ready")).status_code == 200:
                        pass  # the signal is on its way
                    assert answer.status_code == 503
                    assert "shutting down" in answer.json()["error"]["message"]
                    assert answer.headers["connection"] == "close"
                    refused = await kept.post("/v1/completions", json=ask())
                    assert refused.status_code == 503
                    assert refused.headers["connection"] == "close"
                    assert int(refused.headers["retry-after"]) >= 1
                    alive = await kept.get("/health")
                    assert alive.status_code == 200
                    assert alive.headers["connection"] == "close"
                    text = (await kept.get("/metrics")).text
                    assert "shoal_ready 0.0" in text
                    assert 'shoal_rejected_requests_total{reason="handed_back"} 1.0' in text
                chunks = events(iter([line async for line in lines]))
            assert tokens_of(chunks) == LONG
            await kept.aclose()
        assert list(filterfalse(told_of_work, node.wait())) == []
        assert node.process.returncode == 0
        assert node.leftovers() == []


async def test_what_cannot_be_done_in_time_is_handed_back(tmp_path: Path) -> None:
    options = ("--engines", "1", "--max-num-seqs", "2", "--fake-step-ms", "100")
    response = {"model": MODEL, "input": "x", "max_output_tokens": LONG, "stream": True}
    with served(tmp_path, *options, "--shutdown-timeout", "2", last_line="try it:") as node:
        async with node.async_client() as http:
            async with (
                http.stream("POST", "/v1/completions", json=ask(LONG, **STREAM)) as stream,
                http.stream("POST", "/v1/responses", json=response) as other,
            ):
                lines, others = stream.aiter_lines(), other.aiter_lines()
                await anext(lines)
                await anext(others)
                rest = [
                    asyncio.create_task(http.post("/v1/completions", json=ask(LONG, **more)))
                    for more in ({}, {}, STREAM)
                ]
                await until(http, lambda view: view["waiting"] == 2)
                node.process.send_signal(signal.SIGTERM)
                chunks = events(iter([line async for line in lines]))
                told = events(iter([line async for line in others]))
            # They had begun: what they have must not be taken for the whole.
            assert chunks[-1]["error"]["code"] == 503
            assert "shutting down" in chunks[-1]["error"]["message"]
            assert (told[-1]["type"], told[-1]["code"]) == ("error", "503")
            assert "shutting down" in told[-1]["message"]
            assert told[-1]["sequence_number"] == len(told) - 1
            # The first of these was on its engine, and the others in the task pool.
            for answer in await asyncio.gather(*rest):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert "shutting down" in answer.json()["error"]["message"]
        said = node.wait()
        assert node.process.returncode == 0
    assert [line.partition(": the node")[0] for line in said] == [
        "controller: handed 2 requests back that waited",
        "controller: handed 3 requests back that ran",
    ]
    assert node.leftovers() == []


async def test_a_second_signal_ends_streams_with_an_error_at_once(tmp_path: Path) -> None:
    with served(tmp_path, "--fake-step-ms", "100", "--shutdown-timeout", "600") as node:
        async with node.async_client() as http:
            async with http.stream("POST", "/v1/completions", json=ask(LONG, **STREAM)) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                node.process.send_signal(signal.SIGTERM)
                while (await http.get("/ready")).status_code == 200:
                    pass  # the signal is on its way
                node.process.send_signal(signal.SIGINT)
                chunks = events(iter([line async for line in lines]))
            assert chunks[-1]["error"]["code"] == 503
        node.wait()
        assert node.process.returncode == 1
    assert node.leftovers() == []


async def test_a_rolling_restart_behind_a_retrying_proxy_loses_no_request(
    tmp_path: Path,
) -> None:
    with (
        served(tmp_path / "first", *SLOW) as first,
        served(tmp_path / "second", *SLOW) as second,
    ):
        async with retrying_proxy(first.url) as proxy:
            done = 0
            ended = asyncio.Event()

            async def customer(stream: bool) -> None:
                nonlocal done
                async with httpx.AsyncClient(base_url=proxy.url, timeout=120) as http:
                    last = False
                    while not last:
                        last = ended.is_set()
                        body = ask(32, **(STREAM if stream else {}))
                        answer = await http.post("/v1/completions", json=body)
                        assert answer.status_code == 200, answer.text
                        whole = events(iter(answer.text.splitlines())) if stream else []
                        assert tokens_of(whole or [answer.json()]) == 32
                        done += 1

            customers = asyncio.gather(*(customer(k % 2 == 0) for k in range(12)))
            while done < 12:
                await asyncio.sleep(0.01)  # polling, which the test's time limit bounds
            proxy.upstreams.append(second.url)
            endless = ask(1900, stream=True)  # so it ends only after it has handed requests back
            async with (
                first.async_client() as http,
                http.stream("POST", "/v1/completions", json=endless),
            ):
                first.process.send_signal(signal.SIGTERM)
                while 503 not in proxy.retries:
                    await asyncio.sleep(0.01)  # polling, which the test's time limit bounds
            said = await asyncio.to_thread(first.wait)
            ended.set()
            await customers
            said += await asyncio.to_thread(second.stop, signal.SIGTERM)
    assert list(filterfalse(told_of_work, said)) == []
    assert first.process.returncode == second.process.returncode == 0
    assert first.leftovers() == second.leftovers() == []
