"""Answers over HTTP are stock vLLM's, whatever is asked for and however the layout is switched.

Two real engines go from DP to TP2 and back, over and over, while 16 requests at once run on them;
each treatment of running requests has its turn. Stock ``vllm serve`` has answered the same requests
before. ``SHOAL_PARITY_CASES`` in the environment says how many different ones there are.

No clock drives the switches. One follows another as soon as a short request has had its tokens in
the layout at hand: every layout gets to work, however slow the machine is.
"""

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from shoal.runtime.protocol.messages import Fallback, Treatment
from tests.runtime.engine.prompts import make_model
from tests.server.damage import VARIABLE, damaging_shoal
from tests.server.node import ServedNode, served_node
from tests.server.parity import KINDS, MODEL, Answer, Case, ask, differences, draw_case, outputs_of
from tests.server.stock_server import stock_server
from tests.variety import distinct, ends_in_loop

CASES = int(os.environ.get("SHOAL_PARITY_CASES", "64"))
AT_ONCE = 16
ATTEMPTS = 5
ALONE, TOGETHER = [[0], [1]], [[0, 1]]
PULSE = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
"""What is waited for between two switches."""

OPTIONS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", "--seed", "0"),
    *("--max-model-len", "1024", "--max-num-seqs", str(AT_ONCE)),
    *("--kv-cache-memory-bytes", str(16 << 20), "--enable-auto-tool-choice"),
    *("--tool-call-parser", "hermes"),
)
"""What both servers are started with."""
STEP_TOKENS = 64
"""Of Shoal alone: longer prompts are computed in parts. Stock would die of those with a seed."""

Expected = dict[int, tuple[Case, Answer]]
"""Requests and what stock vLLM answers, by number."""


class Job(NamedTuple):
    """A request, and how it is sent."""

    case: Case
    stream: bool


@dataclass
class Seen:
    """What came of requests while the layout was switched."""

    answers: list[tuple[Job, Answer]] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    """How often switches have done what to a running request."""
    layouts: set[str] = field(default_factory=set)
    """Layouts of the units that requests were first sent to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    directory = tmp_path_factory.mktemp("stock")
    with stock_server(directory, "--model", str(model), *OPTIONS) as transport:
        return asyncio.run(_expect(transport))


async def _expect(transport: httpx.AsyncHTTPTransport) -> Expected:
    limits, timeout = httpx.Limits(max_connections=AT_ONCE), 300
    async with httpx.AsyncClient(
        transport=transport, base_url="http://stock", timeout=timeout, limits=limits
    ) as http:
        steady = await asyncio.gather(*(_draw_steady(http, number) for number in range(CASES)))
    return {case.number: (case, answer) for case, answer in steady}


async def _draw_steady(http: httpx.AsyncClient, number: int) -> tuple[Case, Answer]:
    """Return a request none of whose tokens is as good as another in fp32, and its answer."""
    for attempt in range(ATTEMPTS):
        case = draw_case(number, attempt)
        answer, _ = await ask(http, case, stream=False)
        again, _ = await ask(http, case.handicapped(answer), stream=False)
        if outputs_of(again) == outputs_of(answer):
            return case, answer
    raise AssertionError(f"no steady answer to a request like {case}")


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that demands damage (see ``damaging_shoal``)."""
    return tmp_path_factory.mktemp("damage") / "demanded"


@pytest.fixture(scope="module")
def node(
    model: Path, damage: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedNode]:
    with served_node(
        tmp_path_factory.mktemp("cache"),
        *("--model", str(model), "--engines", "2", *OPTIONS),
        *("--max-num-batched-tokens", str(STEP_TOKENS)),
        real=True,
        main=damaging_shoal,
        **{VARIABLE: str(damage)},
    ) as served:
        yield served


async def run_under_switches(node: ServedNode, jobs: Sequence[Job], treatment: Treatment) -> Seen:
    """Send requests, 16 at once, and switch from DP to TP2 and back until all are answered."""
    seen = Seen()
    waiting = iter(jobs)
    async with node.async_client() as http, asyncio.TaskGroup() as tasks:

        async def work() -> None:
            for job in waiting:
                answer, headers = await ask(http, job.case, stream=job.stream)
                seen.answers.append((job, answer))
                seen.layouts.update(headers["x-shoal-layout"].split(";"))

        working = [tasks.create_task(work()) for _ in range(AT_ONCE)]
        for units in itertools.cycle((TOGETHER, ALONE)):
            pulse = await http.post("/v1/completions", json=PULSE)
            assert pulse.status_code == 200, pulse.text
            await switch(http, units, treatment, seen)
            if units == ALONE and all(task.done() for task in working):
                break
    return seen


