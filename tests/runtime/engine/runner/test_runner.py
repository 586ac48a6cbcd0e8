"""What a runner keeps for each layout besides its worker."""

import random
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy
import pytest
import torch
import zmq
from vllm.utils.torch_utils import set_random_seed

from shoal.policies.values.layouts import DP, Layout, alone
from shoal.runtime.config import Addresses
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.runner.runner import RandomStates, Responder

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


def test_an_answer_that_waits_for_the_device_holds_up_no_one_but_later_answers(
    tmp_path: Path,
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    addresses, copied = Addresses(tmp_path), Event()
    leader = context.socket(zmq.PULL)
    leader.bind(addresses.responses(0))
    responder = Responder(context, addresses, 0)

    def wait() -> instructions.Copied:
        assert copied.wait(20)
        return instructions.Copied(100, 0.5)

    responder.answer(alone(0), 1, "before")
    responder.answer(alone(0), 2, wait)
    responder.answer(alone(0), 3, "after")
    assert instructions.loads(leader.recv()).value == "before"
    assert not leader.poll(0)
    copied.set()
    answers = [instructions.loads(leader.recv()) for _ in range(2)]
    assert [(answer.seq, answer.value) for answer in answers] == [
        (2, instructions.Copied(100, 0.5)),
        (3, "after"),
    ]
    responder.close()
    leader.close()
    context.term()
