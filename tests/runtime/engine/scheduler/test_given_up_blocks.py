"""Free blocks are given up while steps go on, and what they cache is found all the time."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler import given_up_blocks
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import (
    BLOCKS,
    TOKENS,
    Make,
    ToyEngines,
    undisturbed,
)

LONG, OTHER = random_prompts((50, 21), seed=6)
LEFT = 70


class Copies:
    """The copies of an engine's runner, which are made when the test says so."""

    def __init__(self, engines: ToyEngines) -> None:
        self._runners = engines.runners[engines.own[0].unit]
        self._pull, self._pulled = self._runners._pull, list[tuple[Any, ...]]()
        self._runners.copy_later = True
        self._runners._pull = lambda *of: self._pulled.append(of)  # type: ignore[method-assign]

    @property
    def moves(self) -> list[instructions.Move]:
        return [sent for sent in self._runners.sent if isinstance(sent, instructions.Move)]

    def make(self, problem: str = "") -> None:
        for of in self._pulled:
            self._pull(*of)
        self._runners._pull = self._pull  # type: ignore[method-assign]
        self._runners.copy_later = False
        self._runners.finish_copies(problem)


def with_cached_prefix(make: Make, windows: tuple[int | None, ...] = (None,)) -> ToyEngines:
    """Return engines of which one caches a prompt in blocks that it is going to give up."""
    engines = make(windows=windows)
    own = engines.own[0]
    low = own.lend(LEFT)
    engines.submit(own, "first", LONG)
    engines.finish(own)
    own.take_back(low)
    return engines


def clear(engines: ToyEngines) -> int:
    """Give up free blocks as far as it goes without the runner; return in how many slices."""
    own, slices = engines.own[0], 1
    own.collect()
    while own.clear(LEFT, moves=True):
        own.collect()
        slices += 1
    return slices


def computed(engines: ToyEngines) -> int:
    return sum(runners.computed for runners in engines.runners.values())


def end(engines: ToyEngines) -> None:
    """Give the rest up, and let the blocks' memory be gone."""
    own = engines.own[0]
    assert not own.is_clearing
    own.vacate(LEFT, moves=True)
    assert own.withhold(LEFT) == 0
    blocks = engines.memories[0].blocks
    for block in [block for block in blocks if block > LEFT]:
        del blocks[block]


@pytest.mark.parametrize("windows", [(None,), (None, 8)], ids=["one group", "two groups"])
def test_steps_go_on_while_prefixes_are_copied(make: Make, windows: tuple[int | None, ...]) -> None:
    plain = make(windows=windows)
    plain.submit(plain.own[0], "r", OTHER)
    plain.finish(plain.own[0])
    engines = with_cached_prefix(make, windows)
    own, copies = engines.own[0], Copies(engines)
    running = engines.submit(own, "running", OTHER)
    engines.step(own, 2)
    clear(engines)
    assert [move.beside for move in copies.moves] == [True]
    assert own.is_clearing
    before = len(engines.tokens[running])
    engines.step(own, 3)
    assert len(engines.tokens[running]) >= before + 3
    assert own.is_clearing, "nothing is over before the runner says so"
    copies.make()
    clear(engines)
    end(engines)
    engines.finish(own)
    assert engines.tokens[running] == plain.tokens["r"]
    done = computed(engines)
    engines.submit(own, "again", LONG)
    engines.finish(own)
    assert engines.tokens["again"] == engines.tokens["first"]
    length = len(LONG) + len(engines.tokens["again"]) - 1
    if len(windows) == 1:
        assert computed(engines) - done < length - len(LONG) + 2 * TOKENS, "the prefix is found"
    own.restore()
    assert own.load.free_blocks == BLOCKS
    assert engines.audit() == []


