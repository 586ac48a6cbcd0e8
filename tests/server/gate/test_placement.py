import asyncio
import contextvars
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol.messages import Ended, Outcome, Placed
from shoal.runtime.protocol.wire import FinishReason, Terms
from shoal.server.errors import error_body, messages_error_body, retold_event
from shoal.server.gate.held_responses import PlacementMiddleware
from shoal.server.gate.placement import Placements
from shoal.server.rejections import Refused, Rejection
from tests.units import tp

PATH = "/v1/completions"


def head() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def output(request_id: str, finish_reason: str | None = None, tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request_id, new_token_ids=[7] * tokens, finish_reason=finish_reason
    )


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def respond(
    app: Any,
    placements: Placements,
    path: str = PATH,
    rejected: list[Rejection] | None = None,
) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    count = ([] if rejected is None else rejected).append
    middleware = PlacementMiddleware(app, placements, [PATH], count)
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
        placements.take(Placed("r1", tp(0, 1)))
        assert sent == []
        await send(body(b"one"))
        assert len(sent) == 2
        await send(body(b"two", more=False))

    await PlacementMiddleware(app, placements, [PATH], [].append)(
        {"type": "http", "path": PATH}, never, send
    )
    assert headers(sent) == {"a": "b", "x-shoal-unit": "0,1", "x-shoal-layout": "tp2"}
    assert [message.get("body") for message in sent] == [None, b"one", b"two"]


def test_a_request_that_comes_of_one_that_ran_is_told_to_have_begun() -> None:
    placements = Placements()
    placements.open()
    assert placements.expect("r1") == Terms()
    placements.take(Placed("r1", alone(0)))
    assert placements.expect("r2") == Terms(begun=True)


