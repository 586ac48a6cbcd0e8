"""What a comparison of answers takes for equal: if it noticed too little, it would show nothing."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.parity import TOLERANCE, Answer, answer_of, differences

WHOLE: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "a sea",
            "token_ids": [5, 6],
            "prompt_token_ids": [1, 2],
            "logprobs": {
                "tokens": ["a", " sea"],
                "token_logprobs": [-0.5, -1.5],
                "top_logprobs": [{"a": -0.5, "b": -1.0}, {" sea": -1.5, "c": -0.25}],
                "text_offset": [0, 1],
            },
            "prompt_logprobs": [None, {"2": {"logprob": -3.0, "rank": 7}, "9": {"logprob": -1.0}}],
            "finish_reason": "stop",
            "stop_reason": "x",
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield everything in an answer that is not made of other things, and where it is."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def with_another(answer: Answer, path: tuple[Any, ...], value: Any) -> Answer:
    """Return a copy of an answer in which one thing is changed."""
    changed: Any = copy.deepcopy(answer)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return dict(changed)


EXPECTED = answer_of([WHOLE])


@pytest.mark.parametrize(("path", "value"), list(leaves(EXPECTED)))
def test_everything_in_an_answer_counts(path: tuple[Any, ...], value: Any) -> None:
    other = {float: lambda: value - 2 * TOLERANCE, int: lambda: value + 2, str: lambda: value + "x"}
    changed = with_another(EXPECTED, path, other.get(type(value), lambda: "x")())
    assert differences(changed, EXPECTED)
    assert differences(EXPECTED, changed)


def test_an_answer_equals_itself_but_for_rounding() -> None:
    for path, value in leaves(EXPECTED):
        if isinstance(value, float):
            changed = with_another(EXPECTED, path, value + TOLERANCE / 2)
            assert differences(changed, EXPECTED) == []


def test_another_token_may_be_as_good_as_the_last_of_the_best() -> None:
    path = ("choices", 0, "logprobs", 0, "best")
    for logprob, equal in ((-1.0, True), (-1.5, False)):
        changed = with_another(EXPECTED, path, {"a": -0.5, "d": logprob})
        assert (differences(changed, EXPECTED) == []) == equal


def test_a_missing_token_or_choice_is_a_difference() -> None:
    shorter = with_another(EXPECTED, ("choices", 0, "token_ids"), [5])
    assert differences(shorter, EXPECTED)
    assert differences(with_another(EXPECTED, ("choices",), {}), EXPECTED)


def test_chunks_join_to_the_whole() -> None:
    (choice,) = WHOLE["choices"]
    chunks: list[dict[str, Any]] = [{"choices": [dict(choice)]} for _ in range(2)]
    for k, chunk in enumerate(chunks):
        (part,) = chunk["choices"]
        part |= {"text": ("a", " sea")[k], "token_ids": [(5, 6)[k]]}
        part["logprobs"] = {name: column[k : k + 1] for name, column in choice["logprobs"].items()}
    chunks[0]["choices"][0] |= {"finish_reason": None, "stop_reason": None}
    chunks[1]["choices"][0] |= {"prompt_token_ids": None, "prompt_logprobs": None}
    assert answer_of([*chunks, {"choices": [], "usage": WHOLE["usage"]}]) == EXPECTED


def test_calls_of_tools_count_and_join() -> None:
    def body(kind: str, *calls: tuple[str | None, str], **place: int) -> dict[str, Any]:
        functions = [{"name": name, "arguments": said} for name, said in calls]
        made = [{"id": "random", "function": function, **place} for function in functions]
        return {"choices": [{"index": 0, kind: {"role": "assistant", "tool_calls": made}}]}

    whole = answer_of([body("message", ("note", '{"a": 1}'))])
    chunks = [body("delta", ("note", '{"a"'), index=0), body("delta", (None, " :1}"), index=0)]
    assert answer_of(chunks) == whole
    assert whole["choices"][0]["calls"] == {0: ["note", '{"a": 1}']}
    for other in (("no", '{"a": 1}'), ("note", '{"a": 2}')):
        assert differences(answer_of([body("message", other)]), whole)
    assert differences(answer_of([body("message")]), whole)


def test_what_comes_after_the_end_is_an_error() -> None:
    with pytest.raises(AssertionError, match="after the end"):
        answer_of([WHOLE, WHOLE])