def meet(make: Make, hurry: Callable[[ToyEngines], None]) -> tuple[list[int], int]:
    """Let a request begin with a prefix that is not copied yet.

    Returns:
        Its tokens, and how many were computed for it.
    """
    engines = with_cached_prefix(make)
    own, copies = engines.own[0], Copies(engines)
    clear(engines)
    hurry(engines)
    before = computed(engines)
    engines.submit(own, "meanwhile", LONG)
    engines.step(own, 2)
    copies.make()
    clear(engines)
    end(engines)
    engines.finish(own)
    assert engines.audit() == []
    return engines.tokens["meanwhile"], computed(engines) - before


def test_a_prefix_is_found_at_its_old_place_until_it_is_copied(make: Make) -> None:
    expected = undisturbed(make, LONG)
    tokens, work = meet(make, lambda _engines: None)
    assert tokens == expected
    assert work < len(expected) + 2 * TOKENS


def test_one_that_is_found_at_its_new_place_before_that_is_wrong(make: Make) -> None:
    """The negative control."""

    def publish(engines: ToyEngines) -> None:
        given_up = engines.own[0]._given_up
        given_up._copy, given_up._is_copied = None, True
        given_up.tend()

    assert meet(make, publish)[0] != undisturbed(make, LONG)


def test_blocks_are_given_up_in_slices(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_up_blocks, "SLICE", 8)
    engines = with_cached_prefix(make)
    own, copies = engines.own[0], Copies(engines)
    cached = len(LONG) // TOKENS
    expected = -(-(BLOCKS - LEFT - cached) // 8) + -(-cached // 8)
    assert expected <= clear(engines) <= expected + 2
    engines.submit(own, "running", OTHER)
    copies.make()
    steps = 0
    while own.is_clearing:
        before = computed(engines)
        engines.step(own)
        steps += computed(engines) > before
    assert steps >= 2, "between slices"
    end(engines)


def test_running_requests_keep_room_while_prefixes_are_copied(make: Make) -> None:
    engines = with_cached_prefix(make)
    own, _copies = engines.own[0], Copies(engines)
    engines.submit(own, "running", OTHER)
    engines.step(own, 2)
    own.lend(own.load.free_blocks - (BLOCKS - LEFT) - 2)  # two blocks are left below
    clear(engines)
    assert not own.is_clearing, "both are for the request"
    engines.step(own, 6)
    assert own._scheduler.requests["running"].num_preemptions == 0


def test_a_change_that_is_given_up_meanwhile_leaves_all_as_it_was(make: Make) -> None:
    engines = with_cached_prefix(make)
    own, copies = engines.own[0], Copies(engines)
    clear(engines)
    held = sum(len(move.requests[0].target[0][0]) for move in copies.moves)
    assert held > 0
    own.restore()
    assert own.load.free_blocks == BLOCKS - held, "what is written to is nobody's"
    assert engines.audit() == []
    before = computed(engines)
    engines.submit(own, "again", LONG)
    engines.finish(own)
    assert computed(engines) - before < len(LONG), "its prefix is still found"
    copies.make()
    own.collect()
    assert own.load.free_blocks == BLOCKS
    assert engines.audit() == []
    assert engines.tokens["again"] == engines.tokens["first"]


def test_a_copy_that_fails_costs_the_prefix_only(make: Make) -> None:
    engines = with_cached_prefix(make)
    own, copies = engines.own[0], Copies(engines)
    clear(engines)
    copies.make("no memory")
    clear(engines)
    end(engines)
    before = computed(engines)
    engines.submit(own, "again", LONG)
    engines.finish(own)
    assert engines.tokens["again"] == engines.tokens["first"]
    assert computed(engines) - before >= len(LONG)
    assert engines.audit() == []


def test_nothing_is_copied_where_nobody_reads_the_queue(make: Make) -> None:
    engines = with_cached_prefix(make)
    own, copies = engines.own[0], Copies(engines)
    while own.clear(LEFT, moves=False):
        pass
    assert not own.is_clearing
    assert copies.moves == []
    end(engines)