async def switch(
    http: httpx.AsyncClient, units: list[list[int]], treatment: Treatment, seen: Seen
) -> None:
    answer = await http.post("/admin/layout", json={"units": units, "preempt": treatment})
    assert answer.status_code == 200, answer.text
    done = answer.json()["requests"]
    # A prompt's log probabilities are in the unit's runners until they are sent together.
    assert done.pop("recomputed").keys() <= {Fallback.UNREADABLE}
    seen.requests.update(done)


def wrong_answers(seen: Seen, expected: Expected) -> list[str]:
    """Return of every answer that is not stock's the first difference."""
    wrong = []
    for job, answer in seen.answers:
        _, stock = expected[job.case.number]
        if job.stream:
            # With ``echo`` they are among the choice's own, and an answer in one piece has both.
            stock = {**stock, "prompt_logprobs": []}
        wrong += [f"{job}{where}" for where in differences(answer, stock)[:1]]
    return wrong


TREATED = {
    Treatment.SEQUENTIAL: {"drained"},
    Treatment.CARRY: {"carried"},
    Treatment.SOFT: {"moved"},
    Treatment.HARD: {"paused", "resumed"},
}
"""What switches do to running requests."""


def test_stock_answers_vary_and_none_is_another_requests(expected: Expected) -> None:
    """Another prompt or seed would show, and so would what looks back on too little KV."""
    for kind in KINDS:
        answers = [answer for case, answer in expected.values() if case.kind == kind]
        assert all(differences(one, other) for one, other in itertools.combinations(answers, 2))
    chats = [answer for case, answer in expected.values() if "tools" in case.body]
    for choice in itertools.chain(*(answer["choices"].values() for answer in chats)):
        ((name, arguments),) = choice["calls"].values()
        assert (name, list(json.loads(arguments))) == ("note", ["word"])
    assert chats
    free = [
        answer for case, answer in expected.values() if case.kind not in ("penalties", "grammar")
    ]
    outputs = list(itertools.chain(*map(outputs_of, free)))
    assert not any(map(ends_in_loop, outputs))
    assert sum(map(distinct, outputs)) > 0.8 * sum(map(len, outputs))


@pytest.mark.parametrize("treatment", Treatment)
def test_answers_are_stocks_under_switches(
    node: ServedNode, expected: Expected, treatment: Treatment
) -> None:
    """Each treatment has requests of its own, as many of every kind; they are sent twice."""
    share = CASES // len(Treatment)
    first = share * list(Treatment).index(treatment)
    cases = [expected[number][0] for number in range(first, first + share)]
    jobs = [Job(case, stream and case.streams) for stream in (False, True) for case in cases]
    seen = asyncio.run(run_under_switches(node, jobs, treatment))
    assert wrong_answers(seen, expected) == []
    assert len(seen.answers) == len(jobs)
    assert {name for name, count in seen.requests.items() if count} == TREATED[treatment]
    assert seen.layouts == {"dp", "tp2"}


def test_nothing_was_lost_meanwhile(node: ServedNode) -> None:
    with node.client() as http:
        audit = http.post("/admin/audit").json()
    assert (audit["clean"], audit["problems"]) == (True, [])


def test_damaged_kv_would_show(node: ServedNode, expected: Expected, damage: Path) -> None:
    """Negative control; it comes last, since what is cached is damaged then."""
    cases = [case for case, _ in expected.values() if case.kind in ("greedy", "logprobs")]
    fresh = [replace(case, body={**case.body, "cache_salt": "fresh"}) for case in cases]
    jobs = [Job(case, stream=False) for case in fresh[:AT_ONCE]]
    whole = asyncio.run(run_under_switches(node, jobs, Treatment.SEQUENTIAL))
    assert wrong_answers(whole, expected) == []
    damage.touch()
    damaged = asyncio.run(run_under_switches(node, jobs, Treatment.HARD))
    assert len(wrong_answers(damaged, expected)) > len(jobs) / 2
