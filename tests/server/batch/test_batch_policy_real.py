"""A batch on four real engines under the policy ``batch``, with people's requests beside it.

Which partition serves most is a question of hardware. So the node's cost model is that of a model
and of GPUs for which a split does, and it learns nothing from the steps of this machine. All else
is as a user has it: single engines compute prompts, and hand requests over to a group.
"""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.runtime.simulation.data_sheets import hardware_named
from tests.server.batch.batches import jsonl
from tests.server.batch.batches import line as any_line
from tests.server.node import ServedNode, served_node, shoal
from tests.variety import is_varied

MODEL, COMPLETIONS = "shoal-demo", "/v1/completions"
ENGINES = 4
SPLIT = [[0, 1], [2], [3]]
BLOCKS = 48
"""KV blocks of an engine, of 32 tokens: six requests of the batch."""
BLOCK_BYTES = 6 * 2 * 4 * 32 * 4 * 32
"""Of the demo model: layers, keys and values, heads, their size, bytes of float32, tokens."""
STEP_TOKENS = 96
VARIABLE = "SHOAL_TEST_READ_NOTHING"
"""Environment variable: a file. As long as it exists, requests that are handed over get no KV."""
SALTS = itertools.count()
"""Requests of different salts have nothing of each other's in the prefix cache."""
SECONDS = 300.0
COUNTED = {
    "shoal_departures_total": "left by",
    "shoal_carried_requests_total": "carry",
    "shoal_requests_total": "request",
    "shoal_tier_requests_total": "tier",
}


class Job(NamedTuple):
    """A greedy request."""

    prompt: tuple[int, ...]
    tokens: int

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": str(next(SALTS)),
        }


def _jobs(count: int, prompt: tuple[int, int], tokens: tuple[int, int], seed: int) -> list[Job]:
    draw = random.Random(seed)
    lengths = [draw.randint(*prompt) for _ in range(count)]
    return [
        Job(tuple(draw.randrange(3, 4096) for _ in range(length)), draw.randint(*tokens))
        for length in lengths
    ]


LINES = _jobs(32, prompt=(160, 240), tokens=(32, 40), seed=1)
PEOPLE = _jobs(4, prompt=(10, 40), tokens=(32, 32), seed=2)


def split_shoal(arguments: list[str]) -> int:
    """Be the ``shoal`` command, whose cost model learns nothing and whose reads can be stopped."""
    from shoal.runtime.controller.books.step_costs import StepCosts
    from shoal.runtime.engine.kv import carry_plan

    strips = carry_plan.strips

    def read(*args: Any) -> Any:
        return [] if Path(os.environ[VARIABLE]).exists() else strips(*args)

    carry_plan.strips = read
    StepCosts._learn = lambda *_: None  # type: ignore[method-assign]
    return shoal(arguments)


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that stops the reading of KV."""
    return tmp_path_factory.mktemp("damage") / "demanded"


@contextmanager
def served_split(
    folder: Path, damage: Path, *options: str, slower: float, blocks: int
) -> Iterator[ServedNode]:
    """Serve the demo model on real engines whose cost model is that of slow GPUs.

    Args:
        folder: where the node keeps its files.
        damage: the file that stops the reading of KV.
        options: more options of the node.
        slower: by which factor the GPUs' memory is slower than an L40S's, but not for KV.
        blocks: KV blocks of an engine.
    """
    gpu = hardware_named("l40s")
    slow = msgspec.structs.replace(
        gpu,
        memory_bytes_per_second=gpu.memory_bytes_per_second / slower,
        link_bytes_per_second=gpu.link_bytes_per_second / 100,
    )
    hardware = folder / "hardware.json"
    hardware.write_bytes(msgspec.json.encode(slow))
    with served_node(
        folder,
        *("--engines", str(ENGINES), "--policy", "static-dp", "--dtype", "float32"),
        *("--max-num-seqs", "16", "--max-model-len", "512", "--enforce-eager"),
        *("--max-num-batched-tokens", str(STEP_TOKENS), "--batch-dir", str(folder / "store")),
        *("--kv-cache-memory-bytes", str(blocks * BLOCK_BYTES), *options),
        *("--cost-model-shape", "llama-3-8b-bf16", "--cost-model-hardware", str(hardware)),
        real=True,
        main=split_shoal,
        **{VARIABLE: str(damage)},
    ) as served:
        yield served


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, damage: Path) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("batches")
    with served_split(folder, damage, slower=10, blocks=BLOCKS) as served:
        yield served


@dataclass
class Client:
    """What the test asks the server for, and what it got."""

    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    expected: dict[Job, list[int]]
    """What one engine alone makes of a request."""

    async def ask(self, job: Job) -> list[int]:
        answer = await self.http.post(COMPLETIONS, json=job.body)
        assert answer.status_code == 200, answer.text
        return tokens_of(answer.json())

    async def learn(self, jobs: list[Job]) -> None:
        """Have every request computed by one engine alone, and go on under ``batch``."""
        await self.use("static-dp")
        await self.until_units([[engine] for engine in range(ENGINES)])
        before, free = await self.counts(), asyncio.Semaphore(ENGINES)

        async def one(job: Job) -> None:
            async with free:
                self.expected[job] = await self.ask(job)

        await asyncio.gather(*(one(job) for job in jobs if job not in self.expected))
        assert not any(name.startswith("left by") for name in await self.counts() - before)
        await self.use("batch")

    async def use(self, policy: str) -> None:
        answer = await self.http.post("/admin/policy", json={"policy": policy})
        assert answer.status_code == 200, answer.text

    async def until_units(self, wanted: list[list[int]]) -> None:
        while [unit["engines"] for unit in (await self.layout())["units"]] != wanted:
            await asyncio.sleep(0.05)

    async def layout(self) -> Any:
        return (await self.http.get("/admin/layout")).json()

    async def begin(self, jobs: list[Job]) -> str:
        """Begin a batch of requests; return its id."""
        lines = [any_line(f"line {n}", COMPLETIONS, **job.body) for n, job in enumerate(jobs)]
        file = await self.openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        window: Any = "24h"
        batch = await self.openai.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window=window
        )
        return batch.id

    async def end(self, batch_id: str, jobs: list[Job]) -> list[int]:
        """Wait for the end of a batch, each line of which has one answer; return what is wrong."""
        while (batch := await self.openai.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            await asyncio.sleep(0.05)
        assert batch.error_file_id is None
        text = (await self.openai.files.content(batch.output_file_id or "")).text
        answers = [msgspec.json.decode(one) for one in text.splitlines()]
        names = [f"line {number}" for number in range(len(jobs))]
        assert Counter(one["custom_id"] for one in answers) == Counter(names)
        tokens = {one["custom_id"]: tokens_of(one["response"]["body"]) for one in answers}
        pairs = enumerate(zip(jobs, names, strict=True))
        return [number for number, (job, name) in pairs if tokens[name] != self.expected[job]]

    async def counts(self) -> Counter[str]:
        """Return departures by their reason, and carried and all requests by their outcome."""
        await self.http.post("/admin/audit")  # answered after the reports that were on their way
        found: Counter[str] = Counter()
        page = (await self.http.get("/metrics")).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if (kind := COUNTED.get(sample.name)) is not None:
                    (label,) = sample.labels.values()
                    found[f"{kind} {label}"] += int(sample.value)
        return found


def tokens_of(answer: dict[str, Any]) -> list[int]:
    (choice,) = answer["choices"]
    return list(choice["token_ids"])


LEARNED: dict[Job, list[int]] = {}
"""What one engine alone makes of requests: the same on every node of this model, so that another
module's tests need not have the same requests computed again."""


