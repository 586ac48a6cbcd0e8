"""What a runner keeps for each layout besides its worker."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from vllm.utils.torch_utils import set_random_seed

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.runner.runner import RandomStates

OWN, GROUP = DP, Layout(tp=2)


def draw() -> tuple[float, float, float]:
    return (float(torch.rand(1)), float(numpy.random.random()), random.random())


def drawn(seed: int, count: int) -> list[tuple[float, float, float]]:
    set_random_seed(seed)
    return [draw() for _ in range(count)]


@pytest.fixture
def states() -> Iterator[RandomStates]:
    states = RandomStates()
    states.switch(GROUP, OWN)
    yield states
    states.switch(OWN, GROUP)


def test_layouts_in_turn_each_draw_as_if_alone(states: RandomStates) -> None:
    own, group = drawn(5, 6), drawn(9, 3)
    set_random_seed(5)
    got_own, got_group = [draw()], []
    states.switch(OWN, GROUP)
    set_random_seed(9)
    for _ in range(3):
        got_group.append(draw())
        states.switch(GROUP, OWN)
        got_own.append(draw())
        states.switch(OWN, GROUP)
    states.switch(GROUP, OWN)
    got_own += [draw(), draw()]
    assert (got_own, got_group) == (own, group)


def test_a_forgotten_group_is_not_taken_up_again(states: RandomStates) -> None:
    """Members that are not reseeded must not look equal because they once were."""
    states.switch(OWN, GROUP)
    set_random_seed(9)
    states.switch(GROUP, OWN)
    states.forget(GROUP)
    set_random_seed(5)
    torch_draw = draw()[0]
    set_random_seed(5)
    states.switch(OWN, GROUP)
    assert draw()[0] == torch_draw
    states.switch(GROUP, OWN)
