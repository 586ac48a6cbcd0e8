import asyncio
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.server.gate.bodies import DECODED_BODY
from shoal.server.gate.body_room import BodyRoom
from shoal.server.gate.bounds import DEFAULTS, BoundsError
from shoal.server.gate.guard import BodyMiddleware, HeadMiddleware, SameOriginMiddleware
from shoal.server.rejections import Rejection


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


APP = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])


def client(app: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://shoal")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/x", {}, 200),
        ("/" + "x" * 99, {}, 200),
        ("/" + "x" * 100, {}, 414),
        ("/?" + "x" * 200, {}, 414),
        ("/x", {f"x-{k}": "" for k in range(16)}, 431),
        ("/x", {"x-a": "y" * 1000}, 431),
    ],
)
async def test_a_head_is_bounded(path: str, headers: dict[str, str], status: int) -> None:
    bounds = replace(DEFAULTS, url_bytes=100, headers=20, header_bytes=1000)
    rejected: list[Rejection] = []
    async with client(HeadMiddleware(APP, bounds, rejected.append)) as http:
        response = await http.get(path, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["code"] == status
        assert rejected == [Rejection.INVALID]


def refuse_no(body: bytes) -> None:
    if body == b"no":
        raise BoundsError("field", "no")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("body", "status"), [(b"", 200), (b"x" * 50, 200), (b"x" * 51, 413), (b"no", 400)]
)
async def test_a_body_is_bounded_and_checked(body: bytes, status: int, chunked: bool) -> None:
    async def pieces() -> object:
        for at in range(0, len(body), 20):
            yield body[at : at + 20]

    async with client(BodyMiddleware(APP, 50, refuse_no)) as http:
        response = await http.post("/x", content=pieces() if chunked else body)  # type: ignore[arg-type]
    assert response.status_code == status
    if status == 200:
        assert response.content == body
    else:
        assert response.json()["error"]["code"] == status
    if status == 400:
        assert response.json()["error"]["param"] == "field"


class HeldApp:
    """Answers when it is told to, as a request that runs."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        await self.open.wait()
        await APP(scope, receive, send)


async def refuse(reason: str) -> PlainTextResponse:
    return PlainTextResponse(reason, 503)


async def test_bodies_together_are_bounded_until_their_responses_end() -> None:
    app, room = HeldApp(), BodyRoom(100)
    middleware = BodyMiddleware(app, 80, refuse_no, room=room, refuse=refuse)
    async with client(middleware) as http:
        first = asyncio.create_task(http.post("/x", content=b"x" * 60))
        while not app.begun:
            await asyncio.sleep(0)
        refused = await http.post("/x", content=b"x" * 41)
        assert (refused.status_code, app.begun) == (503, 1)
        assert "100 bytes together" in refused.text
        second = asyncio.create_task(http.post("/x", content=b"x" * 40))
        while app.begun < 2:
            await asyncio.sleep(0)
        assert room.taken == 100
        app.open.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert (await http.post("/x", content=b"x" * 80)).status_code == 200
    assert room.taken == 0


@pytest.mark.parametrize("body", [b"no", b"x" * 51])
async def test_a_body_that_is_refused_gives_its_room_back(body: bytes) -> None:
    room = BodyRoom(100)
    async with client(BodyMiddleware(APP, 50, refuse_no, room=room, refuse=refuse)) as http:
        for _ in range(5):
            assert (await http.post("/x", content=body)).status_code in (400, 413)
    assert room.taken == 0


async def test_no_more_of_a_body_is_read_than_is_allowed() -> None:
    asked = 0

    async def receive() -> dict[str, object]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"x" * 20, "more_body": True}

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    await BodyMiddleware(APP, 50, refuse_no)(scope, receive, send)  # type: ignore[arg-type]
    assert asked == 3
    assert sent[0]["status"] == 413


async def test_a_body_that_stops_before_its_end_reaches_nobody() -> None:
    """Its connection is closed, or ends with a wrong chunk: what there is of it looks whole."""
    messages = iter(
        [{"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"}]
    )
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return next(messages)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    await BodyMiddleware(APP, 50, refuse_no)(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("said", [{"prompt": [1]}, None])
async def test_what_a_body_says_goes_on_with_it(said: dict[str, object] | None) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope[DECODED_BODY])
        await APP(scope, receive, send)

    async with client(BodyMiddleware(app, 50, lambda _: said)) as http:
        assert (await http.post("/x", content=b"text")).text == "text"
        assert (await http.post("/x")).text == ""
    assert seen == [said, None]


async def test_a_get_has_no_body_to_check() -> None:
    async with client(BodyMiddleware(APP, 1, refuse_no)) as http:
        assert (await http.request("GET", "/x", content=b"no")).status_code == 200


OWN = {"Host": "127.0.0.1:8001"}
PAGE = {**OWN, "Origin": "http://127.0.0.1:8001", "X-Shoal-Page": "1"}
LINK = {**OWN, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        pytest.param("POST", "/x", OWN, 200, id="a program"),
        pytest.param("POST", "/x", {"Host": "localhost:9"}, 200, id="a forwarded port"),
        pytest.param("POST", "/x", {"Host": "[::1]:8001"}, 200, id="IPv6"),
        pytest.param("POST", "/x", PAGE, 200, id="the page"),
        pytest.param("POST", "/x", {**PAGE, "Sec-Fetch-Site": "same-origin"}, 200, id="today's"),
        pytest.param("GET", "/x", {**OWN, "Sec-Fetch-Site": "same-origin"}, 200, id="its file"),
        pytest.param("GET", "/x", {**OWN, "Sec-Fetch-Site": "none"}, 200, id="an address typed"),
        pytest.param("GET", "/", LINK, 200, id="a link to the page"),
        pytest.param("GET", "/x", LINK, 403, id="a link to something else"),
        pytest.param("POST", "/", LINK, 403, id="a form"),
        pytest.param("GET", "/", {**LINK, "Sec-Fetch-Mode": "no-cors"}, 403, id="an image"),
        pytest.param("GET", "/x", {**OWN, "Sec-Fetch-Site": "same-site"}, 403, id="a neighbour"),
        pytest.param("POST", "/x", {**PAGE, "Origin": "http://evil"}, 403, id="another site"),
        pytest.param("POST", "/x", {**PAGE, "Origin": "null"}, 403, id="no site"),
        pytest.param("POST", "/x", {**PAGE, "Origin": "http://127.0.0.1:3000"}, 403, id="port"),
        pytest.param("POST", "/x", {**OWN, "Origin": PAGE["Origin"]}, 403, id="no header"),
        pytest.param("GET", "/", {"Host": "evil.example:8001"}, 403, id="a name that leads here"),
        pytest.param("GET", "/", {"Host": "127.0.0.1.evil.example"}, 403, id="a name like ours"),
        pytest.param("GET", "/", {"Host": "[::1"}, 403, id="no name"),
    ],
)
async def test_only_pages_of_the_port_itself_are_answered(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with client(SameOriginMiddleware(APP, any_host=False)) as http:
        response = await http.request(method, path, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["code"] == status


async def test_where_a_key_is_needed_the_port_has_any_name() -> None:
    async with client(SameOriginMiddleware(APP, any_host=True)) as http:
        named = {"Host": "node-0.shoal", "X-Shoal-Page": "1"}
        own = {**named, "Origin": "https://node-0.shoal"}  # a proxy speaks TLS
        assert (await http.post("/x", headers=own)).status_code == 200
        foreign = {**named, "Origin": "http://evil"}
        assert (await http.post("/x", headers=foreign)).status_code == 403
