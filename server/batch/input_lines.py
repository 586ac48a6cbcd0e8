"""The lines of an input file: read one by one, and checked as a whole before any is sent.

The format is that of OpenAI's Batch API and of ``vllm run-batch``
(``vllm/entrypoints/launchers/run_batch.py``, ``BatchRequestInput``).
"""

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.server.batch.batch_objects import ENDPOINTS, LineError
from shoal.server.errors import shown_name

MOST_ERRORS = 100
"""So many errors of a file are kept; the rest of it is not read."""
_LOOK_LINES = 1000
"""After so many lines the check asks whether it is to stop."""
_CUSTOM_ID_CHARS = 512


class InputLine(msgspec.Struct, frozen=True):
    """A line that has been checked."""

    custom_id: str
    url: str
    body: msgspec.Raw


class Rules(NamedTuple):
    """What the lines of a file must keep to."""

    endpoint: str | None
    """The route of all lines; None: any of ``ENDPOINTS``."""
    models: Collection[str]
    """The names that the node serves; empty: they are not known."""
    most_lines: int
    line_bytes: int
    """Bytes of the longest line."""


class Checked(NamedTuple):
    """What the check of a file has found."""

    lines: int
    model: str | None
    """The model of its first line that names one."""
    errors: tuple[LineError, ...]


class _Head(msgspec.Struct):
    """The fields of a body that decide whether a batch can send it."""

    model: Any = None
    stream: Any = None
    background: Any = None


class _WrongLine(ValueError):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_head = msgspec.json.Decoder(_Head)
_line = msgspec.json.Decoder(InputLine)


