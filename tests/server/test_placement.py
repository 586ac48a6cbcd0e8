import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from runtime.messages import Placed
from server import placement
from server.placement import PlacementMiddleware, Placements

PATH = "/v1/completions"


def head() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def respond(app: Any, placements: Placements, path: str = PATH) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    middleware = PlacementMiddleware(app, placements, [PATH])
    await middleware({"type": "http", "path": path}, never, send)
    return sent


def headers(sent: list[Message]) -> dict[str, str]:
    assert sent[0]["type"] == "http.response.start"
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def test_the_head_of_a_stream_leaves_with_its_first_chunk_and_says_where_it_ran() -> None:
    placements = Placements()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head())
        assert sent == []
        placements.expect("r1")
        placements.placed(Placed("r1", (0, 1), "tp2"))
        assert sent == []
        await send(body(b"one"))
        assert len(sent) == 2
        await send(body(b"two", more=False))

    await PlacementMiddleware(app, placements, [PATH])({"type": "http", "path": PATH}, never, send)
    assert headers(sent) == {"a": "b", "x-shoal-unit": "0,1", "x-shoal-layout": "tp2"}
    assert [message.get("body") for message in sent] == [None, b"one", b"two"]


async def test_output_waits_for_a_note_that_is_on_its_way() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        await send(head())
        note = Placed("r1", (3,), "dp")
        asyncio.get_running_loop().call_soon(placements.placed, note)
        await send(body(b"text", more=False))

    assert headers(await respond(app, placements))["x-shoal-unit"] == "3"


async def test_a_note_that_never_comes_delays_but_does_not_lose_the_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "NOTE_TIMEOUT_SECONDS", 0.0)
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        await send(head())
        await send(body(b"text", more=False))

    sent = await respond(app, placements)
    assert headers(sent) == {"a": "b"}
    assert sent[1]["body"] == b"text"


async def test_several_engine_requests_name_each_unit_once_in_order() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def ask(name: str, note: Placed) -> None:
            placements.expect(name)  # a task of its own inherits the request's context
            placements.placed(note)

        units = {"a": ((2,), "dp"), "b": ((0, 1), "tp2"), "c": ((2,), "dp")}
        for name, (unit, layout) in units.items():
            await asyncio.create_task(ask(name, Placed(name, unit, layout)))
        await send(head())
        await send(body(b"", more=False))

    got = headers(await respond(app, placements))
    assert (got["x-shoal-unit"], got["x-shoal-layout"]) == ("2;0,1", "dp;tp2")


async def test_a_response_without_engine_requests_is_not_delayed_and_gets_no_headers() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head())
        await send(body(b"bad request", more=False))

    assert headers(await respond(app, Placements())) == {"a": "b"}


async def test_other_paths_pass_untouched() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        await send(head())

    assert await respond(app, placements, "/other") == [head()]
    assert len(placements) == 0


async def test_requests_are_forgotten_when_the_response_ends_even_by_an_error() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        assert len(placements) == 1
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await respond(app, placements)
    assert len(placements) == 0
    placements.placed(Placed("r1", (0,), "dp"))


async def test_two_requests_at_a_time_keep_their_placements_apart() -> None:
    placements = Placements()

    def app_for(name: str, engine: int) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            placements.expect(name)
            await send(head())
            placements.placed(Placed(name, (engine,), "dp"))
            await send(body(b"", more=False))

        return app

    first, second = await asyncio.gather(
        respond(app_for("r1", 1), placements), respond(app_for("r2", 2), placements)
    )
    assert headers(first)["x-shoal-unit"] == "1"
    assert headers(second)["x-shoal-unit"] == "2"
