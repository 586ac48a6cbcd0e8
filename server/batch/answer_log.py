"""The results of a batch on the disk: appended, synchronised, and found again after a crash.

Every result is one line, and the file of all lines is the file that the batch's owner gets: answers
in one, failures in another. The id of a result ends with the number of its input line, so the files
themselves say which lines are done. A line that was not written to its end is cut off.
"""

import os
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from shoal.server.batch.batch_objects import Usage

ID_PREFIX = "batch_req_"


class Result(NamedTuple):
    """What became of one line."""

    number: int
    """The line's, from 1 on."""
    failed: bool
    """Whether the line has no answer, so that it belongs to the failures."""
    text: bytes
    """A JSON object without a line break."""
    usage: Usage = Usage()


_NULL = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    usage: msgspec.Raw = _NULL


class _Response(msgspec.Struct):
    status_code: int = 0
    body: msgspec.Raw = _NULL


class _Recorded(msgspec.Struct):
    id: str
    custom_id: str
    response: msgspec.Raw


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Tokens(msgspec.Struct):
    """The usage of an answer: of chats and completions, or of responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


_recorded = msgspec.json.Decoder(_Recorded)
_response = msgspec.json.Decoder(_Response)
_body = msgspec.json.Decoder(_Body)
_tokens = msgspec.json.Decoder(_Tokens)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


def result_id(batch_id: str, number: int) -> str:
    """Return the id of the result of a line."""
    return f"{ID_PREFIX}{batch_id.rpartition('_')[2]}-{number}"


def usage_of(body: bytes) -> Usage:
    """Return the tokens of an answer; none if it says nothing of them."""
    try:
        tokens = _tokens.decode(_body.decode(body).usage)
    except _UNREADABLE:
        return Usage()
    none = _Details()
    asked = tokens.prompt_tokens_details or tokens.input_tokens_details or none
    made = tokens.completion_tokens_details or tokens.output_tokens_details or none
    return Usage(
        tokens.prompt_tokens or tokens.input_tokens or 0,
        asked.cached_tokens or 0,
        tokens.completion_tokens or tokens.output_tokens or 0,
        made.reasoning_tokens or 0,
    )


class AnswerLog:
    """The results of one batch. Only one process may have it open.

    Args:
        answers: the file of the lines with an answer.
        failures: the file of all others; it may be the same.
    """

    def __init__(self, answers: Path, failures: Path) -> None:
        self._paths = dict.fromkeys((answers, failures))
        self._answers, self._failures = answers, failures
        self._done = bytearray()
        self.completed = 0
        self.failed = 0
        self.usage = Usage()
        self._files: dict[Path, IO[bytes]] = {}

    def recover(self) -> None:
        """Find the results that are there already. It reads all of them.

        Raises:
            OSError: the files cannot be read or written.
        """
        for path in self._paths:
            for number, raw in _recover(path):
                response = _answered(raw)
                usage = Usage() if response is None else usage_of(response.body)
                self._count(number, response is None, usage)

    def open(self) -> None:
        """Be ready to append.

        Raises:
            OSError: the files cannot be written.
        """
        self._files = {path: path.open("ab", buffering=0) for path in self._paths}

    def is_done(self, number: int) -> bool:
        """Return whether a line has its result."""
        place = number >> 3
        return place < len(self._done) and bool(self._done[place] >> (number & 7) & 1)

    def append(self, results: Sequence[Result]) -> None:
        """Write results, one for each of different lines; they survive from then on.

        Raises:
            OSError: they cannot be written; of those that were not, nothing is left.
        """
        for path in self._paths:
            chosen = [result for result in results if self._path(result) == path]
            text = b"".join(result.text + b"\n" for result in chosen)
            if text:
                self._write(path, text)
            for result in chosen:
                self._count(result.number, result.failed, result.usage)

    def _path(self, result: Result) -> Path:
        return self._failures if result.failed else self._answers

    def _write(self, path: Path, text: bytes) -> None:
        file: Any = self._files[path]
        before = os.fstat(file.fileno()).st_size
        try:
            view = memoryview(text)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise

    def _count(self, number: int, failed: bool, usage: Usage) -> None:
        place = number >> 3
        if place >= len(self._done):
            self._done.extend(bytes(place + 1024 - len(self._done)))
        self._done[place] |= 1 << (number & 7)
        self.completed += not failed
        self.failed += failed
        self.usage += usage

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _recover(path: Path) -> Iterator[tuple[int, msgspec.Raw]]:
    """Yield the line and the response of each result in a file, and cut off what is not whole."""
    path.touch(mode=0o600)
    whole = 0
    with path.open("r+b") as file:
        for line in file:
            found = _parsed(line)
            if found is None:
                break
            whole += len(line)
            yield found
        if whole < os.fstat(file.fileno()).st_size:
            file.truncate(whole)
        os.fsync(file.fileno())  # a worker that was killed may have written and not synchronised


def _parsed(line: bytes) -> tuple[int, msgspec.Raw] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        recorded = _recorded.decode(line)
        return int(recorded.id.rpartition("-")[2]), recorded.response
    except _UNREADABLE:
        return None


def _answered(raw: msgspec.Raw) -> _Response | None:
    """Return the response of a result if it is an answer."""
    try:
        response = _response.decode(raw)
    except _UNREADABLE:
        return None
    return response if response.status_code == HTTPStatus.OK else None
