"""Requests carried from layout to layout: over a node that is made up, and over fake engines."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from shoal.loadgen.bench import comparison_tables
from shoal.loadgen.bench.carry_measure import (
    LEAD_TOKENS,
    bystanders,
    carried,
    carry_steps,
    prefill_tokens,
    prefix_hits,
)
from shoal.loadgen.bench.compare import run
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.stream_processes import Running
from shoal.loadgen.bench.systems import SHOAL, System, dp_layout, tp_layout
from shoal.loadgen.bench.token_client import Answer, Client, Prompt, RequestFailedError, Stream
from tests.loadgen.bench.test_campaign import COMMAND, campaign, still_running

SIZES = Sizes(
    prompt_repeats=2,
    pause_seconds=0.0,
    carry_cases=((4, 16),),
    carry_switches=3,
    carry_tokens=100_000,
    carry_steps=2,
)


def system(engines: int, *options: str) -> System:
    layouts = (dp_layout(engines, pinned=False), tp_layout(engines))
    return System(SHOAL, ("serve", *options), layouts, switches=True)


class Node:
    """Engines as a client sees them. A token is the sum of prompt and position.

    Args:
        engines: their number.
        damages: the switch after which the first stream goes on with other tokens.
        rounding: what a token of a group that nothing disturbs has more than one of an engine.
        again: prompt tokens that each switch computes again.
    """

    def __init__(
        self, engines: int = 2, *, damages: int | None = None, rounding: int = 0, again: int = 0
    ) -> None:
        self._rounding, self._again, self._damages = rounding, again, damages
        self.units = [[engine] for engine in range(engines)]
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[tuple[bool, list[int]]] = []
        """Requests of one token: whether the engines were together, and the prompt."""
        self.prompts: list[list[int]] = []
        self.carries, self.streams = 0, 0
        self.fails_after: int | None = None
        """Tokens of a stream after which it fails."""

    @property
    def together(self) -> bool:
        return len(self.units[0]) > 1

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        assert path == "/admin/layout"
        if method == "GET":
            busy = {"running": self.streams, "paused": 0}
            return {"units": [{"engines": unit, **busy} for unit in self.units]}
        self.bodies.append(body)
        self.units = body["units"]
        count = self.streams if body["preempt"] == "carry" else 0
        self.carries += body["preempt"] == "carry"
        await asyncio.sleep(0.001)
        return {
            "duration_seconds": 0.001,
            "requests": {
                "carried": count - 1,
                "recomputed": {"no_room": 1},
                "moved": 0,
                "paused": 0,
            },
            "carried_bytes": 100,
            "carry_seconds": 0.0005,
        }

    async def text(self, path: str) -> str:
        assert path == "/metrics"
        computed = 64 + self._again * self.carries
        return (
            f'shoal_step_tokens_total{{engine="0",kind="prefill"}} {computed}\n'
            "# TYPE shoal_carry_seconds histogram\n"
            f'shoal_carry_seconds_count{{phase="copy"}} {2 * self.carries}\n'
            f'shoal_carry_seconds_sum{{phase="copy"}} {0.5 * self.carries}\n'
            f'shoal_carry_seconds_count{{phase="import"}} {3 * self.carries}\n'
            f'shoal_carried_bytes_total{{path="peer"}} {100 * self.carries}\n'
            f'shoal_carried_bytes_total{{path="host"}} {10 * self.carries}\n'
        )

    async def follow(self, prompt: list[int], tokens: int, stream: Stream) -> None:
        assert not self.together
        stream.begin(str(self.streams % len(self.units)))
        self.prompts.append(prompt)
        self.streams += 1
        number = self.streams
        try:
            for position in range(tokens):
                await asyncio.sleep(0.0005)
                if position == self.fails_after:
                    raise RequestFailedError("the stream ended with a fault")
                token = sum(prompt) + position + (number in self._damaged())
                stream.add(time.perf_counter(), [token])
        finally:
            self.streams -= 1

    async def token_ids(self, prompt: list[int], tokens: int) -> list[int]:
        assert self.streams == 0, "nothing disturbs the tokens that count as right"
        first = sum(prompt) + self._rounding * self.together
        return list(range(first, first + tokens))

    def _damaged(self) -> range:
        """Return the numbers of the streams that have other tokens since a switch."""
        damaged = self._damages is not None and self.carries >= self._damages
        return range(1, 2) if damaged else range(0)

    async def generate(self, prompt: list[int], tokens: int, *, stream: bool) -> Answer:
        assert (tokens, stream, self.streams) == (1, True, 1)
        self.asked.append((self.together, prompt))
        return Answer(sent=0.0, ended=9.0, progress=[(float(len(self.asked)), 1)])


@dataclass
class OwnStream:
    """A stream that this process reads."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    unit: str | None = None

    @property
    def count(self) -> int:
        return len(self.tokens)

    def begin(self, unit: str | None) -> None:
        self.unit = unit

    def add(self, now: float, tokens: Sequence[int]) -> None:
        self.times.append(now)
        self.tokens += tokens


