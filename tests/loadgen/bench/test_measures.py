"""The arithmetic of the measures; what they measure is no test's business."""

import random
from typing import Any

import pytest

from shoal.loadgen.bench import measures
from shoal.loadgen.bench.measures import Bench, Sizes, decode_seconds, placed, spread
from shoal.loadgen.bench.modes import ways
from shoal.loadgen.bench.systems import SHOAL, System, dp_layout, tp_layout
from shoal.loadgen.bench.token_client import Answer


def answer(progress: list[tuple[float, int]], unit: str | None = None) -> Answer:
    return Answer(sent=0.0, ended=100.0, progress=progress, unit=unit)


def test_decode_time_leaves_out_the_beginning_and_the_end() -> None:
    # Slow until token 8, then 2 ms each until 14, then slow again.
    times = [(float(n), n) for n in range(1, 9)]
    times += [(8 + 0.002 * n, 8 + n) for n in range(1, 7)] + [(20.0, 15), (30.0, 16)]
    assert decode_seconds(answer(times), 16) == pytest.approx(0.002)


def test_chunks_of_several_tokens_count_as_several() -> None:
    assert decode_seconds(answer([(1.0, 1), (2.0, 10), (2.6, 16)]), 16) == pytest.approx(0.1)


def test_a_streamed_answer_begins_with_its_first_chunk() -> None:
    assert answer([(1.5, 1), (2.0, 2)]).first == 1.5
    assert answer([]).first == 100.0


def test_placement_is_counted_where_the_server_tells() -> None:
    assert placed([answer([], "0"), answer([], "1"), answer([], "0")]) == {"0": 2, "1": 1}
    assert placed([answer([])]) == {}


async def test_the_first_requests_of_a_layout_are_timed_one_by_one_on_its_slowest_unit() -> None:
    class Warming:
        """Answers at once, but for the first request of each unit."""

        def __init__(self) -> None:
            self.asked = [0, 0]

        async def generate(self, prompt: Any, output: int, *, stream: bool, rank: int) -> Answer:
            self.asked[rank] += 1
            first = 0.25 * (rank + 1) if self.asked[rank] == 1 else 0.01
            assert stream
            return Answer(sent=0.0, ended=9.0, progress=[(first, 1), (first + 1, output)], unit="")

    client: Any = Warming()
    layout = dp_layout(2, pinned=True)
    system = System(SHOAL, ("serve",), (layout,), switches=True)
    found = await measures.first(Bench(client, system, layout, Sizes(), random.Random(0)))
    assert (found["first"], found["last"]) == (0.5, 0.01)
    assert client.asked == [measures.FIRST_ROUNDS] * 2


def test_a_spread_is_median_99th_percentile_and_largest() -> None:
    found = spread([float(n) for n in range(101)])
    assert found == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    assert spread([]) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), ["dp", "tp4"]), (("--max-sp", "4"), ["dp", "tp4", "sp4", "shift"])],
)
def test_a_group_works_as_sp_where_it_may(options: tuple[str, ...], expected: list[str]) -> None:
    layouts = (dp_layout(4, pinned=False), tp_layout(4))
    system = System(SHOAL, ("serve", *options), layouts, switches=True)
    assert [way.name for way in ways(system, Sizes())] == expected


@pytest.mark.parametrize(
    ("tokens", "repeats"), [(16, 32), (512, 32), (600, 27), (1024, 16), (4096, 5), (65536, 5)]
)
async def test_short_prompts_are_repeated_more_often(tokens: int, repeats: int) -> None:
    class Slower:
        """Takes longer each time."""

        def __init__(self) -> None:
            self.asked = 0

        async def generate(self, prompt: Any, output: int, *, stream: bool, rank: Any) -> Answer:
            assert (len(prompt), output, stream, rank) == (tokens, 1, True, None)
            self.asked += 1
            return Answer(sent=0.0, ended=99.0, progress=[(float(self.asked), 1)], unit="")

    layout = tp_layout(2)
    system = System(SHOAL, ("serve",), (layout,), switches=True)
    sizes = Sizes(prompts=(tokens,))
    found = await measures.prefill(Bench(Slower(), system, layout, sizes, random.Random(0)))  # type: ignore[arg-type]
    # The first one is left out.
    last = repeats + 1
    assert found == {
        str(tokens): {"ttft": (2 + last) / 2, "lowest": 2.0, "highest": float(last)},
    }
