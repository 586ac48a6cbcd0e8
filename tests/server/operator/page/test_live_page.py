"""The routes of the live page, as the admin port's application has them."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.protocol.messages import Placed
from shoal.server.frontend.app import Backstage, build_admin_app
from shoal.server.gate.access import Access
from shoal.server.gate.held_responses import PlacementMiddleware
from shoal.server.gate.middleware import CALLER, ApiKeyMiddleware
from shoal.server.gate.placement import Placements
from shoal.server.operator import page as page_package
from shoal.server.operator.page.live_page import PAGE_PATHS
from shoal.server.operator.page.page_feed import MOST_VIEWERS, Feed
from shoal.server.operator.page.prompt_route import CHAT_PATH
from tests.runtime.loopback_node import LoopbackNode
from tests.server.node import key_file
from tests.server.operator.page.parts import ABOUT, Control
from tests.units import tp

KEY = {"Authorization": "Bearer operator"}
CHAT = {"model": "demo", "messages": [], "stream": True}
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]

Public = Callable[[Scope, Receive, Send], Awaitable[None]]


@pytest.fixture
def feed() -> Feed:
    node = LoopbackNode(2)
    node.settle()
    return Feed(Control(node), ABOUT)  # type: ignore[arg-type]


@pytest.fixture
def placements() -> Placements:
    return Placements()


@pytest.fixture
def build(feed: Feed, placements: Placements) -> Callable[..., Any]:
    def built(access: Access | None = None, public: Public | None = None) -> Any:
        parts: dict[str, Any] = dict.fromkeys(("control", "door", "is_alive", "registered"))
        backstage = Backstage(**parts, placements=placements, feed=feed, rejected=lambda _: None)
        return build_admin_app(backstage, access or Access(), public)

    return built


@pytest.fixture
def keyed(tmp_path: Path) -> Access:
    return Access(admin_key_file=key_file(tmp_path / "keys.json", "operator"))


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8001")


# --- files ---


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")],
)
async def test_a_file_is_sent_with_a_policy_that_forbids_all_but_the_port(
    build: Callable[..., Any], path: str, kind: str
) -> None:
    async with client(build()) as http:
        response = await http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)
    policy = response.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_files_name_no_other_host_and_set_no_markup() -> None:
    for name in ("page.html", "page.js", "page.css"):
        text = files(page_package).joinpath(name).read_text()
        assert set(re.findall(r"https?://[^\s'\"]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    html = files(page_package).joinpath("page.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=\"page\.js\" defer>)", html)


@pytest.mark.parametrize("needed", [False, True])
async def test_the_page_knows_whether_it_has_to_ask_for_a_key(
    build: Callable[..., Any], keyed: Access, needed: bool
) -> None:
    async with client(build(keyed if needed else None)) as http:
        for path in PAGE_PATHS:
            assert (await http.get(path)).status_code == 200
        says = f'data-needs-key="{str(needed).lower()}"'
        assert says in (await http.get("/")).text


# --- events ---


def scope_of(path: str, method: str = "GET") -> Scope:
    headers = [(b"host", b"127.0.0.1:8001")]
    return {
        **{"type": "http", "method": method, "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http"},
        **{"server": ("127.0.0.1", 8001), "client": ("127.0.0.1", 9)},
    }


async def test_events_go_on_until_the_viewer_leaves(build: Callable[..., Any], feed: Feed) -> None:
    sent: asyncio.Queue[Message] = asyncio.Queue()
    left = asyncio.Event()
    asked = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Message:
        for message in asked:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    watching = asyncio.create_task(build()(scope_of("/admin/events"), receive, sent.put))
    head = await sent.get()
    assert head["status"] == 200
    assert dict(head["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert (await sent.get())["body"].startswith(b"event: history\n")
    feed.look()
    assert (await sent.get())["body"].startswith(b"event: moment\n")
    assert len(feed) == 1
    left.set()
    await watching
    assert len(feed) == 0


async def test_a_viewer_that_reads_nothing_is_forgotten_too(
    build: Callable[..., Any], feed: Feed
) -> None:
    left, blocked = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()  # the connection takes nothing more

    watching = asyncio.create_task(build()(scope_of("/admin/events"), receive, send))
    await blocked.wait()
    assert len(feed) == 1
    left.set()
    await watching
    assert len(feed) == 0


async def test_the_end_of_the_node_is_the_end_of_the_events(
    build: Callable[..., Any], feed: Feed
) -> None:
    async with client(build()) as http:
        asked = asyncio.create_task(http.get("/admin/events"))  # returns at the end of the stream
        while not len(feed):
            await asyncio.sleep(0)
        feed.close()
        assert (await asked).status_code == 200


async def test_there_are_only_so_many_viewers(build: Callable[..., Any], feed: Feed) -> None:
    viewers = [feed.watched() for _ in range(MOST_VIEWERS)]
    for viewer in viewers:
        viewer.__enter__()
    async with client(build()) as http:
        assert (await http.get("/admin/events")).status_code == 503
    for viewer in viewers:
        viewer.__exit__(None, None, None)


# --- prompts ---


@pytest.fixture
def seen() -> list[Scope]:
    return []


def public_app(placements: Placements, seen: list[Scope], *units: Unit) -> Public:
    """Return an application whose answer comes from these units, one event from each."""

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        assert body == CHAT
        seen.append(scope)
        placements.expect("r1")
        placements.take(Placed("r1", units[0]))
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        for k, unit in enumerate(units):
            placements.take(Placed("r1", unit))
            piece = f"data: {k}\n\n".encode()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return PlacementMiddleware(stream, placements, [CHAT_PATH], lambda _: None)


async def test_a_prompt_s_stream_says_which_unit_goes_on_with_it(
    build: Callable[..., Any], placements: Placements, seen: list[Scope]
) -> None:
    public = public_app(placements, seen, alone(0), alone(0), tp(0, 1), alone(0))
    async with client(build(public=public)) as http:
        response = await http.post("/admin/chat/completions", json=CHAT)
    lines = response.text.split("\n\n")
    assert [line.split("\n")[0] for line in lines] == [
        *("event: unit", "data: 0", "data: 1", "event: unit", "data: 2", "event: unit"),
        *("data: 3", "data: [DONE]", ""),
    ]
    told = [json.loads(line.split("data: ")[1]) for line in lines if "unit" in line]
    assert [(each["unit"], each["layout"]) for each in told] == [
        *(("0", "dp"), ("0,1", "tp2"), ("0", "dp")),
    ]
    assert len({tuple(each["requests"]) for each in told}) == 1
    assert response.headers["x-shoal-unit"] == "0"


async def test_the_public_port_sees_a_caller_of_its_own_and_no_admin_key(
    build: Callable[..., Any], placements: Placements, seen: list[Scope], keyed: Access
) -> None:
    guarded = ApiKeyMiddleware(
        public_app(placements, seen, alone(0)),
        keys=NoKeys(),  # type: ignore[arg-type]
        quotas=None,  # type: ignore[arg-type]
        open_paths=(),
        rejected=lambda _: None,
    )
    async with client(build(keyed, guarded)) as http:
        own = {"Origin": "http://127.0.0.1:8001", "X-Shoal-Page": "1", "X-Vllm-Priority": "-3"}
        response = await http.post(
            "/admin/chat/completions?x=y", json=CHAT, headers={**KEY, **own, "X-Api-Key": "k"}
        )
        assert response.status_code == 200
        assert (await http.post(CHAT_PATH, json=CHAT, headers=KEY)).status_code == 404
        assert (await http.post("/admin/chat/completions", json=CHAT)).status_code == 401
    (scope,) = seen
    names = {name for name, _ in scope["headers"]}
    assert not names & {b"authorization", b"x-api-key", b"origin"}
    assert (b"x-vllm-priority", b"-3") in scope["headers"]
    assert (scope["path"], scope["query_string"]) == (CHAT_PATH, b"")
    assert scope[CALLER].key.tenant == "admin port: operator"


class NoKeys:
    """A ring of keys in which none is found."""

    def find(self, offered: str) -> None:
        del offered


async def test_a_request_without_a_checked_key_needs_one_at_the_public_port(
    build: Callable[..., Any], placements: Placements, seen: list[Scope]
) -> None:
    guarded = ApiKeyMiddleware(
        public_app(placements, seen, alone(0)),
        keys=NoKeys(),  # type: ignore[arg-type]
        quotas=None,  # type: ignore[arg-type]
        open_paths=(),
        rejected=lambda _: None,
    )
    async with client(build(public=guarded)) as http:
        assert (await http.post("/admin/chat/completions", json=CHAT)).status_code == 401
    assert seen == []


async def test_an_answer_that_is_no_stream_has_no_events(
    build: Callable[..., Any], placements: Placements
) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        placements.expect("r1")
        placements.take(Placed("r1", alone(0)))
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 400, "headers": head})
        await send({"type": "http.response.body", "body": b"{}"})

    public = PlacementMiddleware(refuse, placements, [CHAT_PATH], lambda _: None)
    async with client(build(public=public)) as http:
        response = await http.post("/admin/chat/completions", json=CHAT)
    assert (response.status_code, response.text) == (400, "{}")
