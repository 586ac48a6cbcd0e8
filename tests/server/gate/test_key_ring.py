import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.clock import ManualClock
from shoal.server.errors import UserError
from shoal.server.gate.key_ring import KeyRing, read_api_keys
from shoal.server.gate.keys import ApiKey, digest_of, plain_key


def written(tmp_path: Path, content: Any, name: str = "keys.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(0o600)
    return path


def entries(*keys: str) -> list[dict[str, str]]:
    return [{"key": key, "name": key} for key in keys]


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {
                "key": "a",
                "name": "batch",
                "min_priority": 10,
                "max_waiting": 5,
                "max_held_bytes": 9,
            },
            {"sha256": digest_of("b").hex(), "name": "chat", "requests_per_minute": 3},
        ],
    )
    assert read_api_keys(path) == (
        ApiKey(digest_of("a"), "batch", min_priority=10, max_waiting=5, max_held_bytes=9),
        ApiKey(digest_of("b"), "chat", requests_per_minute=3),
    )


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[{", "line 1, column 3"),
        ("{}", "list"),
        ([], "no key"),
        ([{"name": "a"}], r"\[0\]: .*either key or sha256"),
        ([{"name": "a", "key": "x", "sha256": "00" * 32}], "either key or sha256"),
        ([{"key": "", "name": "a"}], r"\[0\]\.key: .*at least 1 character"),
        ([{"sha256": "abc", "name": "a"}], "64 hexadecimal"),
        ([{"sha256": "zz" * 32, "name": "a"}], "64 hexadecimal"),
        ([{"key": "a"}], r"\[0\]\.name: it is missing"),
        ([{"key": "a", "name": 1}], r"\[0\]\.name"),
        ([{"key": 1, "name": "a"}], r"\[0\]\.key"),
        (["a"], r"\[0\]"),
        ([{"key": "a", "name": ""}], "name"),
        ([{"key": "a", "name": "x"}, {"key": "b", "name": "x"}], "name"),
        ([{"key": "a", "name": "x", "max_waiting": 0}], r"\[0\]\.max_waiting"),
        ([{"key": "a", "name": "x", "tokens_per_minute": 0}], "tokens_per_minute"),
        ([{"key": "a", "name": "x", "min_priority": "high"}], r"\[0\]\.min_priority"),
        ([{"key": "a", "name": "x", "min_priority": True}], r"\[0\]\.min_priority"),
        ([{"key": "a", "name": "x", "priority": 1}], r"\[0\]\.priority: there is no such field"),
        ('[{"key": "a", "name": "x", "key": "b"}]', "key: it is given twice"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        read_api_keys(written(tmp_path, content))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_every_wrong_field_has_a_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {"name": "a", "key": "x", "max_waiting": "5"},
            {"name": "b", "key": "y"},
            {"name": "", "key": "z", "limit": 1},
        ],
    )
    with pytest.raises(UserError) as caught:
        read_api_keys(path)
    lines = str(caught.value).splitlines()
    fields = [line.removeprefix(f"{path}: ").partition(": ")[0] for line in lines]
    assert fields == ["[0].max_waiting", "[2].name", "[2].limit"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"name": "a", "key": "s3cret" "max_waiting": 1}]',
        '[{"name": "a", "key": s3cret}]',
        '[{"name": "a", "key": "s3cret',
        '["s3cret"]',
        '"s3cret"',
        '[{"name": "a", "key": ["s3cret"]}]',
        '[{"name": "a", "key": "s3cret", "sha256": "s3cret"}]',
        '[{"name": "a", "key": "s3cret", "sha256": null, "max_waiting": "s3cret"}]',
        '[{"name": "a", "key": "s3cret", "key": "s3cret"}]',
        '[{"name": "s", "key": "s3cret"}, {"name": "s", "key": "s3cret"}]',
    ],
)
def test_no_error_tells_a_key(tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError) as caught:
        read_api_keys(written(tmp_path, content))
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        KeyRing((), tmp_path / "none.json")


def test_a_ring_finds_its_keys_only() -> None:
    first, second = plain_key("first"), plain_key("second")
    ring = KeyRing([first, second])
    assert ring.find("first") is first
    assert ring.find("second") is second
    assert [ring.find(other) for other in ("", "firs", "firstsecond", "\udc80")] == [None] * 4


