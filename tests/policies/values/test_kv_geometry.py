"""A block has the same bytes in every layout."""

import pytest

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import DP, Layout

POWERS = (1, 2, 4, 8)


@pytest.mark.parametrize("heads", POWERS)
@pytest.mark.parametrize("tp", POWERS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_a_block_has_the_same_bytes_in_every_layout(heads: int, tp: int, pp: int) -> None:
    layers, of_each, tokens = KvGeometry(24, heads, 32).block(Layout(tp=tp, pp=pp))
    assert layers == 24 // pp
    assert of_each == max(1, heads // tp)
    assert layers * of_each * tokens == 24 * heads * 32


def test_dp_has_all_heads_and_layers() -> None:
    assert KvGeometry(24, 8, 32).block(DP) == (24, 8, 32)


@pytest.mark.parametrize(
    ("pp", "tokens"),
    [
        pytest.param(2, 32, id="13 and 12 layers: twice the tokens do not fit"),
        pytest.param(4, 96, id="at most 7 layers"),
    ],
)
def test_of_uneven_stages_the_largest_decides(pp: int, tokens: int) -> None:
    geometry = KvGeometry(25, 8, 32)
    layers, heads, of_a_block = geometry.block(Layout(pp=pp))
    assert (heads, of_a_block) == (8, tokens)
    assert layers * of_a_block <= 25 * 32
