"""The latest requests, of which the oldest are forgotten."""

import pytest

from shoal.runtime import latest
from shoal.runtime.latest import Latest


def test_the_latest_come_first() -> None:
    known = Latest[str]()
    for name in ("a", "b", "a", "c"):
        known.put(name, name.upper(), 10)
    assert [*known] == ["C", "A", "B"]
    known.drop("a")
    known.drop("nobody")
    assert [*known] == ["C", "B"]
    assert (known.get("b"), known.get("a")) == ("B", None)


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "MOST_TOKENS", 100)
    known = Latest[str]()
    assert [known.put(name, name, 40) for name in "abcd"] == [[], [], ["a"], ["b"]]
    assert [*known] == ["d", "c"]
    known.put("c", "c", 10)
    known.put("e", "e", 50)
    assert [*known] == ["e", "c", "d"], "what was replaced does not count"
