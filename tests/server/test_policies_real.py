"""``shoal serve --max-sp 2`` with real engines and policies: layouts and modes follow, tokens stay.

Load is held by streams that are started again and again until what it is to bring about has come:
nothing here depends on how fast the machine is. The tests use one server, in the order they are
written.
"""

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.policies.flying import FlyingSettings
from shoal.policies.shift import DEFAULT_THRESHOLD
from shoal.policies.values.layouts import tensor_parallel
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.fit_file import read_fit
from tests.server.node import ServedNode, served_node
from tests.units import tp_units
from tests.variety import is_varied

ENGINES = 4
DP, TP = singles(ENGINES), tp_units(ENGINES, ENGINES)
SETTINGS = FlyingSettings()
SEATS = 16
"""Requests that run at once on a unit."""
STEADY = 2
"""Long streams: few enough that the node would be quiet with them alone."""
BURST = int(SETTINGS.tp_below * ENGINES)
"""Short streams beside them: more than a group has seats for, too many for a quiet node."""
assert BURST > SEATS
SALTS = itertools.count()
"""Requests of different salts have nothing of each other's in the prefix cache."""
SECONDS = 200.0
"""How long the layout may take to follow. The policy itself waits for five or so."""


@dataclass(frozen=True)
class Job:
    """A greedy request."""

    prompt: str
    tokens: int
    priority: int = 0
    cached: bool = True
    """Whether its prompt may be taken from the prefix cache."""