@dataclass(frozen=True)
class Here:
    """Streams that this process reads."""

    streams: list[OwnStream]
    tasks: list[asyncio.Task[None]]

    def one_has_ended(self) -> bool:
        ended = [task for task in self.tasks if task.done()]
        for task in ended:
            task.result()
        return bool(ended)


@asynccontextmanager
async def here(client: Client, prompts: Sequence[Prompt], tokens: int) -> AsyncIterator[Running]:
    streams = [OwnStream() for _ in prompts]
    both = zip(prompts, streams, strict=True)
    tasks = [asyncio.create_task(client.follow(prompt, tokens, stream)) for prompt, stream in both]
    try:
        yield Here(streams, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def as_client(node: Node) -> Client:
    return cast(Client, node)


async def case(node: Node, sizes: Sizes = SIZES) -> dict[str, Any]:
    ((requests, tokens),) = sizes.carry_cases
    return await carried(
        as_client(node),
        system=system(2),
        sizes=sizes,
        requests=requests,
        prompt_tokens=tokens,
        following=here,
    )


async def test_streams_are_carried_there_and_back_and_keep_their_tokens() -> None:
    node = Node()
    found = await case(node)
    carries = [body["units"] for body in node.bodies if body["preempt"] == "carry"]
    assert carries == [[[0, 1]], [[0], [1]]] * 3
    assert {body["preempt"] for body in node.bodies} == {"carry", "sequential"}
    assert (found["requests"], found["prompt_tokens"]) == (4, 16)
    for direction in ("bind", "release"):
        figures = found[direction]
        assert (figures["switches"], figures["carried"], figures["carried_bytes"]) == (3, 9, 300)
        assert figures["recomputed"] == {"no_room": 3}
        assert figures["gap"]["max"] > 0
        assert figures["step"] > 0
    assert found["differing"] == found["differing_without_switch"] == 0
    assert found["prefilled_again"] == 0
    assert found["copies"] == {"count": 12, "bytes": 660, "seconds": 3.0}, "of six switches"
    assert found["compared_tokens"] >= 4 * (LEAD_TOKENS + 6 * SIZES.carry_steps)
    assert found["distinct_tokens"] >= LEAD_TOKENS
    assert (node.together, node.streams) == (False, 0), "the node is left as it was"


async def test_a_stream_with_other_tokens_after_a_switch_is_counted() -> None:
    assert (await case(Node(damages=2)))["differing"] == 1


async def test_other_requests_run_after_a_lot_of_switches() -> None:
    """Otherwise requests would be longer from switch to switch, and not of the case's length."""
    node, whole = Node(), Node(damages=1)
    found = await case(node, msgspec.structs.replace(SIZES, carry_switches=5, carry_lot=2))
    assert found["bind"]["switches"] == found["release"]["switches"] == 5
    assert len(node.prompts) == 3 * 4
    assert len({tuple(prompt) for prompt in node.prompts}) == 3 * 4
    assert found["copies"]["count"] == 20
    once = await case(whole, msgspec.structs.replace(SIZES, carry_switches=5, carry_lot=5))
    assert found["longest"] < once["longest"]


async def test_what_layouts_round_differently_is_told_beside() -> None:
    found = await case(Node(rounding=1))
    assert (found["differing"], found["differing_without_switch"]) == (0, 4)


async def test_prompt_tokens_that_switches_computed_again_are_counted() -> None:
    assert (await case(Node(again=5)))["prefilled_again"] == 6 * 5


async def test_a_case_ends_when_a_stream_has_all_of_its_tokens() -> None:
    many = {"carry_switches": 10_000, "carry_lot": 10_000}
    sizes = msgspec.structs.replace(SIZES, **many, carry_tokens=LEAD_TOKENS + 60)
    found = await case(Node(), sizes)
    assert 0 < found["bind"]["switches"] < 60
    assert found["bind"]["switches"] - found["release"]["switches"] in {0, 1}
    assert found["compared_tokens"] <= 4 * sizes.carry_tokens


async def test_a_stream_that_fails_fails_the_measure_and_leaves_no_other() -> None:
    node = Node()
    node.fails_after = LEAD_TOKENS + 5
    with pytest.raises(RequestFailedError, match="a fault"):
        await case(node)
    assert node.streams == 0


async def test_bystanders_are_the_streams_of_engines_that_stay_alone() -> None:
    node = Node(engines=4)
    sizes = msgspec.structs.replace(SIZES, carry_cases=((8, 16),))
    found = await bystanders(as_client(node), system=system(4), sizes=sizes, following=here)
    carries = [body["units"] for body in node.bodies if body["preempt"] == "carry"]
    assert carries == [[[0, 1], [2], [3]], [[0], [1], [2], [3]]] * 3
    for direction in ("bind", "release"):
        assert (found[direction]["switches"], found[direction]["streams"]) == (3, 4)
        assert found[direction]["ordinary"] > 0


async def test_a_prefix_is_asked_for_where_it_was_carried_then_repeated_then_a_new_one() -> None:
    node = Node()
    found = await prefix_hits(as_client(node), system=system(2), sizes=SIZES, following=here)
    # The node's answers take 1 s, 2 s and so on.
    assert found == {"prompt_tokens": 16, "carried": 2.5, "repeated": 3.5, "new": 4.5}
    assert all(together for together, _ in node.asked)
    first, again, new = [prompt for _, prompt in node.asked[:3]]
    assert first == again == node.prompts[0]
    assert new != first
    assert node.prompts[1] != node.prompts[0], "every round has a prompt of its own"


def test_parts_are_those_for_which_the_system_has_what_they_need() -> None:
    caching = "--enable-prefix-caching"
    names = {
        "carry 8x4096": (system(2), 8, 4096),
        "carry 64x1024": (system(2, "--no-enable-prefix-caching"), 64, 1024),
    }
    for name, (one, requests, tokens) in names.items():
        sizes = msgspec.structs.replace(SIZES, carry_cases=((requests, tokens),))
        assert list(carry_steps(one, sizes)) == [name]
    assert list(carry_steps(system(4, caching), SIZES)) == [
        "carry 4x16",
        "carry bystanders",
        "carry prefix-hit",
    ]
    nothing = msgspec.structs.replace(SIZES, carry_cases=())
    assert carry_steps(system(4, caching), nothing) == {}


def test_prefills_of_all_engines_and_layouts_are_summed() -> None:
    page = (
        "# TYPE shoal_step_tokens_total counter\n"
        'shoal_step_tokens_total{engine="0",layout="dp",kind="prefill"} 30\n'
        'shoal_step_tokens_total{engine="0",layout="tp2",kind="prefill"} 12\n'
        'shoal_step_tokens_total{engine="1",layout="dp",kind="decode"} 500\n'
    )
    assert prefill_tokens(page) == 42


@pytest.mark.usefixtures("preloaded_servers")
def test_fake_engines_carry_their_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # With longer steps no request ends before its client has seen the last switch.
    slower = ("--fake-step-ms", "10")
    node = replace(system(4), command=(*COMMAND, "--engines", "4", *slower))
    one = campaign(tmp_path, [node], ("carry",))
    one.results.sizes = msgspec.structs.replace(
        SIZES, carry_cases=((8, 64),), carry_tokens=1900, pause_seconds=0.005
    )
    assert run(one, 550.0)
    assert still_running(tmp_path) == []
    kept = one.results.systems[SHOAL]
    assert kept.failures == {}
    assert list(kept.measures) == ["carry 8x64", "carry bystanders"]
    found = kept.measures["carry 8x64"]
    for direction in ("bind", "release"):
        assert found[direction]["switches"] == 3
        assert found[direction]["carried"] == 3 * 8
        assert found[direction]["recomputed"] == {}
        assert found[direction]["moved"] == found[direction]["paused"] == 0
        assert found[direction]["beyond_step"]["p50"] < found[direction]["gap"]["p50"]
    assert (found["differing"], found["differing_without_switch"]) == (0, 0)
    assert found["prefilled_again"] == 0
    assert found["copies"]["count"] >= 6 * 4, "between the group and each of four engines"
    assert kept.measures["carry bystanders"]["bind"]["streams"] == 4
    assert "8 x 64: release" in comparison_tables.markdown(one.results)
