"""Events are the same however the network cuts them."""

import msgspec
import pytest

from shoal.loadgen.stream import Chunk, EventStream
from tests.loadgen.stand_in import DONE, event, token, usage

WHOLE = token() + b": ping\n\n" + b"event: x\r\n" + token("length") + usage(7, 2) + DONE


def read(parts: list[bytes]) -> tuple[list[Chunk], bool]:
    stream = EventStream()
    return [chunk for part in parts for chunk in stream.feed(part)], stream.done


@pytest.mark.parametrize("size", [1, 2, 7, 50, len(WHOLE)])
def test_cuts_do_not_matter(size: int) -> None:
    chunks, done = read([WHOLE[at : at + size] for at in range(0, len(WHOLE), size)])
    assert done
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
    assert [c.choices[0].finish_reason for c in chunks[:2]] == [None, "length"]
    assert chunks[2].usage is not None
    assert (chunks[2].usage.prompt_tokens, chunks[2].usage.completion_tokens) == (7, 2)


def test_a_stream_that_lacks_its_last_event_is_not_done() -> None:
    assert read([WHOLE.removesuffix(DONE)])[1] is False
    assert read([WHOLE.removesuffix(b"\n\n")])[1] is False


def test_an_error_is_read() -> None:
    (chunk,), _ = read([event(error={"message": "gone", "type": "x", "code": 500})])
    assert chunk.error is not None
    assert (chunk.error.message, chunk.error.code) == ("gone", 500)


def test_what_is_no_chunk_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        read([b"data: <html>\n\n"])
