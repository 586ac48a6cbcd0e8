"""The check of input files: each error with its line, in memory that does not grow."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shoal.server.batch.input_lines import MOST_ERRORS, Checked, Rules, check_lines
from tests.server.batch.batches import CHAT, jsonl, line, named

RULES = Rules(CHAT, frozenset({"m"}), most_lines=100, line_bytes=1000)


def checked(tmp_path: Path, content: bytes, rules: Rules = RULES) -> Checked:
    (path := tmp_path / "in.jsonl").write_bytes(content)
    return check_lines(path, rules, lambda: False)


def test_a_right_file_has_no_error(tmp_path: Path) -> None:
    assert checked(tmp_path, jsonl(named(3))) == Checked(3, "m", ())


def test_blank_lines_count_as_lines_and_not_as_requests(tmp_path: Path) -> None:
    content = jsonl([line("a")]) + b"\n  \n" + json.dumps(line("b") | {"method": "GET"}).encode()
    found = checked(tmp_path, content)
    assert [(error.line, error.code) for error in found.errors] == [(4, "invalid_method")]


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        pytest.param({"method": "GET"}, "invalid_method", "method", id="method"),
        pytest.param({"method": None}, "invalid_method", "method", id="no-text"),
        pytest.param({"url": "/v1/completions"}, "mismatched_url", "url", id="other-url"),
        pytest.param({"custom_id": ""}, "invalid_custom_id", "custom_id", id="empty"),
        pytest.param({"custom_id": 1}, "invalid_custom_id", "custom_id", id="number"),
        pytest.param({"custom_id": "a"}, "duplicate_custom_id", "custom_id", id="twice"),
        pytest.param({"body": []}, "invalid_body", "body", id="no-object"),
        pytest.param({"body": {"model": "x"}}, "model_not_found", "body.model", id="model"),
        pytest.param({"body": {"model": 1}}, "invalid_model", "body.model", id="no-model"),
        pytest.param({"body": {"stream": True}}, "invalid_stream", "body.stream", id="stream"),
        pytest.param(
            {"body": {"background": True}},
            "invalid_background",
            "body.background",
            id="background",
        ),
        pytest.param({"body": {"x": "y" * 1000}}, "request_too_large", None, id="long"),
    ],
)
def test_each_error_names_its_line(
    tmp_path: Path, wrong: dict[str, Any], code: str, param: str | None
) -> None:
    found = checked(tmp_path, jsonl([line("a"), line("b") | wrong, line("c")]))
    assert [(e.line, e.code, e.param) for e in found.errors] == [(2, code, param)]


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_every_field_is_needed(tmp_path: Path, name: str) -> None:
    (one := line("a")).pop(name)
    (error,) = checked(tmp_path, jsonl([one])).errors
    assert (error.code, error.param, error.line) == ("missing_required_parameter", name, 1)


@pytest.mark.parametrize("text", [b"{", b"[]", b'"a"', b"\xff\xfe", b'{"custom_id": "\xff"}'])
def test_what_is_no_object_is_an_error(tmp_path: Path, text: bytes) -> None:
    (error,) = checked(tmp_path, jsonl([line("a")]) + text).errors
    assert error.line == 2


def test_run_batch_takes_any_url_that_is_served(tmp_path: Path) -> None:
    rules = RULES._replace(endpoint=None, models=frozenset())
    content = jsonl([line("a", "/v1/responses"), line("b", "/v1/embeddings")])
    (error,) = checked(tmp_path, content, rules).errors
    assert (error.line, error.code) == (2, "invalid_url")


def test_an_empty_file_and_too_many_requests_are_errors(tmp_path: Path) -> None:
    assert [error.code for error in checked(tmp_path, b"\n").errors] == ["empty_file"]
    (error,) = checked(tmp_path, jsonl(named(101))).errors
    assert (error.code, error.line) == ("too_many_requests", 101)


def test_only_so_many_errors_are_kept(tmp_path: Path) -> None:
    rules = RULES._replace(most_lines=10_000)
    found = checked(tmp_path, b"{\n" * 10 * MOST_ERRORS, rules)
    assert [error.line for error in found.errors] == list(range(1, MOST_ERRORS + 1))
    twice = checked(tmp_path, jsonl([line("a")] * 1000), rules)
    assert 0 < len(twice.errors) <= MOST_ERRORS
    assert all(error.code == "duplicate_custom_id" for error in twice.errors)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    lines = 50_000
    with (path := tmp_path / "in.jsonl").open("wb") as file:
        for number in range(lines):
            file.write(jsonl([line(f"a line with a long name, number {number}", x="y" * 500)]))
    size = path.stat().st_size
    tracemalloc.start()
    try:
        rules = RULES._replace(most_lines=lines)
        assert check_lines(path, rules, lambda: False).lines == lines
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20 < size / 5