def test_a_batch_runs_with_the_key_of_its_owner_as_long_as_there_is_one(tmp_path: Path) -> None:
    path, clock = written(tmp_path, entries("a", "b")), ManualClock()
    ring = KeyRing((), path, clock=clock)
    assert [ring.of_tenant(name) for name in ("a", "b", "c")] == [
        *(ring.find("a"), ring.find("b"), None)
    ]
    written(tmp_path, entries("b"))
    clock.advance(60)
    assert ring.of_tenant("a") is None
    assert ring.of_tenant("b") is ring.find("b") is not None


def test_no_text_of_a_key_is_kept(tmp_path: Path) -> None:
    ring = KeyRing([plain_key("s3cret")], written(tmp_path, entries("0ther")))
    kept = repr(vars(ring))
    assert "s3cret" not in kept
    assert digest_of("s3cret") in {key.digest for key in ring._keys}
    assert [key.digest for key in ring._keys] == [digest_of("s3cret"), digest_of("0ther")]


def test_a_key_without_a_name_is_a_tenant_of_its_own() -> None:
    assert plain_key("a").tenant == plain_key("a").tenant != plain_key("b").tenant
    assert ApiKey(digest_of("a"), "team").tenant == ApiKey(digest_of("b"), "team").tenant


# --- a file that changes ---


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path, clock = written(tmp_path, entries("old")), ManualClock()
    ring = KeyRing([plain_key("fixed")], path, clock)
    written(tmp_path, entries("new", "newer"))
    assert ring.find("old") is not None  # not looked at yet
    clock.advance(1)
    assert ring.find("old") is None
    assert ring.find("new") is not None
    assert ring.find("newer") is not None
    assert ring.find("fixed") is not None


def test_a_link_that_points_elsewhere_is_a_change(tmp_path: Path) -> None:
    # How a mounted secret is replaced: the link keeps its name and leads to another file.
    link, clock = tmp_path / "keys", ManualClock()
    link.symlink_to(written(tmp_path, entries("old"), "one"))
    ring = KeyRing((), link, clock)
    other = written(tmp_path, entries("new"), "two")
    os.utime(other, ns=(0, (tmp_path / "one").stat().st_mtime_ns))
    link.unlink()
    link.symlink_to(other)
    clock.advance(1)
    assert ring.find("new") is not None
    assert ring.find("old") is None


def test_a_change_that_leaves_size_and_time_as_they_were_is_seen(tmp_path: Path) -> None:
    path, clock = written(tmp_path, entries("old")), ManualClock()
    before = path.stat().st_mtime_ns
    ring = KeyRing((), path, clock)
    written(tmp_path, entries("new"))
    os.utime(path, ns=(before, before))  # as `cp --preserve` and `rsync --times` do
    clock.advance(1)
    assert ring.find("new") is not None
    assert ring.find("old") is None


def test_a_file_that_could_not_be_read_is_read_once_its_owner_or_mode_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = written(tmp_path, entries("old")), ManualClock()
    ring = KeyRing((), path, clock)
    written(tmp_path, entries("new"))
    with monkeypatch.context() as patch:  # the mode alone stops no superuser

        def refuse(self: Path) -> bytes:
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr(Path, "read_bytes", refuse)
        clock.advance(1)
        assert ring.find("old") is not None
    path.chmod(0o400)
    clock.advance(1)
    assert ring.find("new") is not None
    assert ring.find("old") is None


@pytest.mark.parametrize("broken", ["[{", None])
def test_a_broken_file_changes_nothing_and_is_told_once(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = written(tmp_path, entries("old")), ManualClock()
    ring = KeyRing((), path, clock)
    if broken is None:
        path.unlink()
    else:
        written(tmp_path, broken)
    for _ in range(3):
        clock.advance(1)
        assert ring.find("old") is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text
    written(tmp_path, entries("new"))
    clock.advance(1)
    assert ring.find("new") is not None
    assert ring.find("old") is None


def test_a_file_that_everyone_can_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, entries("a"))
    with caplog.at_level(logging.WARNING):
        KeyRing((), path)
        assert caplog.records == []
        path.chmod(0o644)
        KeyRing((), path)
    assert "can be read by every user" in caplog.text
