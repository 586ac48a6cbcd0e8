"""Groups and partitions: every valid one is accepted as it is, every other is refused by name."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.values.layouts import Layout, alone, layouts_up_to
from shoal.policies.values.partition import (
    Partition,
    PartitionError,
    parse_partition,
    singles,
    units_of,
)
from tests.units import pp, tp


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Partition, int, int]:
    """Draw a valid partition, its number of engines and the largest group allowed."""
    engines = draw(st.integers(1, 16))
    max_group = draw(st.sampled_from([1, 2, 4, 8]))
    groups = []
    first = 0
    while first < engines:
        sizes = [layout.world_size for layout in layouts_up_to(max_group)]
        fitting = [p for p in sizes if first % p == 0 and first + p <= engines]
        size = draw(st.sampled_from(fitting))
        groups.append(tp(*range(first, first + size)))
        first += size
    return tuple(groups), engines, max_group


@given(partitions(), st.randoms(use_true_random=False))
def test_valid_partition_is_accepted_in_any_order(
    drawn: tuple[Partition, int, int], random: Random
) -> None:
    partition, engines, max_group = drawn
    units = [list(unit.engines) for unit in partition]
    for engines_of_unit in units:
        random.shuffle(engines_of_unit)
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
    assert sorted(itertools.chain(*(unit.engines for unit in partition))) == list(range(engines))
    for unit in partition:
        assert unit in units_of(engines, unit.layout)
        assert unit.layout in layouts_up_to(4)


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


def test_units_of_leaves_a_remainder_out() -> None:
    assert units_of(5, Layout(tp=2)) == (tp(0, 1), tp(2, 3))
    assert units_of(3, Layout(tp=4)) == ()


def test_units_of_a_layout_have_it() -> None:
    assert {unit.layout for unit in units_of(4, Layout(pp=2))} == {Layout(pp=2)}


def test_singles_is_the_partition_into_engines() -> None:
    assert singles(3) == units_of(3, Layout()) == (alone(0), alone(1), alone(2))


def test_a_unit_is_in_the_layout_that_is_asked_for() -> None:
    names = {(0, 1): "pp2", (2, 3): "tp2", (4, 5, 6, 7): "tp2-pp2"}
    units = [[1, 0], [2, 3], [4, 5, 6, 7]]
    partition = parse_partition(units, engines=8, max_group=4, max_pp=2, names=names)
    assert partition == (pp(0, 1), tp(2, 3), pp(4, 5, 6, 7, stages=2))
    plain = parse_partition(units, engines=8, max_group=4, max_pp=2)
    assert plain == (tp(0, 1), tp(2, 3), tp(4, 5, 6, 7))


@pytest.mark.parametrize(
    ("name", "max_pp", "allowed"),
    [("pp2", 1, "tp2"), ("pp4", 4, "pp2, tp2"), ("dp", 2, "pp2, tp2"), ("PP2", 2, "pp2, tp2")],
)
def test_a_layout_that_the_node_has_not_is_refused_by_name(
    name: str, max_pp: int, allowed: str
) -> None:
    with pytest.raises(PartitionError, match=rf"'{name}': layouts of 2 engines are {allowed} on"):
        parse_partition([[0, 1]], engines=2, max_group=2, max_pp=max_pp, names={(0, 1): name})
