import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from server.keys import ApiKey, KeyRing, read_api_keys


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {"key": "a", "name": "batch", "min_priority": 10, "max_waiting": 5},
            {"key": "b", "name": "chat"},
        ],
    )
    assert read_api_keys(path) == (ApiKey("a", "batch", 10, 5), ApiKey("b", "chat"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[{", "truncated"),
        ("{}", "array"),
        ([], "no key"),
        ([{"name": "a"}], "key"),
        ([{"key": "", "name": "a"}], "empty"),
        ([{"key": "a"}], "name"),
        ([{"key": "a", "name": "x"}, {"key": "b", "name": "x"}], "name"),
        ([{"key": "a", "name": "x", "max_waiting": 0}], "max_waiting"),
        ([{"key": "a", "name": "x", "min_priority": "high"}], "min_priority"),
        ([{"key": "a", "name": "x", "priority": 1}], "priority"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=named) as caught:
        read_api_keys(written(tmp_path, content))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="No such file"):
        read_api_keys(str(tmp_path / "none.json"))


def test_a_ring_finds_its_keys_only() -> None:
    first, second = ApiKey("first", "a"), ApiKey("second", "b")
    ring = KeyRing([first, second])
    assert ring.find("first") is first
    assert ring.find("second") is second
    assert [ring.find(other) for other in ("", "firs", "firstsecond")] == [None] * 3


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("secrets.compare_digest", lambda a, b: compared.append(b) or a == b)
    ring = KeyRing([ApiKey("first"), ApiKey("second"), ApiKey("third")])
    ring.find("first")
    ring.find("wrong")
    assert len(compared) == 6
    assert {len(digest) for digest in compared} == {32}
