"""Compiled graphs that are cached call groups by name: each layout has names of its own, always."""

import itertools

import pytest

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.groups.communicators import number_of

POWERS = (1, 2, 4, 8)


@pytest.mark.parametrize(("tp", "number"), [(1, 0), (2, 1), (4, 2), (8, 3)])
def test_groups_of_tp_have_the_names_that_caches_know(tp: int, number: int) -> None:
    """Those of a process that makes its layouts one after the other: ``tp:0``, ``tp:1``."""
    assert number_of(Layout(tp=tp)) == number


def test_no_two_layouts_share_a_number() -> None:
    layouts = [Layout(*axes) for axes in itertools.product(POWERS, repeat=3)]
    assert len({number_of(layout) for layout in layouts}) == len(layouts)