async def test_output_waits_for_a_note_that_is_on_its_way() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        await send(head())
        note = Placed("r1", alone(3))
        asyncio.get_running_loop().call_soon(placements.take, note)
        await send(body(b"text", more=False))

    assert headers(await respond(app, placements))["x-shoal-unit"] == "3"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"allowed_token_ids": [5]}, 400),
        ({"bad_words": ["a"]}, 400),
        ({}, 500),  # whatever it was, the request is not to blame
        ({"allowed_token_ids": [5], "structured_outputs": None}, 500),
    ],
)
async def test_a_grammar_without_a_token_that_is_left_is_its_caller_s_mistake(
    fields: dict[str, Any], status: int
) -> None:
    placements = Placements()
    defaults = {"structured_outputs": "a grammar", "allowed_token_ids": None, "bad_words": None}
    sampling = SimpleNamespace(**{**defaults, **fields})
    request = SimpleNamespace(
        request_id="r1", prompt_token_ids=[1], sampling_params=sampling, cache_salt=None
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.count_in(request)
        placements.take(Placed("r1", alone(0)))
        failed = SimpleNamespace(
            request_id="r1", new_token_ids=[], finish_reason=FinishReason.ERROR
        )
        placements.outputs(alone(0), [failed])
        await send({**head(), "status": 500})
        await send(body(b"what vLLM says", more=False))

    sent = await respond(app, placements)
    assert sent[0]["status"] == status
    if status == 400:
        assert "allows no token" in json.loads(sent[1]["body"])["error"]["message"]


@pytest.mark.parametrize("note_first", [True, False])
async def test_a_request_that_is_handed_back_while_it_runs_waits_for_the_word_on_it(
    note_first: bool,
) -> None:
    placements = Placements()
    note = Ended("r1", Outcome.HANDED_BACK, 503, "the end", 1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        placements.take(Placed("r1", alone(0)))
        await send({**head(), "status": 500})
        if note_first:
            placements.take(note)
        placements.outputs(None, [output("r1", "error")])
        if not note_first:
            asyncio.get_running_loop().call_soon(placements.take, note)
        await send(body(b"what vLLM says", more=False))

    rejected: list[Rejection] = []
    sent = await respond(app, placements, rejected=rejected)
    assert sent[0]["status"] == 503
    assert headers(sent)["retry-after"] == "1"
    assert rejected == []  # a unit had it


@pytest.mark.parametrize(
    ("content_type", "status"), [("text/event-stream", 200), ("application/json", 400)]
)
async def test_a_caller_with_too_much_that_waits_gets_a_429_whatever_vllm_says(
    content_type: str, status: int
) -> None:
    placements, rejected = Placements(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.refuse(Refused(429, "too many", 1))
        type_header = (b"content-type", content_type.encode())
        await send({**head(), "status": status, "headers": [type_header]})
        await send(body(b"what vLLM says", more=False))

    sent = await respond(app, placements, rejected=rejected)
    assert sent[0]["status"] == 429
    assert headers(sent)["retry-after"] == "1"
    assert json.loads(sent[1]["body"])["error"]["message"] == "too many"
    assert rejected == [Rejection.CALLER_LIMIT]


async def test_vllm_s_own_refusal_stays_where_it_has_the_status() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.refuse(Refused(400, "wrong"))
        await send({**head(), "status": 400})
        await send(body(b"what vLLM says", more=False))

    assert (await respond(app, placements))[1]["body"] == b"what vLLM says"


@pytest.mark.parametrize("content_type", ["text/event-stream; charset=utf-8", "application/json"])
async def test_a_request_that_the_controller_ended_gets_its_status(content_type: str) -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        await send({**head(), "headers": [(b"content-type", content_type.encode())]})
        note = Ended("r1", Outcome.EXPIRED, 504, "too late")
        asyncio.get_running_loop().call_soon(placements.take, note)
        await send(body(b"what vLLM"))
        await send(body(b" says", more=False))

    sent = await respond(app, placements)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 504
    assert headers(sent)["content-type"] == "application/json"
    assert "retry-after" not in headers(sent)
    assert json.loads(sent[1]["body"])["error"]["message"] == "too late"


ERROR_EVENT = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


async def stream_that_fails(note: Ended | None, *, late: bool) -> list[bytes]:
    """Return what a stream's client reads whose request is interrupted after its first chunk."""
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        await send({**head(), "headers": [(b"content-type", b"text/event-stream")]})
        placements.take(Placed("r1", alone(0)))
        await send(body(b"data: one\n\n"))
        if note is not None:
            placements.expect_again("r1")
            asyncio.get_running_loop().call_later(0, placements.take, note)
        if not late:
            await asyncio.sleep(0)
        await send(body(ERROR_EVENT + b"data: [DONE]\n\n"))
        await send(body(b"", more=False))

    return [message["body"] for message in (await respond(app, placements))[1:]]


@pytest.mark.parametrize("late", [True, False])
async def test_an_error_in_a_stream_says_why(late: bool) -> None:
    note = Ended("r1", Outcome.LOST, 500, "the engine died")
    chunks = await stream_that_fails(note, late=late)
    event, _, rest = chunks[1].partition(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "the engine died"
    assert rest == b"data: [DONE]\n\n"
    assert chunks[0] == b"data: one\n\n"


def test_an_error_is_told_anew_in_the_shape_of_its_api() -> None:
    error = error_body(503, "the node ends")
    chat = retold_event(b'data: {"error": {"message": "x"}}', error)
    assert json.loads(chat.removeprefix(b"data: ")) == error
    named = b"event: error\ndata: "
    message = retold_event(named + b'{"type": "error", "error": {}}', error)
    assert json.loads(message.removeprefix(named)) == messages_error_body(error)
    said = {"type": "error", "code": "500", "message": "x", "param": None, "sequence_number": 7}
    response = retold_event(named + json.dumps(said).encode(), error)
    told = {**said, "code": "503", "message": "the node ends"}
    assert json.loads(response.removeprefix(named)) == told
    assert response.endswith(b"\n\n")


async def test_an_error_that_the_controller_knows_nothing_of_stays_as_it_is() -> None:
    chunks = await stream_that_fails(None, late=False)
    assert chunks[1] == ERROR_EVENT + b"data: [DONE]\n\n"


async def test_a_response_waits_for_the_next_note_of_an_interrupted_request() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        placements.take(Placed("r1", alone(0)))
        await send(head())
        placements.expect_again("r1")
        note = Ended("r1", Outcome.POISONED, 500, "it kills engines")
        asyncio.get_running_loop().call_soon(placements.take, note)
        await send(body(b"what vLLM says", more=False))

    sent = await respond(app, placements)
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["message"] == "it kills engines"


@pytest.mark.parametrize("status", [429, 503])
async def test_an_overload_says_when_to_try_again(status: int) -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current = placements.current
        assert current is not None
        current.priority = 7
        placements.expect("r1")
        placements.take(Ended("r1", Outcome.POOL_FULL, status, "full", 17))
        await send(head())
        await send(body(b"", more=False))

    got = headers(await respond(app, placements))
    assert got["retry-after"] == "17"
    assert got["x-shoal-priority"] == "7"


@pytest.mark.parametrize(
    ("status", "ended", "counted"),
    [
        (200, None, []),
        (200, Ended("r1", Outcome.EXPIRED, 504, ""), [Rejection.EXPIRED]),
        (200, Ended("r1", Outcome.POOL_FULL, 503, ""), [Rejection.POOL_FULL]),
        (200, Ended("r1", Outcome.TOO_LONG, 400, ""), [Rejection.TOO_LONG]),
        (200, Ended("r1", Outcome.LOST, 500, ""), []),
        (200, Ended("r1", Outcome.ABORTED), []),
        (400, None, [Rejection.INVALID]),
        (404, None, [Rejection.INVALID]),
        (429, None, []),
        (500, None, []),
    ],
)
async def test_what_is_refused_is_counted_once_by_its_reason(
    status: int, ended: Ended | None, counted: list[Rejection]
) -> None:
    placements, rejected = Placements(), list[Rejection]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        placements.take(ended or Placed("r1", alone(0)))
        await send({**head(), "status": status})
        await send(body(b"", more=False))

    await respond(app, placements, rejected=rejected)
    assert rejected == counted


@pytest.mark.parametrize(
    ("ended", "status", "reason"),
    [(None, 400, Rejection.INVALID), (Outcome.EXPIRED, 504, Rejection.EXPIRED)],
)
async def test_a_stream_that_breaks_off_before_it_is_there_says_why(
    ended: Outcome | None, status: int, reason: Rejection
) -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**head(), "headers": [(b"content-type", b"text/event-stream")]})
        await send(body(b"event: response.created\n\n"))
        if ended is None:
            placements.refuse(Refused(400, "no grammar"))
        else:
            placements.expect("r1")
            note = Ended("r1", ended, 504, "too late")
            asyncio.get_running_loop().call_soon(placements.take, note)
        raise RuntimeError("response already started")

    rejected: list[Rejection] = []
    sent = await respond(app, placements, rejected=rejected)
    assert [message.get("status") for message in sent] == [status, None]
    assert json.loads(sent[1]["body"])["error"]["message"] in ("no grammar", "too late")
    assert rejected == [reason]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_failure_that_nobody_explains_stays_one(begun: bool) -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            placements.refuse(Refused(400, "no grammar"))
            await send(head())
            await send(body(b"text"))
        else:
            await send(head())
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        await respond(app, placements)


async def test_an_aborted_request_ends_as_vllm_says() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        placements.take(Ended("r1", Outcome.ABORTED))
        await send(head())
        await send(body(b"text", more=False))

    sent = await respond(app, placements)
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"text")


async def test_a_whole_response_waits_for_every_note_and_a_stream_for_the_first() -> None:
    async def run(content_type: bytes) -> int:
        placements = Placements()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            placements.expect("r1")
            placements.expect("r2")
            placements.take(Placed("r1", alone(0)))
            await send({**head(), "headers": [(b"content-type", content_type)]})
            # The note of the second may be behind the output that ends the response.
            note = Ended("r2", Outcome.EXPIRED, 504, "too late")
            asyncio.get_running_loop().call_soon(placements.take, note)
            await send(body(b"", more=False))

        return int((await respond(app, placements))[0]["status"])

    assert await run(b"application/json") == 504
    assert await run(b"text/event-stream") == 200


async def test_a_stream_that_talks_before_it_asks_an_engine_is_held_until_then() -> None:
    async def run(note: Placed | Ended) -> list[Message]:
        placements = Placements()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({**head(), "headers": [(b"content-type", b"text/event-stream")]})
            await send(body(b"created "))
            placements.expect("r1")
            placements.take(note)
            await send(body(b"token", more=False))

        return await respond(app, placements)

    expired = await run(Ended("r1", Outcome.EXPIRED, 504, "too late"))
    assert (expired[0]["status"], len(expired)) == (504, 2)
    placed = await run(Placed("r1", alone(0)))
    assert headers(placed)["x-shoal-unit"] == "0"
    assert [message.get("body") for message in placed[1:]] == [b"created ", b"token"]


async def test_a_background_response_waits_for_nothing() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current = placements.current
        assert current is not None
        current.in_background = True
        placements.expect("r1")
        await send(head())
        await send(body(b"queued", more=False))

    assert (await respond(app, placements))[1]["body"] == b"queued"


@pytest.mark.parametrize("sent_late", [False, True])
@pytest.mark.parametrize("end", ["output", "note", "stop string", "abort"])
async def test_a_background_response_is_followed_until_its_requests_end(
    end: str, sent_late: bool
) -> None:
    placements, spent = Placements(), list[int]()
    context = contextvars.copy_context()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal context
        current = placements.current
        assert current is not None
        current.in_background, current.spend_tokens = True, spent.append
        placements.expect("over")
        placements.outputs(alone(0), [output("over", "stop")])
        if not sent_late:
            placements.expect("r1")
        context = contextvars.copy_context()  # of the task that goes on
        await send(head())
        await send(body(b"queued", more=False))

    await respond(app, placements)
    if sent_late:
        assert not len(placements)
        context.run(placements.expect, "r1")
    assert placements.awaiting() == ["r1"]
    placements.take(Placed("r1", alone(0)))
    spent.clear()
    placements.outputs(alone(0), [output("r1", tokens=3)])
    assert spent == [3]
    if end == "output":
        placements.outputs(alone(0), [output("r1", "length")])
    elif end == "note":
        placements.ended(Ended("r1", Outcome.LOST, 500, "its engine died"))
    elif end == "stop string":
        placements.finished(["r1"])
    else:
        placements.aborted(["r1"])
    assert not len(placements)


async def test_a_request_that_could_not_be_sent_is_not_waited_for() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        placements.give_up("r1")
        await send({**head(), "status": 500})
        await send(body(b"broken", more=False))

    assert (await respond(app, placements))[0]["status"] == 500


async def test_every_engine_request_gets_the_terms_of_its_http_request() -> None:
    placements, terms = Placements(), Terms(deadline=3.0)
    assert placements.expect("outside") == Terms()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current = placements.current
        assert current is not None
        current.terms = terms
        assert placements.expect("r1") is placements.expect("r2") is terms

    await respond(app, placements)


async def test_several_engine_requests_name_each_unit_once_in_order() -> None:
    placements = Placements()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def ask(name: str, note: Placed) -> None:
            placements.expect(name)  # a task of its own inherits the request's context
            placements.take(note)

        units = {"a": (alone(2), "dp"), "b": (tp(0, 1), "tp2"), "c": (alone(2), "dp")}
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
    placements.take(Placed("r1", alone(0)))


async def test_two_requests_at_a_time_keep_their_placements_apart() -> None:
    placements = Placements()

    def app_for(name: str, engine: int) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            placements.expect(name)
            await send(head())
            placements.take(Placed(name, alone(engine)))
            await send(body(b"", more=False))

        return app

    first, second = await asyncio.gather(
        respond(app_for("r1", 1), placements), respond(app_for("r2", 2), placements)
    )
    assert headers(first)["x-shoal-unit"] == "1"
    assert headers(second)["x-shoal-unit"] == "2"
