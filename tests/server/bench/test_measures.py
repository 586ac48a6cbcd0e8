"""The arithmetic of the measures; what they measure is no test's business."""

import pytest

from server.bench.client import Answer
from server.bench.measures import Sizes, decode_seconds, placed, spread
from server.bench.modes import ways
from server.bench.systems import SHOAL, System, dp_layout, tp_layout


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
