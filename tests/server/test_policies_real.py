"""``shoal serve --policy flying`` with real engines: the layout follows the load, no token changes.

Load is held by streams that are started again and again until what it is to bring about has come:
nothing here depends on how fast the machine is.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from policies.flying import FlyingSettings
from policies.partition import Partition, groups_of, singles
from tests.server.node import ServedNode, served_node
from tests.variety import is_varied

ENGINES = 4
DP, TP = singles(ENGINES), groups_of(ENGINES, ENGINES)
SETTINGS = FlyingSettings()
STEADY = 8
"""Streams that never stop: few enough that the node is quiet."""
BURST = int(SETTINGS.dp_above * ENGINES)
"""Streams that come on top of them: so many that it is loaded."""
SECONDS = 60.0
"""How long the layout may take to follow. The policy itself waits for five or so."""


@dataclass(frozen=True)
class Job:
    """A greedy request."""

    prompt: str
    tokens: int
    priority: int = 0


STEADY_JOBS = [Job(f"The sea, number {k}: " * 6, 120) for k in range(STEADY)]
BURST_JOBS = [Job(f"Wave {k} of the storm", 24) for k in range(BURST)]
URGENT_JOB = Job("A ship in distress", 32, priority=-1)
JOBS = [*STEADY_JOBS, *BURST_JOBS, URGENT_JOB]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with served_node(
        tmp_path_factory.mktemp("cache"),
        *("--engines", str(ENGINES), "--policy", "flying"),
        *("--max-num-seqs", "16", "--max-model-len", "1024"),
        "--enforce-eager",
        real=True,
    ) as served:
        yield served


@dataclass
class Client:
    """What the test asks the server for, and what it got."""

    http: httpx.AsyncClient
    expected: dict[Job, list[int]] = field(default_factory=dict)
    """Tokens, by request."""
    wrong: list[Job] = field(default_factory=list)
    """Requests whose tokens were others."""

    async def stream(self, job: Job) -> tuple[list[int], str]:
        """Return a request's tokens and the layout of the unit it was first sent to."""
        body = {
            "model": "shoal-demo",
            "prompt": job.prompt,
            "max_tokens": job.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "priority": job.priority,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return tokens, response.headers["x-shoal-layout"]

    async def learn(self, jobs: list[Job]) -> None:
        """Run every request, and expect from now on what comes of it."""
        answers = await asyncio.gather(*(self.stream(job) for job in jobs))
        self.expected = {job: tokens for job, (tokens, _) in zip(jobs, answers, strict=True)}

    async def check(self, job: Job) -> str:
        """Run a request again, and return its layout."""
        tokens, layout = await self.stream(job)
        if tokens != self.expected[job]:
            self.wrong.append(job)
        return layout

    @asynccontextmanager
    async def load(self, jobs: list[Job]) -> AsyncIterator[None]:
        """Have all of these run, each again when it has ended, for as long as the block lasts."""
        enough = asyncio.Event()

        async def again(job: Job) -> None:
            while not enough.is_set():
                await self.check(job)

        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(again(job))
            yield
            enough.set()

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def use(self, policy: str) -> None:
        answer = await self.http.post("/admin/policy", json={"policy": policy})
        assert answer.status_code == 200, answer.text

    async def until(self, wanted: Partition) -> None:
        """Wait for a layout."""
        units: list[list[int]] = []
        try:
            async with asyncio.timeout(SECONDS):
                while units != [list(group) for group in wanted]:
                    units = [unit["engines"] for unit in (await self.get("/admin/layout"))["units"]]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"the layout is {units}, not {wanted}")


@pytest.fixture
async def client(node: ServedNode) -> AsyncIterator[Client]:
    limits = httpx.Limits(max_connections=None)
    async with node.async_client(timeout=SECONDS, limits=limits) as http:
        yield Client(http)


async def test_the_layout_follows_the_load_and_no_token_changes(client: Client) -> None:
    await client.use("static-dp")
    await client.until(DP)
    await client.learn(JOBS)
    assert is_varied([tokens[:32] for tokens in client.expected.values() if len(tokens) >= 32])
    await client.use("flying")
    await client.until(TP)
    switches = len((await client.get("/admin/layout"))["switches"])

    async with client.load(STEADY_JOBS):
        async with client.load(BURST_JOBS):
            await client.until(DP)
            assert await client.check(URGENT_JOB) == "tp2"
        await client.until(TP)

    assert client.wrong == []
    rise, *between, fall = (await client.get("/admin/layout"))["switches"][switches:]
    assert {switch["outcome"] for switch in (rise, *between, fall)} == {"done"}
    # An urgent request that was learnt from just before may still hold a group for a moment.
    assert partitions(rise)[0] == TP
    assert DP in [partitions(switch)[1] for switch in (rise, *between)]
    assert rise["requests"]["moved"] > 0
    urgent = next(switch for switch in between if switch["preempt"] == "hard")
    assert sorted(map(len, partitions(urgent)[1])) == [1, 1, 2]
    assert urgent["requests"]["paused"] > 0
    assert partitions(fall)[1] == TP
    assert fall["requests"]["moved"] > 0


def partitions(switch: dict[str, Any]) -> tuple[Partition, Partition]:
    """Return what a switch led from and to."""
    before, after = (tuple(map(tuple, switch[side])) for side in ("before", "after"))
    return before, after


async def test_no_request_was_lost_and_the_books_are_right(client: Client) -> None:
    """After all that: every request the server took has ended in order, and every block is back."""
    metrics = (await client.http.get("/metrics")).text
    outcomes = dict(re.findall(r'^shoal_requests_total{outcome="(\w+)"} (.*)$', metrics, re.M))
    assert float(outcomes.pop("finished")) > 0
    assert {float(count) for count in outcomes.values()} == {0.0}
    assert (await client.get("/admin/policy"))["errors"] == 0
    audit = (await client.http.post("/admin/audit")).json()
    assert (audit["clean"], audit["problems"]) == (True, [])
