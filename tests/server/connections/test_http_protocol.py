"""What uvicorn reads of a request, over a connection of its own."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from shoal.server.connections.http_protocol import UNWANTED_BYTES, BoundedHttpProtocol
from shoal.server.operator.admin_server import serving

LIMIT = 4096


async def size(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def refuse(request: Request) -> PlainTextResponse:
    del request
    return PlainTextResponse("no", status_code=401)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = Starlette(
        routes=[
            Route("/x", size, methods=["GET", "POST"]),
            Route("/refused", refuse, methods=["POST"]),
        ]
    )
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        log_config=None,
        h11_max_incomplete_event_size=LIMIT,
        timeout_graceful_shutdown=1,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(config, listener):
            yield listener.getsockname()[1]


async def answer(port: int, *pieces: bytes, until_closed: bool = True) -> bytes:
    """Send pieces one by one, as far as they are taken, and return all that is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read() if until_closed else await reader.readuntil(b"\r\n\r\n")
    except ConnectionError:
        return await reader.read()
    finally:
        writer.close()


async def test_requests_within_the_limit_are_served(port: int) -> None:
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    body = b"x" * 50_000
    whole = await answer(port, head + b"Content-Length: 50000\r\n\r\n", body[:7], body[7:])
    assert whole.startswith(b"HTTP/1.1 200")
    assert whole.endswith(b"50000")
    chunks = b"".join(b"1\r\nx\r\n" for _ in range(5000))
    whole = await answer(port, head + b"Transfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
    assert whole.endswith(b"5000")


def cut(endless: bytes) -> list[bytes]:
    """Return what of it goes beyond the limit by one byte, in pieces.

    A byte more could meet a closed connection, whose reset would take the answer with it.
    """
    return [endless[at : min(at + 512, LIMIT + 1)] for at in range(0, LIMIT + 1, 512)]


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"x" * 2 * LIMIT,
        b"GET /x HTTP/1.1\r\nA: " + b"x" * 2 * LIMIT,
        b"GET /x HTTP/1.1\r\n" + b"A: x\r\n" * LIMIT,
    ],
    ids=["url", "one header", "many headers"],
)
async def test_a_head_without_end_is_cut_off(port: int, endless: bytes) -> None:
    assert_too_large(await answer(port, *cut(endless)))


@pytest.mark.parametrize(
    "endless",
    [b"0\r\n" + b"A: x\r\n" * LIMIT, b"1;" + b"x" * 4 * LIMIT],
    ids=["trailers", "chunk extension"],
)
async def test_what_surrounds_a_body_is_bounded_too(port: int, endless: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    writer.write(head + b"Expect: 100-continue\r\n\r\n")
    await reader.readuntil(b"100 Continue\r\n\r\n")
    for piece in cut(endless):
        writer.write(piece)
    # It ends, if only by a reset, which may overtake the answer.
    with suppress(ConnectionError):
        assert b" 200 " not in await reader.read()
    writer.close()


def assert_too_large(response: bytes) -> None:
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert json.loads(body)["error"]["code"] == 431


async def test_what_is_not_http_is_refused_in_the_shape_of_other_errors(port: int) -> None:
    response = await answer(port, b"\x16\x03\x01 this is TLS\r\n\r\n")
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "BadRequestError"


CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED + b"5\r\nwhole\r\n", b"no size\r\n"],
        [CHUNKED, b"-1\r\nx"],
        [CHUNKED + b"2\r\nabc\r\n0\r\n\r\n"],
        [CHUNKED.replace(b"chunked", b"gzip"), b"body"],
        [CHUNKED.replace(b"chunked", b"chunked, gzip"), b"0\r\n\r\n"],
        [CHUNKED.replace(b"chunked", b"nonsense"), b"0\r\n\r\n"],
        [CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"), b"0\r\n\r\n"],
        [CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: x"), b"body"],
    ],
    ids=[
        *("chunk size", "negative size", "chunk too long", "gzip", "not chunked last"),
        *("no coding", "length too", "no length"),
    ],
)
async def test_a_body_that_cannot_be_read_is_a_400(port: int, pieces: list[bytes]) -> None:
    response = await answer(port, *pieces)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400"), response
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "BadRequestError"


async def test_an_earlier_answer_is_not_mistaken_for_one_to_what_is_wrong(port: int) -> None:
    """Of two requests at once, the second is wrong: the first answer, if any, is the first's."""
    get = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
    for wrong in (b"\x16 this is TLS\r\n\r\n", CHUNKED + b"no size\r\n"):
        response = await answer(port, get + wrong)
        assert response == b"" or response.startswith(b"HTTP/1.1 200")


# --- bodies that nobody wants ---

BODY = UNWANTED_BYTES + 1
REFUSED = b"POST /refused HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [REFUSED % BODY, CHUNKED.replace(b"/x", b"/refused")],
    ids=["long", "of unknown length"],
)
async def test_a_body_is_not_read_once_its_request_is_refused(port: int, head: bytes) -> None:
    response = await answer(port, head)  # no byte of the body: the server does not wait for it
    assert response.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in response


async def test_a_connection_goes_on_after_a_refusal_with_a_short_body(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REFUSED % 3)
    assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401")
    writer.write(b"abc" + REFUSED.replace(b"/refused", b"/x") % 4 + b"abcd")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(1) == b"4"
    writer.close()


async def test_a_body_that_is_there_keeps_the_connection(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(REFUSED.replace(b"/refused", b"/x") % BODY + b"x" * BODY)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head
        assert await reader.readexactly(len(str(BODY))) == str(BODY).encode()
    writer.close()


async def test_a_web_socket_is_no_way_in(port: int) -> None:
    upgrade = (
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    head = await answer(port, upgrade, until_closed=False)
    assert not head.startswith(b"HTTP/1.1 101")


async def test_a_target_that_is_no_url_is_refused_like_what_is_no_http(port: int) -> None:
    told = await answer(port, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 400")
    assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
"""What Java's ``HttpClient`` adds to its first request."""
POST = b"POST /x HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\n%bTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
NEXT = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 7\r\n\r\n1234567"


@pytest.mark.parametrize(
    ("sent", "lengths"),
    [
        (POST % (UPGRADE, 3) + b"abc", [3]),
        (POST % (UPGRADE, len(NEXT)) + NEXT, [len(NEXT)]),  # a body is never a request
        (CHUNKED % UPGRADE, [2]),
        (NEXT.replace(b"Host", UPGRADE + b"Host"), [0]),
        (CHUNKED % UPGRADE + POST % (UPGRADE, 5) + b"abcde" + NEXT, [2, 5, 0]),
        (POST % (b"", 3) + b"abc", [3]),
    ],
)
async def test_a_wish_for_another_protocol_is_passed_over(
    port: int, sent: bytes, lengths: list[int]
) -> None:
    sent += LAST
    for size in (1, len(sent)):
        pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
        told = await answer(port, *pieces)
        bodies = [each.partition(b"\r\n\r\n")[2] for each in told.split(b"HTTP/1.1 200 OK")[1:]]
        assert [int(body) for body in bodies] == [*lengths, 7]


async def test_after_a_wish_a_wrong_chunk_is_no_http_either(port: int) -> None:
    wrong = (CHUNKED % UPGRADE).replace(b"ab", b"abc")
    assert (await answer(port, wrong)).startswith(b"HTTP/1.1 400")
