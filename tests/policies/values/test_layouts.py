"""Layouts and units are values with names, places and an order."""

import msgspec
import pytest

from shoal.policies.values.layouts import DP, Layout, Unit, alone, layouts_up_to, tensor_parallel


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (DP, "dp"),
        (Layout(tp=2), "tp2"),
        (Layout(tp=16), "tp16"),
        (Layout(pp=2), "pp2"),
        (Layout(tp=2, pp=2), "tp2-pp2"),
        (Layout(tp=4, ep=4), "tp4-ep4"),
    ],
)
def test_a_layout_has_a_name(layout: Layout, name: str) -> None:
    assert layout.name == name


def test_members_are_numbered_stage_by_stage() -> None:
    layout = Layout(tp=2, pp=2)
    assert layout.world_size == 4
    assert [layout.place(member) for member in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_first_member_of_the_last_stage_answers() -> None:
    assert DP.answering_member == 0
    assert Layout(tp=4).answering_member == 0
    assert Layout(tp=2, pp=2).answering_member == 2


def test_the_same_engines_in_another_layout_are_another_unit() -> None:
    assert tensor_parallel([0, 1]) == Unit((0, 1), Layout(tp=2))
    assert tensor_parallel([0, 1]) != Unit((0, 1), Layout(pp=2))
    assert (
        len({tensor_parallel([0, 1]), Unit((0, 1), Layout(pp=2)), Unit((0, 1), Layout(tp=2))}) == 2
    )


def test_one_engine_is_a_unit_and_no_group() -> None:
    assert tensor_parallel([3]) == alone(3)
    assert not alone(3).is_group
    assert tensor_parallel([2, 3]).is_group
    assert tensor_parallel([2, 3]).leader == 2


@pytest.mark.parametrize("unit", [alone(1), tensor_parallel(range(4)), Unit((2, 3), Layout(pp=2))])
def test_units_travel_between_processes(unit: Unit) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(unit), type=Unit) == unit


def test_units_are_sorted_by_their_first_engine() -> None:
    units = [tensor_parallel([2, 3]), alone(1), alone(0)]
    assert sorted(units) == [alone(0), alone(1), tensor_parallel([2, 3])]


def test_a_node_forms_powers_of_two() -> None:
    assert layouts_up_to(1) == (DP,)
    assert layouts_up_to(6) == (DP, Layout(tp=2), Layout(tp=4))


def test_a_node_with_stages_has_its_widest_layout_without_stages_last() -> None:
    names = [layout.name for layout in layouts_up_to(4, 2)]
    assert names == ["dp", "pp2", "tp2", "tp2-pp2", "tp4"]
    assert [layout.name for layout in layouts_up_to(4, 4)][3:] == ["pp4", "tp2-pp2", "tp4"]
