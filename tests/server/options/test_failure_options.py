"""Processes of a served node die: streams go on, or end with a reason, and nothing is left over."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.node import ServedNode, children_of, served_node

Serve = Callable[..., ServedNode]
STREAMS = 8
SEEDED = 4
TOKENS = 60
EARLY = 3
"""Chunks that every stream has got before an engine goes."""
NO_RESTART = ("--restart-backoff", "1000")
"""A new engine would import vLLM anew while the streams run."""
ENDLESS = 1900
"""Tokens of a stream that is cut off: about as many as the model can generate."""


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")  # a short name: sockets are in it


@pytest.fixture
def serve(cache: Path) -> Iterator[Serve]:
    """Starts nodes, which do not outlive the test."""
    with ExitStack() as nodes:
        yield lambda *arguments, **options: nodes.enter_context(
            served_node(cache, *arguments, **options)
        )


def counter(page: str, series: str) -> int:
    """Return the value of one series of a page of metrics, which must have it."""
    (value,) = [line.split()[-1] for line in page.splitlines() if line.startswith(f"{series} ")]
    return int(float(value))


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "shoal-demo",
        "prompt": f"The sea, number {number}: " * 3,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


class Stream:
    """One streamed completion."""

    def __init__(self, client: httpx.AsyncClient, request: dict[str, Any]) -> None:
        self._client = client
        self._request = request
        self.texts: dict[int, str] = {}
        self.unit: str | None = None
        """The unit that it was first sent to."""
        self.chunks = 0
        self.started = asyncio.Event()
        """It has ``EARLY`` chunks, or has ended with fewer of them."""
        self.error: str | None = None

    async def run(self) -> None:
        try:
            await self._read()
        finally:
            self.started.set()

    async def _read(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._request) as response:
            assert response.status_code == 200, await response.aread()
            self.unit = response.headers["x-shoal-unit"]
            async for event in self._events(response):
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", []):
                    index, text = choice["index"], choice["text"]
                    self.texts[index] = self.texts.get(index, "") + text
                self.chunks += 1
                if self.chunks == EARLY:
                    self.started.set()

    async def refusal(self) -> httpx.Response:
        async with self._client.stream("POST", "/v1/completions", json=self._request) as response:
            await response.aread()
            return response

    @staticmethod
    async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def requests() -> list[dict[str, Any]]:
    """Return requests with one possible answer, one of them with two choices, then seeded ones."""
    twice = body(STREAMS, n=2, temperature=1, top_k=1)
    return (
        [body(k) for k in range(STREAMS - 1)]
        + [twice]
        + [body(100 + k, seed=k, temperature=0.8) for k in range(SEEDED)]
    )


async def run_streams(node: ServedNode, act: Any = None) -> list[Stream]:
    """Run all streams at a time; act when each has begun."""
    async with node.async_client() as client:
        endless = [] if act is None else await use_first_engine(client)
        streams = [Stream(client, request) for request in requests()]
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        if act is not None:
            await asyncio.gather(*(stream.started.wait() for stream in streams))
            act()
        await asyncio.gather(*tasks)
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
    return streams


async def use_first_engine(client: httpx.AsyncClient) -> "list[asyncio.Task[None]]":
    """Begin streams until the first engine has one: it outlasts those that are compared."""
    tasks: list[asyncio.Task[None]] = []
    unit = None
    while unit != "0":
        stream = Stream(client, body(200 + len(tasks), max_tokens=ENDLESS))
        tasks.append(asyncio.create_task(stream.run()))
        await stream.started.wait()
        unit = stream.unit
    return tasks


def check_streams(node: ServedNode, act: Any) -> None:
    """Have a part of the node die under streams: their clients see nothing of it."""
    undisturbed = asyncio.run(run_streams(node))
    streams = asyncio.run(run_streams(node, act))
    greedy = slice(0, STREAMS)
    assert [stream.error for stream in streams] == [None] * (STREAMS + SEEDED)
    assert [s.texts for s in streams[greedy]] == [s.texts for s in undisturbed[greedy]]
    with node.client() as http:
        metrics = http.get("/metrics").text
    assert counter(metrics, "shoal_requests_migrated_total") > 0
    outcomes = 'shoal_requests_total{outcome="%s"}'
    assert counter(metrics, outcomes % "lost") == 0
    assert counter(metrics, outcomes % "poisoned") == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_an_engine_dies(serve: Serve, number: signal.Signals) -> None:
    node = serve("--fake-step-ms", "20", *NO_RESTART)
    check_streams(node, lambda: os.kill(node.children[0], number))
    cause = {signal.SIGKILL: "ended", signal.SIGSTOP: "stopped"}[number]
    with node.client() as http:
        metrics = http.get("/metrics").text
    assert counter(metrics, f'shoal_engine_deaths_total{{cause="{cause}"}}') == 1
    node.stop()
    assert node.leftovers() == []


def test_streams_go_on_when_a_real_engine_dies(serve: Serve) -> None:
    node = serve(*NO_RESTART, real=True, VLLM_LOGGING_LEVEL="CRITICAL")
    scheduler, runner, *_ = node.children
    check_streams(node, lambda: os.kill(runner, signal.SIGKILL))
    assert not Path(f"/proc/{scheduler}").exists(), "an engine dies whole"
    node.stop()
    assert node.leftovers() == []


async def run_until_broken(node: ServedNode, act: Callable[[], None]) -> list[Stream]:
    """Run streams that are far from their end, act when each has begun, and wait for their ends."""
    async with node.async_client() as client:
        streams = [Stream(client, body(k, max_tokens=ENDLESS)) for k in range(24)]
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        await asyncio.gather(*(stream.started.wait() for stream in streams))
        act()
        await asyncio.gather(*tasks)
    return streams


def test_streams_end_when_no_engine_is_back_in_time(serve: Serve) -> None:
    node = serve("--fake-step-ms", "20", *NO_RESTART, "--outage-limit", "0.5")

    def lose_both() -> None:
        os.kill(node.children[0], signal.SIGSTOP)
        os.kill(node.children[1], signal.SIGKILL)

    streams = asyncio.run(run_until_broken(node, lose_both))
    assert {stream.error for stream in streams} == {"no engine has served for 0.5 s"}
    with node.client() as http:
        late = http.post("/v1/completions", json=body(0, stream=False))
        assert late.status_code == 503
        assert late.headers["retry-after"] == "10"
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        metrics = http.get("/metrics").text
    outcomes = 'shoal_requests_total{outcome="%s"}'
    assert counter(metrics, outcomes % "unavailable") == len(streams) + 1
    assert counter(metrics, outcomes % "poisoned") == counter(metrics, outcomes % "lost") == 0
    refused = 'shoal_rejected_requests_total{reason="unavailable"}'
    assert counter(metrics, refused) == 1, "those that had begun were not refused"
    node.stop()
    assert node.leftovers() == []


def test_streams_go_on_when_both_engines_come_back(serve: Serve) -> None:
    node = serve("--fake-step-ms", "20", "--restart-backoff", "0.1")
    children = children_of(node.process.pid)

    def lose_both() -> None:
        os.kill(children[0], signal.SIGSTOP)
        os.kill(children[1], signal.SIGKILL)

    async def run(act: Callable[[], None]) -> list[Stream]:
        async with node.async_client() as client:
            streams = [Stream(client, body(k)) for k in range(24)]
            tasks = [asyncio.create_task(stream.run()) for stream in streams]
            await asyncio.gather(*(stream.started.wait() for stream in streams))
            act()
            await asyncio.gather(*tasks)
        return streams

    undisturbed, streams = asyncio.run(run(lambda: None)), asyncio.run(run(lose_both))
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [stream.texts for stream in streams] == [stream.texts for stream in undisturbed]
    node.children += children_of(node.process.pid)
    node.stop()
    assert node.leftovers() == []


def test_a_controller_that_hangs_is_noticed_and_ends_the_node(serve: Serve) -> None:
    node = serve("--fake-step-ms", "20", "--controller-timeout", "3")
    controller = node.children[2]
    asyncio.run(use_while_it_hangs(node, controller))
    os.kill(controller, signal.SIGSTOP)
    assert node.wait()[-1] == "shoal: controller: it has not answered for 9 s"
    assert node.process.returncode == 1
    assert node.leftovers() == []


def test_clients_of_a_node_whose_controller_dies_see_a_broken_connection(serve: Serve) -> None:
    node = serve("--fake-step-ms", "20")

    async def lose() -> Stream:
        async with node.async_client() as http:
            stream = Stream(http, body(1, max_tokens=1000))
            reading = asyncio.create_task(stream.run())
            await stream.started.wait()
            os.kill(node.children[2], signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await reading
            return stream

    assert asyncio.run(lose()).error is None
    assert node.wait()[-1] == "shoal: controller: killed by SIGKILL"
    assert node.process.returncode == 1
    assert node.leftovers() == []


def test_a_controller_that_dies_while_requests_are_carried_leaves_nothing(serve: Serve) -> None:
    node = serve("--fake-step-ms", "20")

    async def lose() -> None:
        async with node.async_client() as http:
            streams = [Stream(http, body(k, max_tokens=1000)) for k in range(2)]
            reading = [asyncio.create_task(stream.run()) for stream in streams]
            for stream in streams:
                await stream.started.wait()
            os.kill(node.children[0], signal.SIGSTOP)  # it neither exports nor takes anything
            group, single = {"units": [[0, 1]]}, {"units": [[0], [1]]}
            reading.append(asyncio.create_task(http.post("/admin/layout", json=group)))
            while (await http.post("/admin/layout", json=single)).status_code != 409:
                pass  # the first switch has not begun; bounded by the test's time limit
            node.kill("controller")
            ends = await asyncio.gather(*reading, return_exceptions=True)
            assert [isinstance(end, httpx.TransportError) for end in ends] == [True] * 3

    asyncio.run(lose())
    assert node.wait()[-1] == "shoal: controller: killed by SIGKILL"
    assert node.process.returncode == 1
    assert node.leftovers() == []


async def use_while_it_hangs(node: ServedNode, controller: int) -> None:
    """Have the controller stop for so long that it is noticed, and not for so long that it ends."""
    async with node.async_client() as http:

        async def ask() -> httpx.Response:
            return await http.post("/v1/completions", json=body(0, max_tokens=1, stream=False))

        async def health_is(status: int) -> None:
            while (await http.get("/health")).status_code != status:
                await asyncio.sleep(0.01)  # bounded by the test's time limit

        async def goes_on(stream: Stream) -> None:
            wanted = stream.chunks + EARLY
            while stream.chunks < wanted:
                await asyncio.sleep(0.01)  # bounded by the test's time limit
            assert stream.error is None

        running = Stream(http, body(1, max_tokens=ENDLESS))
        reading = asyncio.create_task(running.run())
        await running.started.wait()
        os.kill(controller, signal.SIGSTOP)
        waiting = [asyncio.create_task(ask()) for _ in range(4)]
        waiting += [asyncio.create_task(Stream(http, body(k)).refusal()) for k in range(4)]
        answers = await asyncio.gather(*waiting)
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"10"}
        reasons = {answer.json()["error"]["message"] for answer in answers}
        assert reasons == {"the controller has not answered for 3 s"}
        assert (await http.get("/health")).status_code == 503
        assert (await ask()).status_code == 503
        await goes_on(running)  # its engine needs no controller
        os.kill(controller, signal.SIGCONT)
        await health_is(200)
        assert (await ask()).status_code == 200
        await goes_on(running)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        outcomes = 'shoal_requests_total{outcome="%s"}'
        ended = {"unavailable": len(answers) + 1, "finished": 1, "aborted": 1}
        counted: dict[str, float] = {}
        while sum(counted.values()) < sum(ended.values()):  # the engines' word may be on its way
            metrics = (await http.get("/metrics")).text
            counted = {outcome: counter(metrics, outcomes % outcome) for outcome in ended}
    assert counted == ended
    assert counter(metrics, 'shoal_rejected_requests_total{reason="unavailable"}') == 9


def test_a_killed_server_takes_its_processes_along_and_the_next_one_cleans_up(serve: Serve) -> None:
    node = serve()
    node.process.kill()
    node.wait()  # until nobody is left who could write
    assert node.runtime_dir.exists()
    following = serve()
    assert not node.runtime_dir.exists()
    following.stop()
    assert following.leftovers() == []
