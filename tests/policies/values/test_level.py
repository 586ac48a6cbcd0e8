"""Levels of memory: which there are, and what they leave to be read from others."""

import pytest

from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.level import WHOLE, Level, levels_of, slowest


def test_a_node_has_a_level_for_each_pipeline_of_engines_alone() -> None:
    assert levels_of(1, layouts_up_to(4, 4)) == [WHOLE]
    assert levels_of(2, layouts_up_to(4)) == [WHOLE, Level(2)]
    assert levels_of(2, layouts_up_to(4, 2)) == [WHOLE, Level(2), Level(2, 2)]
    assert levels_of(4, layouts_up_to(4, 4)) == [WHOLE, Level(4), Level(4, 2), Level(4, 4)]


@pytest.mark.parametrize(
    ("level", "shares"),
    [
        (WHOLE, [1.0, 1.0, 1.0, 1.0]),
        (Level(4), [0.0, 0.0, 0.0, 0.0]),
        (Level(4, 2), [0.5, 1.0, 0.0, 0.0]),
        (Level(4, 4), [0.25, 0.0, 1.0, 0.0]),
    ],
)
def test_which_layers_no_member_reads(level: Level, shares: list[float]) -> None:
    layouts = [DP, Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)]
    assert [level.whole_share(layout) for layout in layouts] == shares


def test_a_unit_is_as_slow_as_the_member_that_reads_most() -> None:
    assert slowest([WHOLE, Level(2, 2)]) == Level(2, 2)
    assert slowest([Level(2, 2), Level(2), WHOLE]) == Level(2)
    assert slowest([Level(2, 2), Level(2, 4)]) == Level(2, 4)


def test_levels_have_names() -> None:
    assert [level.name for level in (WHOLE, Level(2), Level(2, 4))] == [
        "1",
        "2",
        "2 with whole stages of pp4",
    ]
