import json
import random
from typing import Any

import msgspec
import pytest

from shoal.server.gate.json_keys import repeated_key


def found(text: str) -> str | None:
    return repeated_key(text.encode(), msgspec.json.decode(text))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": 1, "b": {"a": 1}, "c": [{"a": 1}, {"a": 1}]}',
        r'{"a": "\"a\": 1", "b": "\\\\", "c": "\\\\\" : {"}',
        '{"a" : "x", "b"\\n:\\t":"}'.replace("\\n", "\n").replace("\\t", "\t"),
        '{"": {"": ["", ":", "{", "}"]}}',
        '{"a": "\\u0022a\\u0022:1"}',
    ],
)
def test_no_key_is_taken_for_a_second_one(text: str) -> None:
    assert found(text) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"a":1,"a" :2}', "a"),
        ('{"": 1, "": 2}', ""),
        ('{"a": ":", "b": [[{"c": 1, "d": 2, "c": 3}]]}', "c"),
        ('{"a": {"x": {}, "x": {"y": 1}}}', "x"),
        (r'{"k\"ey": "\\", "\u006b\u0022ey": 2}', 'k"ey'),
        ('{"a": [{"b": [{"b": 1}]}], "z": {}, "a": "{:"}', "a"),
    ],
)
def test_a_key_that_comes_twice_is_named(text: str, key: str) -> None:
    assert found(text) == key


def test_random_texts_are_told_as_a_hook_for_objects_tells_them() -> None:
    draw = random.Random(5)
    told = [(text, _by_hook(text)) for text in (_text(draw, 3) for _ in range(2000))]
    assert [found(text) is not None for text, _ in told] == [twice for _, twice in told]
    assert 200 < sum(twice for _, twice in told) < 1800


def _by_hook(text: str) -> bool:
    twice = []

    def hook(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        twice.append(len(keys) != len(set(keys)))

    json.loads(text, object_pairs_hook=hook)
    return any(twice)


def _text(draw: random.Random, depth: int) -> str:
    """Return the text of a random object whose strings look like the syntax around them."""

    def string() -> str:
        pieces = ("a", "b", ":", "{", "}", "[", ",", " ", r"\"", r"\\", r"\u0061", "é")
        return '"' + "".join(draw.choices(pieces, k=draw.randrange(3))) + '"'

    def value() -> str:
        kind = draw.randrange(5) if depth else 0
        if kind == 1:
            return _text(draw, depth - 1)
        if kind == 2:
            return "[" + ",".join(_text(draw, depth - 1) for _ in range(draw.randrange(3))) + "]"
        return string() if kind else draw.choice(("1", "null", "true", "[1, 2]", string()))

    def space() -> str:
        return draw.choice(("", "", " ", "\n"))

    pairs = [f"{string()}{space()}:{space()}{value()}" for _ in range(draw.randrange(5))]
    return "{" + f"{space()},{space()}".join(pairs) + "}"