def numbered_lines(path: Path, line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield every line that is not blank, with its number from 1 on.

    A line that is longer than ``line_bytes`` comes cut off, with one byte more than that.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(line_bytes + 1):
            number += 1
            rest = line
            while len(rest) > line_bytes and not rest.endswith(b"\n"):
                rest = file.readline(line_bytes + 1)
                if not rest:
                    break
            if line.strip():
                yield number, line


def decoded(line: bytes) -> InputLine:
    """Return a line that ``check_lines`` has found right."""
    return _line.decode(line)


def check_lines(path: Path, rules: Rules, is_stopped: Callable[[], bool]) -> Checked:
    """Check all lines of a file in constant memory, but for some 40 bytes for each line.

    Args:
        path: the file.
        rules: what its lines must keep to.
        is_stopped: whether nobody wants to know any more; what is returned then means nothing.
    """
    check = _Check(rules)
    for number, line in numbered_lines(path, rules.line_bytes):
        stops = number % _LOOK_LINES == 0 and is_stopped()
        if stops or not check.see(number, line):
            break
    check.errors += check.names.repeated(path, rules.line_bytes)
    if not check.names.count and not check.errors:
        check.errors.append(LineError("empty_file", "the file has no request"))
    errors = sorted(check.errors, key=lambda error: error.line or 0)
    return Checked(check.names.count, check.model, tuple(errors[:MOST_ERRORS]))


class _Check:
    """What is known of a file while its lines are checked."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.names = _Names()
        self.model: str | None = None
        self.errors: list[LineError] = []

    def see(self, number: int, line: bytes) -> bool:
        """Check one line, and return whether the next one is to be checked."""
        if self.names.count == self._rules.most_lines:
            most = f"the file has more than {self._rules.most_lines} requests"
            self.errors.append(LineError("too_many_requests", most, number))
            return False
        try:
            self.names.add(number, self._checked(line))
        except _WrongLine as error:
            self.errors.append(LineError(error.code, str(error), number, error.param))
        return len(self.errors) < MOST_ERRORS

    def _checked(self, line: bytes) -> str:
        """Return a line's ``custom_id``.

        Raises:
            _WrongLine: the line is wrong.
        """
        if len(line) > self._rules.line_bytes:
            most = f"the line is longer than {self._rules.line_bytes} bytes"
            raise _WrongLine("request_too_large", most)
        try:
            fields = _fields.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _WrongLine("invalid_json_line", "the line is no JSON object") from None
        custom_id = _string(fields, "custom_id")
        if not 0 < len(custom_id) <= _CUSTOM_ID_CHARS:
            most = f"custom_id must have 1 to {_CUSTOM_ID_CHARS} characters"
            raise _WrongLine("invalid_custom_id", most, "custom_id")
        if _string(fields, "method") != "POST":
            raise _WrongLine("invalid_method", "method must be POST", "method")
        self._check_url(_string(fields, "url"))
        self._check_body(fields)
        return custom_id

    def _check_url(self, url: str) -> None:
        endpoint = self._rules.endpoint
        if endpoint is not None and url != endpoint:
            other = f"url is {shown_name(url)}, and the batch is for {endpoint}"
            raise _WrongLine("mismatched_url", other, "url")
        if url not in ENDPOINTS:
            allowed = f"url is {shown_name(url)}: it must be one of {', '.join(ENDPOINTS)}"
            raise _WrongLine("invalid_url", allowed, "url")

    def _check_body(self, fields: dict[str, msgspec.Raw]) -> None:
        try:
            head = _head.decode(_required(fields, "body"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _WrongLine("invalid_body", "body must be a JSON object", "body") from None
        if head.stream:
            raise _WrongLine("invalid_stream", "a batch cannot stream", "body.stream")
        if head.background:
            cannot = "a batch cannot have background responses"
            raise _WrongLine("invalid_background", cannot, "body.background")
        if head.model is None:
            return
        if not isinstance(head.model, str):
            raise _WrongLine("invalid_model", "body.model must be a string", "body.model")
        if self._rules.models and head.model not in self._rules.models:
            unknown = f"there is no model {shown_name(head.model)}"
            raise _WrongLine("model_not_found", unknown, "body.model")
        self.model = self.model or head.model


def _required(fields: dict[str, msgspec.Raw], name: str) -> msgspec.Raw:
    try:
        return fields[name]
    except KeyError:
        missing = f"{name} is missing"
        raise _WrongLine("missing_required_parameter", missing, name) from None


def _string(fields: dict[str, msgspec.Raw], name: str) -> str:
    try:
        return _text.decode(_required(fields, name))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _WrongLine(f"invalid_{name}", f"{name} must be a string", name) from None


class _Names:
    """Finds ``custom_id`` values that are given twice.

    It keeps 64 bits of a keyed hash of each. Lines whose hashes are equal are read again.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._hashes = np.zeros(_LOOK_LINES, np.uint64)
        self._numbers = np.zeros(_LOOK_LINES, np.int64)
        self.count = 0

    def add(self, number: int, custom_id: str) -> None:
        """Take the ``custom_id`` of a line."""
        if self.count == len(self._hashes):
            more = 2 * self.count
            self._hashes = np.resize(self._hashes, more)
            self._numbers = np.resize(self._numbers, more)
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8, key=self._key).digest()
        self._hashes[self.count] = int.from_bytes(digest, "little")
        self._numbers[self.count] = number
        self.count += 1

    def repeated(self, path: Path, line_bytes: int) -> Iterator[LineError]:
        """Yield an error for every line that has the ``custom_id`` of an earlier one."""
        suspects = self._suspects()
        seen: dict[str, int] = {}
        for number, line in numbered_lines(path, line_bytes) if suspects else ():
            if number not in suspects:
                continue
            custom_id = decoded(line).custom_id
            first = seen.setdefault(custom_id, number)
            if first != number:
                twice = f"line {first} has the same custom_id"
                yield LineError("duplicate_custom_id", twice, number, "custom_id")

    def _suspects(self) -> frozenset[int]:
        """Return the lines whose hashes are not unique: at most some of them if there are many."""
        hashes, numbers = self._hashes[: self.count], self._numbers[: self.count]
        order = np.argsort(hashes, kind="stable")
        same = hashes[order][1:] == hashes[order][:-1]
        pairs = np.flatnonzero(same)[: 2 * MOST_ERRORS]
        found = np.concatenate([order[pairs], order[pairs + 1]])
        return frozenset(int(number) for number in numbers[found])
