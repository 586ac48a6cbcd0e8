"""What scheduler and runner processes say to each other survives the way."""

import pickle

import pytest

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.link import instructions

MESSAGES = [
    instructions.Call(0, "load_model", (1,), {"key": "value"}),
    instructions.Step(1, {"tokens": 3}, None, sample=False),
    instructions.Sample(1, [1, 2]),
    instructions.Attach(Layout(tp=2)),
    instructions.Bind(4, [1, 2], {0: [7, 8], 1: [9, 3]}, seed=5),
    instructions.Extend([3], {0: [1], 1: [2]}),
    instructions.Detach(4),
    instructions.Form(6, Layout(tp=2), generation=1),
    instructions.Start(7, Layout(tp=2)),
    instructions.Move(8, []),
    instructions.Result("tp2", 1, 0, [3]),
    instructions.Failure(1, "ValueError: no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_the_same_after_the_way(message: instructions.Instruction) -> None:
    assert instructions.loads(instructions.dumps(message)) == message


def test_calls_do_not_share_their_arguments() -> None:
    instructions.Call(0, "first").kwargs["key"] = "value"
    assert instructions.Call(1, "second").kwargs == {}


def test_half_a_message_is_an_error() -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        instructions.loads(instructions.dumps(MESSAGES[0])[:-5])
