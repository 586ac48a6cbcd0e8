"""Uploads: a multipart form whose file goes straight to the disk, in constant memory.

Starlette would keep the whole form in a temporary file of its own first.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

# This logger writes a line for every wrong form: any client could fill the log.
logging.getLogger("python_multipart.multipart").setLevel(logging.ERROR)

_WRITE_BYTES = 1 << 20
_FIELD_BYTES = 1024
_MOST_FIELDS = 16


class UploadError(ValueError):
    """A form is not valid; the message is one line.

    Attributes:
        status: the HTTP status for it.
        param: the field.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class _Form:
    """Takes what the parser finds."""

    def __init__(self, too_large: Callable[[int], str | None]) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self.to_write = bytearray()
        self._too_large = too_large
        self._header = bytearray()
        self._value = bytearray()
        self._name = ""
        self._is_file = False
        self._disposition = b""
        self._text = bytearray()
        self._parts = 0
        self.is_whole = False

    def begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MOST_FIELDS:
            raise UploadError(f"the form has more than {_MOST_FIELDS} fields")
        self._disposition = b""
        self._text.clear()

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise UploadError("the form has more than one file", "file")
            self.filename = options.get(b"filename", b"").decode(errors="replace") or "file"

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size += end - start
            problem = self._too_large(self.size)
            if problem is not None:
                raise UploadError(problem, "file", 413)
            self.to_write += data[start:end]
        elif len(self._text) + end - start > _FIELD_BYTES:
            raise UploadError(f"a field is longer than {_FIELD_BYTES} bytes", self._name[:40])
        else:
            self._text += data[start:end]

    def end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode(errors="replace")

    def end(self) -> None:
        self.is_whole = True


class Upload:
    """A form that has arrived.

    Attributes:
        fields: its fields but for the file.
        filename: the file's name, as its client calls it.
        size: bytes of the file, which lie where they were wanted.
    """

    def __init__(self, fields: dict[str, str], filename: str, size: int) -> None:
        self.fields = fields
        self.filename = filename
        self.size = size


async def read_upload(
    headers: Headers,
    pieces: AsyncIterator[bytes],
    file: IO[bytes],
    too_large: Callable[[int], str | None],
    cover: Callable[[int], Awaitable[None]],
) -> Upload:
    """Read a form, and write its file.

    Args:
        headers: of the request.
        pieces: its body.
        file: where the form's file goes.
        too_large: says of a number of bytes why a file must not have them; None: it may.
        cover: makes sure that there is room for so many bytes, or raises.

    Raises:
        UploadError: the form is not valid, or its file is too large.
        OSError: the file cannot be written.
    """
    form = _Form(too_large)
    parser = _parser(headers, form)
    try:
        async for piece in pieces:
            parser.write(piece)
            await cover(form.size)
            if len(form.to_write) >= _WRITE_BYTES:
                await asyncio.to_thread(_write, file, form)
    except MultipartParseError:
        raise UploadError("the body is no multipart form") from None
    except ClientDisconnect:
        raise UploadError("the body is not whole") from None
    if not form.is_whole:
        raise UploadError("the form has no end")
    if form.filename is None:
        raise UploadError("the form has no file", "file")
    await asyncio.to_thread(_write, file, form, last=True)
    return Upload(form.fields, form.filename, form.size)


def _parser(headers: Headers, form: _Form) -> MultipartParser:
    kind, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise UploadError("the body must be multipart/form-data with a boundary")
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": form.begin_part,
                "on_header_field": form.header_name,
                "on_header_value": form.header_value,
                "on_header_end": form.end_header,
                "on_headers_finished": form.end_headers,
                "on_part_data": form.part_data,
                "on_part_end": form.end_part,
                "on_end": form.end,
            },
        )
    except FormParserError:
        raise UploadError("the boundary of the multipart form is too long") from None


def _write(file: IO[bytes], form: _Form, *, last: bool = False) -> None:
    file.write(form.to_write)
    form.to_write.clear()
    if last:
        file.flush()
        os.fsync(file.fileno())
