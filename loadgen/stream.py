"""Reads the event stream of a completion cheaply, because hundreds come at once."""

from collections.abc import Iterator

import msgspec

_DONE = b"[DONE]"


class Choice(msgspec.Struct):
    """The only field of a choice that is read; its text is not."""

    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Token counts of the whole request."""

    prompt_tokens: int
    completion_tokens: int = 0


class StreamError(msgspec.Struct):
    """An error that ends a stream."""

    message: str | None = None
    code: int | str | None = None


class Chunk(msgspec.Struct):
    """One event. All other fields are skipped without decoding."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: StreamError | None = None


_decode = msgspec.json.Decoder(Chunk).decode


class EventStream:
    """Splits received bytes into events.

    An event is a line that begins with ``data:``. All other lines (comments, names of events) are
    skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        """Whether the event that ends every stream has come."""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Yield the events that are complete now.

        Raises:
            msgspec.DecodeError: an event is not a chunk of a completion.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[len(b"data:") :].strip()
            if payload == _DONE:
                self.done = True
            else:
                yield _decode(payload)