STEADY_JOBS = [Job(f"The sea, number {k}: " * 6, 120) for k in range(STEADY)]
BURST_JOBS = [Job(f"Wave {k} of the storm", 16) for k in range(BURST)]
LONG_PROMPT = "The old man told them of a ship that sailed to the north. " * 30
"""It has more tokens than the threshold of the shift, and one step computes it."""
LONG_JOB = Job(LONG_PROMPT, 12, cached=False)
URGENT_JOB = Job(LONG_PROMPT, 32, priority=-1, cached=False)
JOBS = [*STEADY_JOBS, *BURST_JOBS, URGENT_JOB]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what the start measures."""
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, fits: Path) -> Iterator[ServedNode]:
    with served_node(
        tmp_path_factory.mktemp("cache"),
        *("--engines", str(ENGINES), "--policy", "flying", "--max-sp", "2"),
        *("--max-num-seqs", str(SEATS), "--max-model-len", "1024"),
        *("--enforce-eager", "--fit-seconds", "1", "--fit-dir", str(fits)),
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
            "cache_salt": None if job.cached else str(next(SALTS)),
        }
        tokens: list[int] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return tokens, response.headers["x-shoal-layout"]

    async def learn(self, jobs: list[Job]) -> None:
        """Run every request in DP, and expect from now on what comes of it."""
        await self.use("static-dp")
        await self.until(DP)
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

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def use(self, policy: str) -> None:
        await self.post("/admin/policy", {"policy": policy})

    async def shift(self, threshold: int | str) -> Any:
        return await self.post("/admin/shift", {"threshold": threshold})

    async def computed(self) -> Counter[tuple[str, str, str]]:
        """Return the tokens that all engines have computed by layout, mode and kind.

        Those of every request that has ended are among them; of others, some are.
        """
        await self.http.post("/admin/audit")  # answered after the reports that were on their way
        page = (await self.http.get("/metrics")).text
        tokens: Counter[tuple[str, str, str]] = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "shoal_step_tokens_total":
                    layout, mode, kind = (sample.labels[k] for k in ("layout", "mode", "kind"))
                    tokens[layout, mode, kind] += int(sample.value)
        return tokens

    async def until(self, wanted: Partition) -> None:
        """Wait for a layout, and for the end of the switch to it, which may carry requests."""
        units: list[list[int]] = []
        target = [list(group.engines) for group in wanted]
        is_over = False
        try:
            async with asyncio.timeout(SECONDS):
                while units != target or not is_over:
                    view = await self.get("/admin/layout")
                    units = [unit["engines"] for unit in view["units"]]
                    is_over = all(switch["after"] == target for switch in view["switches"][-1:])
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"the layout is {units}, not {wanted}")


@pytest.fixture
async def client(node: ServedNode) -> AsyncIterator[Client]:
    # One that is used again when the server is about to close it, for it was idle, may be reset.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with node.async_client(timeout=SECONDS, limits=limits) as http:
        yield Client(http)


async def test_the_steps_of_every_layout_were_timed_at_the_start(
    client: Client, fits: Path
) -> None:
    """Before any request: nothing is counted yet, and every engine is alone again."""
    policy = await client.get("/admin/policy")
    assert policy["costs"] == "fitted"
    known = {
        f"{layout} {kind}" for layout in ("dp", "tp2", "tp4") for kind in ("decode", "prefill")
    }
    assert known <= policy["step_errors"].keys()
    (file,) = fits.iterdir()
    assert {one.layout.name for one in read_fit(file) or ()} == {"dp", "tp2", "tp4"}


async def test_the_layout_follows_the_load_and_no_token_changes(client: Client) -> None:
    await client.learn(JOBS)
    assert is_varied([tokens[:32] for tokens in client.expected.values() if len(tokens) >= 32])
    await client.use("flying")
    await client.until(TP)
    switches = len((await client.get("/admin/layout"))["switches"])
    before = await client.computed()

    async with client.load([*STEADY_JOBS, *BURST_JOBS]):
        await client.until(DP)
        assert await client.check(URGENT_JOB) == "tp2"
    # Nothing runs now. Whether two streams that begin again and again are load for a group depends
    # on how fast this machine computes in TP, and so does which layout is right for them.
    await client.until(TP)

    assert client.wrong == []
    computed = await client.computed() - before
    assert computed["dp", "dp", "decode"] > 0
    assert computed["tp2", "sp", "prefill"] > DEFAULT_THRESHOLD
    assert computed["tp2", "tp", "decode"] > 0
    seen = (await client.get("/admin/layout"))["switches"][switches:]
    assert {switch["outcome"] for switch in seen} == {"done"}
    assert partitions(seen[0])[0] == TP
    # An urgent request that was learnt from just before may still hold a group for a moment.
    assert DP in [partitions(switch)[1] for switch in seen]
    assert seen[0]["requests"]["carried"] > 0
    urgent = next(switch for switch in seen if switch["preempt"] == "hard")
    assert sorted(unit.size for unit in partitions(urgent)[1]) == [1, 1, 2]
    assert urgent["requests"]["paused"] > 0
    assert partitions(seen[-1])[1] == TP


async def test_metrics_say_how_engines_exchange_in_sp(client: Client) -> None:
    families = text_string_to_metric_families((await client.http.get("/metrics")).text)
    (found,) = (family for family in families if family.name == "shoal_sp_exchange")
    counts = {(s.labels["layout"], s.labels["by"]): s.value for s in found.samples}
    none = dict.fromkeys((("tp2", "peer"), ("tp4", "peer")), 0)  # on CPUs
    assert counts == none | {("tp2", "collective"): ENGINES, ("tp4", "collective"): ENGINES}


def partitions(switch: dict[str, Any]) -> tuple[Partition, Partition]:
    """Return what a switch led from and to."""
    before, after = (tuple(map(tensor_parallel, switch[side])) for side in ("before", "after"))
    return before, after


async def test_the_threshold_of_the_shift_changes_live(client: Client) -> None:
    """It counts from the next prompt on, for policies that shift; no token changes."""
    await client.learn([LONG_JOB])
    await client.use("shift")
    await client.until(TP)

    async def kinds_in_sp() -> set[str]:
        """Run the long prompt, and return which of its tokens were computed in SP."""
        before = await client.computed()
        assert await client.check(LONG_JOB) == "tp4"
        computed = await client.computed() - before
        assert sum(computed.values()) >= DEFAULT_THRESHOLD + LONG_JOB.tokens
        assert {layout for layout, _, _ in computed} == {"tp4"}
        return {kind for _, mode, kind in computed if mode == "sp"}

    assert await kinds_in_sp() == {"prefill"}
    assert (await client.shift("off"))["sp_above"] == {}
    assert await kinds_in_sp() == set()
    assert (await client.shift(0))["sp_above"] == {"tp2": 0, "tp4": 0}
    assert await kinds_in_sp() == {"prefill", "decode"}
    await client.use("static-tp")
    assert await kinds_in_sp() == set()
    await client.use("shift")
    await client.shift(DEFAULT_THRESHOLD)
    assert await kinds_in_sp() == {"prefill"}
    assert client.wrong == []


async def test_the_mode_changes_under_running_streams(client: Client) -> None:
    streams = BURST_JOBS[:4]
    await client.learn(streams)
    await client.use("shift")
    await client.until(TP)
    before = await client.computed()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(client.check(job)) for job in streams]
        while not all(task.done() for task in running):
            await client.shift(0)
            await client.shift("off")
    await client.shift(DEFAULT_THRESHOLD)
    computed = await client.computed() - before
    assert computed["tp4", "sp", "decode"] > 0
    assert computed["tp4", "tp", "decode"] > 0
    assert client.wrong == []


async def test_adaptive_decides_for_groups_that_shift(client: Client) -> None:
    """By times that were measured here: which layout it then takes is not known beforehand."""
    await client.learn([LONG_JOB, *BURST_JOBS[:2]])
    await client.use("shift")
    await client.until(TP)
    await client.use("adaptive")
    async with client.load(BURST_JOBS[:2]):
        layouts = [await client.check(LONG_JOB) for _ in range(3)]
    # A request that a switch takes along before its first token names both of its units.
    assert {name for names in layouts for name in names.split(";")} <= {"dp", "tp2", "tp4"}
    policy = await client.get("/admin/policy")
    assert policy["errors"] == 0
    assert "tp4 sp prefill" in policy["step_errors"]
    assert client.wrong == []


async def test_no_request_was_lost_and_the_books_are_right(client: Client) -> None:
    """After all that: every request the server took has ended in order, and every block is back."""
    metrics = (await client.http.get("/metrics")).text
    outcomes = dict(re.findall(r'^shoal_requests_total{outcome="(\w+)"} (.*)$', metrics, re.M))
    assert float(outcomes.pop("finished")) > 0
    assert {float(count) for count in outcomes.values()} == {0.0}
    assert (await client.get("/admin/policy"))["errors"] == 0
    audit = (await client.http.post("/admin/audit")).json()
    assert (audit["clean"], audit["problems"]) == (True, [])
