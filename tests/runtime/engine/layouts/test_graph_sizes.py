"""Which sizes of CUDA graphs there are beyond vLLM's own."""

from itertools import pairwise

import pytest

from shoal.runtime.engine.layouts.graph_sizes import SMALLEST_STEP, full_sizes, larger_sizes
from tests.runtime.engine.layouts.test_full_graphs import MIXED, OWN_MIXED
from tests.runtime.engine.sequence.test_capture_sizes import LARGER, OWN_SIZES


@pytest.mark.parametrize(
    ("largest", "most", "sizes"),
    [
        pytest.param(512, 2048, LARGER, id="as vLLM's end by default"),
        pytest.param(512, 700, [576, 640, 700], id="the last is no more than is wanted"),
        pytest.param(512, 512, [], id="enough"),
        pytest.param(1024, 500, [], id="more than enough"),
        pytest.param(1000, 1400, [1024, 1152, 1280, 1400], id="on round numbers"),
        pytest.param(16, 50, [24, 32, 40, 48, 50], id="few sequences"),
    ],
)
def test_sizes_go_on_where_vllms_end(largest: int, most: int, sizes: list[int]) -> None:
    assert larger_sizes(largest, most) == sizes


@pytest.mark.parametrize("largest", [1, 2, 60, 128, 250, 511, 512, 1024])
def test_padding_is_an_eighth_at_most(largest: int) -> None:
    sizes = [largest, *larger_sizes(largest, 2048)]
    assert sizes[-1] == 2048
    assert all(0 < after - size <= max(size / 8, SMALLEST_STEP) for size, after in pairwise(sizes))


@pytest.mark.parametrize(
    ("own", "most", "sizes"),
    [
        pytest.param(OWN_SIZES, 1024, MIXED, id="by default"),
        pytest.param(OWN_SIZES, 700, [*OWN_MIXED, 576, 640], id="short steps"),
        pytest.param(OWN_SIZES, 100, [16, 32, 48, 64, 80, 96], id="very short steps"),
        pytest.param([1, 2, 4, 8], 128, [64, 128], id="small graphs only"),
        pytest.param([16, 2048], 1024, [16], id="vLLM's own are larger"),
        pytest.param(
            OWN_SIZES,
            4096,
            [*MIXED, *range(1152, 2049, 128), *range(2304, 4097, 256)],
            id="long steps",
        ),
        pytest.param([16, 2048], 3000, [16, 2048, 2304, 2560, 2816, 3000], id="longer ones"),
    ],
)
def test_sizes_reach_up_to_the_longest_steps(own: list[int], most: int, sizes: list[int]) -> None:
    assert full_sizes(own, most) == sizes


def test_chosen_sizes_are_all_that_there_are() -> None:
    assert full_sizes([100, 8, 2048], 1024, chosen=True) == [8, 100]
    assert full_sizes([2048], 1024, chosen=True) == []
