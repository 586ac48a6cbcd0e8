"""What scheduler and runner processes say to each other survives the way."""

import pickle

import pytest

from runtime.engine import steps

MESSAGES = [
    steps.Call(0, "load_model", (1,), {"key": "value"}),
    steps.Step(1, {"tokens": 3}, None, sample=False),
    steps.Sample(1, [1, 2]),
    steps.Attach((0, 1), epoch=4),
    steps.AwaitDetach(4),
    steps.Bind(4, [1, 2], {0: [7, 8], 1: [9, 3]}, seed=5),
    steps.Extend([3], {0: [1], 1: [2]}),
    steps.Rest(),
    steps.Detach(4),
    steps.Result((0, 1), 1, 0, [3]),
    steps.Failure(1, "ValueError: no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_the_same_after_the_way(message: steps.Instruction) -> None:
    assert steps.loads(steps.dumps(message)) == message


def test_calls_do_not_share_their_arguments() -> None:
    steps.Call(0, "first").kwargs["key"] = "value"
    assert steps.Call(1, "second").kwargs == {}


def test_half_a_message_is_an_error() -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        steps.loads(steps.dumps(MESSAGES[0])[:-5])
