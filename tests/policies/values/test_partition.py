"""Groups and partitions: every valid one is accepted as it is, every other is refused by name."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.values.partition import (
    Partition,
    PartitionError,
    degrees,
    groups_of,
    layout_name,
    leader_of,
    parse_partition,
    singles,
)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Partition, int, int]:
    """Draw a valid partition, its number of engines and the largest group allowed."""
    engines = draw(st.integers(1, 16))
    max_group = draw(st.sampled_from([1, 2, 4, 8]))
    groups = []
    first = 0
    while first < engines:
        fitting = [p for p in degrees(max_group) if first % p == 0 and first + p <= engines]
        size = draw(st.sampled_from(fitting))
        groups.append(tuple(range(first, first + size)))
        first += size
    return tuple(groups), engines, max_group


@given(partitions(), st.randoms(use_true_random=False))
def test_valid_partition_is_accepted_in_any_order(
    drawn: tuple[Partition, int, int], random: Random
) -> None:
    partition, engines, max_group = drawn
    units = [list(group) for group in partition]
    for unit in units:
        random.shuffle(unit)
    random.shuffle(units)
    assert parse_partition(units, engines=engines, max_group=max_group) == partition


@given(st.lists(st.lists(st.integers(-1, 4), max_size=4), max_size=4), st.integers(1, 4))
def test_what_is_accepted_is_a_partition_into_aligned_groups(
    units: list[list[int]], engines: int
) -> None:
    try:
        partition = parse_partition(units, engines=engines, max_group=4)
    except PartitionError:
        return
    assert sorted(itertools.chain(*partition)) == list(range(engines))
    for group in partition:
        assert group in groups_of(engines, len(group))
        assert len(group) in degrees(4)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        pytest.param(
            [[], [0, 1], [2, 3]],
            "a unit is empty: every unit names at least one engine",
            id="empty-unit",
        ),
        pytest.param(
            [[0, 1], [2, 4]],
            "unit [2, 4] names engine 4: this node has engines 0..3",
            id="unknown-engine",
        ),
        pytest.param(
            [[-1, 0], [1], [2], [3]],
            "unit [-1, 0] names engine -1: this node has engines 0..3",
            id="negative-engine",
        ),
        pytest.param(
            [[0, 1, 2], [3]],
            "unit [0, 1, 2] has 3 engines: allowed sizes are [1, 2]",
            id="no-power-of-two",
        ),
        pytest.param(
            [[0, 1, 2, 3]],
            "unit [0, 1, 2, 3] has 4 engines: allowed sizes are [1, 2]",
            id="larger-than-max-group",
        ),
        pytest.param(
            [[0], [1, 2], [3]],
            "unit [1, 2] is not an aligned, adjacent group of 2 engines",
            id="not-aligned",
        ),
        pytest.param(
            [[0, 2], [1], [3]],
            "unit [0, 2] is not an aligned, adjacent group of 2 engines",
            id="not-adjacent",
        ),
        pytest.param(
            [[0, 0], [1], [2], [3]],
            "unit [0, 0] is not an aligned, adjacent group of 2 engines",
            id="engine-twice-in-a-unit",
        ),
        pytest.param(
            [[0, 1], [1], [2, 3]],
            "engine 1 is in more than one unit",
            id="engine-in-two-units",
        ),
        pytest.param(
            [[0, 1]],
            "engines [2, 3] are in no unit: the units must cover every engine",
            id="engines-left-out",
        ),
        pytest.param(
            [],
            "engines [0, 1, 2, 3] are in no unit: the units must cover every engine",
            id="no-units",
        ),
    ],
)
def test_refused_partition_is_named(units: list[list[int]], message: str) -> None:
    with pytest.raises(PartitionError) as refused:
        parse_partition(units, engines=4, max_group=2)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("max_group", "expected"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (8, (1, 2, 4, 8))]
)
def test_degrees_are_the_powers_of_two_up_to_the_largest(
    max_group: int, expected: tuple[int, ...]
) -> None:
    assert degrees(max_group) == expected


def test_groups_of_leaves_a_remainder_out() -> None:
    assert groups_of(5, 2) == ((0, 1), (2, 3))
    assert groups_of(3, 4) == ()


def test_singles_is_the_partition_into_engines() -> None:
    assert singles(3) == groups_of(3, 1) == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("group", "name"),
    [((3,), "dp"), ((2, 3), "tp2"), ((0, 1, 2, 3), "tp4"), (tuple(range(8)), "tp8")],
)
def test_layout_is_named_by_the_size_of_the_group(group: tuple[int, ...], name: str) -> None:
    assert layout_name(group) == name


def test_the_first_engine_leads() -> None:
    assert leader_of((2, 3)) == 2