@pytest.fixture(scope="module")
def expected() -> dict[Job, list[int]]:
    """Return what is filled with what one engine alone makes of requests."""
    return LEARNED


@pytest.fixture
async def client(node: ServedNode, expected: dict[Job, list[int]]) -> AsyncIterator[Client]:
    # One that is used again when the server is about to close it, for it was idle, may be reset.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        node.async_client(timeout=SECONDS, limits=limits) as http,
        openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", timeout=SECONDS) as api,
    ):
        yield Client(http, api, expected)


async def test_lines_are_handed_over_and_people_are_served_meanwhile(client: Client) -> None:
    await client.learn([*LINES, *PEOPLE])
    assert is_varied([tokens[:32] for tokens in client.expected.values()])
    before, right = await client.counts(), list[bool]()
    ended = asyncio.Event()

    async def people() -> None:
        for job in itertools.cycle(PEOPLE):
            tokens = await client.ask(job)
            if ended.is_set():
                return
            right.append(tokens == client.expected[job])

    batch = await client.begin(LINES)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(people())
        wrong = await client.end(batch, LINES)
        ended.set()
    counts = await client.counts() - before
    switches = (await client.layout())["switches"]
    assert wrong == []
    assert right
    assert all(right)
    assert counts["left by handover"] >= len(LINES) / 8
    assert (SPLIT, "load") in [(switch["after"], switch["reason"]) for switch in switches]


async def test_what_is_handed_over_without_its_kv_has_other_tokens(
    client: Client, damage: Path
) -> None:
    """The control: the comparison above sees whether the group has read what it decodes from."""
    await client.learn(LINES)
    before = await client.counts()
    damage.touch()
    try:
        wrong = await client.end(await client.begin(LINES), LINES)
    finally:
        damage.unlink()
    assert (await client.counts() - before)["left by handover"] > 0
    assert wrong


async def test_no_request_was_lost_and_the_books_are_right(client: Client) -> None:
    audit = (await client.http.post("/admin/audit")).json()
    assert (audit["clean"], audit["problems"]) == (True, [])
    policy = (await client.http.get("/admin/policy")).json()
    assert (policy["policy"], policy["errors"]) == ("batch", 0)
    ends = {name for name, count in (await client.counts()).items() if count and "request" in name}
    assert ends == {"request finished"}
