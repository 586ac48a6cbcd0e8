"""Calls of one object's method within contexts: in order, with its results, and without a cycle."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest

from shoal.runtime.engine.layouts.calls_within import call_within


class Owner:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def work(self, value: int, *, fails: bool = False) -> int:
        """Say that it works."""
        self.seen.append("work")
        if fails:
            raise ValueError("failed")
        return 2 * value


@contextmanager
def noted(owner: Any, name: str) -> Iterator[None]:
    owner.seen.append(f"{name} begins")
    try:
        yield
    finally:
        owner.seen.append(f"{name} ends")


def within(name: str) -> partial[AbstractContextManager[None]]:
    return partial(noted, name=name)


def test_contexts_of_one_method_are_nested_the_latest_outermost() -> None:
    owner, other = Owner(), Owner()
    call_within(owner, "work", within("first"))
    call_within(owner, "work", within("second"))
    assert owner.work(4) == 8
    assert owner.seen == ["second begins", "first begins", "work", "first ends", "second ends"]
    assert other.work(4) == 8
    assert other.seen == ["work"]
    assert owner.work.__doc__ == Owner.work.__doc__


def test_contexts_end_if_the_call_fails() -> None:
    owner = Owner()
    call_within(owner, "work", within("it"))
    with pytest.raises(ValueError, match="failed"):
        owner.work(1, fails=True)
    assert owner.seen[-1] == "it ends"


def test_an_owner_that_is_dropped_goes_at_once() -> None:
    gc.disable()
    try:
        owner = Owner()
        for name in ("first", "second"):
            call_within(owner, "work", within(name))
        reference = weakref.ref(owner)
        del owner
        assert reference() is None
    finally:
        gc.enable()
