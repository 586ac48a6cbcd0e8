"""How deep the tests go: every way of the code once, or with ``SHOAL_TESTS=all`` every combination.

What runs in each change is chosen so that every kind of model, of weights, of failure and of
traffic comes up in some test. The rest repeats it with other sizes and in other combinations.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

DEEP = os.environ.get("SHOAL_TESTS") == "all"
"""Whether tests go through every combination."""

NOT_DEEP = "SHOAL_TESTS is not all"
only_deep = pytest.mark.skipif(not DEEP, reason=NOT_DEEP)
"""Marks a test that repeats what others check in another combination."""


def skip_unless_deep() -> None:
    """Leave out a test that repeats, for the present parameters, what it checks with others."""
    if not DEEP:
        pytest.skip(NOT_DEEP)


def among(few: Sequence[T], *rest: T) -> list[T]:
    """Return those of some cases that are to be tested: ``few``, or the rest, too."""
    return [*few, *rest] if DEEP else [*few]


def how_many(name: str, few: int, many: int) -> int:
    """Return how often to do something: as the environment says, or few or many times."""
    return int(os.environ.get(name, many if DEEP else few))
