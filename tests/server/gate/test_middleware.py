import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.messages import Outcome, PoolLimits
from shoal.runtime.protocol.wire import Terms
from shoal.server.gate.guard import BodyMiddleware
from shoal.server.gate.held_responses import PlacementMiddleware
from shoal.server.gate.key_ring import KeyRing
from shoal.server.gate.keys import ApiKey, digest_of, plain_key
from shoal.server.gate.middleware import BATCH_OWNER, ApiKeyMiddleware, TermsMiddleware
from shoal.server.gate.placement import Placements
from shoal.server.gate.pool_door import PoolDoor
from shoal.server.gate.quotas import Quotas
from shoal.server.rejections import Rejection


async def ok(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


APP = Starlette(
    routes=[Route(path, ok, methods=["GET", "POST", "OPTIONS"]) for path in ("/health", "/v1/x")]
)


RING = KeyRing([plain_key("first"), plain_key("second")])


def guarded(rejected: list[Rejection]) -> object:
    return ApiKeyMiddleware(APP, RING, Quotas(), ["/health"], rejected.append)


def key(text: str, name: str | None = None, **limits: int) -> ApiKey:
    return ApiKey(digest_of(text), name, **limits)


def client(app: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://shoal")


def of_a_batch(app: Any, owner: str) -> Any:
    """Be the batch worker's own socket, which marks requests with the owner of their batch."""

    async def marked(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, BATCH_OWNER: owner}, receive, send)

    return marked


async def test_requests_of_batches_come_with_an_owner_and_not_with_a_key() -> None:
    limited = key("k", "tenant", max_concurrent=1, requests_per_minute=1)
    app = ApiKeyMiddleware(APP, KeyRing([limited]), Quotas(), [], lambda _: None)
    async with client(of_a_batch(app, "tenant")) as http:
        assert [(await http.post("/v1/x")).status_code for _ in range(3)] == [200] * 3
    async with client(of_a_batch(app, "gone")) as http:
        assert (await http.post("/v1/x", headers={"X-Api-Key": "k"})).status_code == 401
    async with client(app) as http:
        asked = await http.post("/v1/x", headers={"X-Shoal-Batch-Owner": "tenant"})
        assert asked.status_code == 401


@pytest.mark.parametrize("key", ["first", "second"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_any_of_the_keys_opens(key: str, scheme: str) -> None:
    rejected: list[Rejection] = []
    async with client(guarded(rejected)) as http:
        response = await http.get("/v1/x", headers={"Authorization": f"{scheme} {key}"})
    assert response.text == "ok"
    assert rejected == []


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with client(guarded([])) as http:
        for headers in (
            {"X-Api-Key": "second"},
            {"X-Api-Key": "x", "Authorization": "Bearer first"},
        ):
            assert (await http.get("/v1/x", headers=headers)).text == "ok"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer firstsecond"},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"X-Api-Key": "wrong"},
        {"X-Api-Key": ""},
        {"X-Api-Key": "first", "Authorization": "Bearer wrong"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/x", "/metrics", "/admin/layout", "/not/there", "/healthy"])
async def test_without_a_key_everything_is_shut(headers: dict[str, str], path: str) -> None:
    rejected: list[Rejection] = []
    async with client(guarded(rejected)) as http:
        response = await http.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert rejected == [Rejection.UNAUTHORIZED]


async def test_open_paths_and_preflights_need_no_key() -> None:
    async with client(guarded([])) as http:
        assert (await http.get("/health")).text == "ok"
        assert (await http.options("/v1/x")).text == "ok"


@pytest.mark.parametrize("limit", ["requests_per_minute", "max_concurrent"])
async def test_a_key_over_its_limit_is_told_when_to_try_again(limit: str) -> None:
    rejected: list[Rejection] = []
    clock = ManualClock()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> PlainTextResponse:
        entered.set()
        await leave.wait()
        return PlainTextResponse("ok")

    app = Starlette(routes=[Route("/v1/x", slow, methods=["POST", "GET"])])
    ring = KeyRing([key("a", "greedy", **{limit: 1}), key("b", "modest")])
    wrapped = ApiKeyMiddleware(app, ring, Quotas(clock=clock), [], rejected.append)
    async with client(wrapped) as http:
        greedy, modest = ({"Authorization": f"Bearer {text}"} for text in "ab")
        first = asyncio.create_task(http.post("/v1/x", headers=greedy))
        await entered.wait()
        refused = await http.post("/v1/x", headers=greedy)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "TooManyRequestsError"
        assert int(refused.headers["retry-after"]) == (60 if "minute" in limit else 1)
        assert "greedy" in message_of(refused)
        assert rejected == [Rejection.CALLER_LIMIT]
        leave.set()
        assert (await first).status_code == 200
        assert (await http.post("/v1/x", headers=modest)).status_code == 200
        clock.advance(60)
        assert (await http.post("/v1/x", headers=greedy)).status_code == 200
        # What only looks is never refused.
        assert (await http.get("/v1/x", headers=greedy)).status_code == 200


async def test_tokens_are_counted_for_the_key_that_spent_them() -> None:
    echo = Echo(key("k", "batch", tokens_per_minute=100))
    headers = {"Authorization": "Bearer k"}
    echo.tokens = 250
    assert (await echo.post(headers=headers)).status_code == 200
    refused = await echo.post(headers=headers)
    assert (refused.status_code, echo.reached) == (429, 1)
    assert refused.headers["retry-after"] == "91"  # 1.5 minutes, and one token's time
    echo.clock.advance(91)
    assert (await echo.post(headers=headers)).status_code == 200


async def test_a_prefix_of_the_root_path_leads_around_nothing() -> None:
    rejected: list[Rejection] = []
    app = FastAPI(root_path="/proxy")
    app.add_api_route("/v1/x", ok, methods=["GET"])
    app.add_api_route("/health", ok, methods=["GET"])
    app.add_middleware(
        ApiKeyMiddleware,
        keys=RING,
        quotas=Quotas(),
        open_paths=["/health"],
        rejected=rejected.append,
    )
    async with client(app) as http:
        for prefix in ("", "/proxy"):
            assert (await http.get(f"{prefix}/health")).status_code == 200
            assert (await http.get(f"{prefix}/v1/x")).status_code == 401


async def test_callers_find_only_their_own_prefixes_unless_they_share() -> None:
    salts = []
    for text in ("a", "b", "a"):
        echo = Echo(key("a", "one"), key("b", "two"))
        await echo.post(headers={"Authorization": f"Bearer {text}"})
        salts.append((echo.salt, echo.own_salt))
    (first, own), (second, _), again = salts
    assert first is not None
    assert again == (first, own)
    assert len({first, own, second}) == 3
    shared = Echo(key("a", "one"), share_prefix_cache=True)
    await shared.post(headers={"Authorization": "Bearer a"})
    assert (shared.salt, shared.own_salt) == (None, "mine")
    assert shared.holder == "one"  # for the queue of grammars they stay apart
    keyless = Echo()
    await keyless.post()
    assert (keyless.salt, keyless.own_salt) == (None, "mine")
    assert keyless.holder is None


async def test_metrics_name_a_key_and_never_show_it() -> None:
    for keys, name in (([key("a", "one")], "one"), ([plain_key("a")], "unnamed"), ([], "none")):
        echo = Echo(*keys)
        await echo.post(headers={"Authorization": "Bearer a"})
        assert echo.key_name == name


# --- what is asked of the task pool ---


def decoded(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a body is, and refuse none."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


class Echo:
    """An application behind the middleware of generating routes that answers what it was asked."""

    def __init__(self, *keys: ApiKey, share_prefix_cache: bool = False) -> None:
        self.placements = Placements()
        self.refused: list[Outcome] = []
        self.door = PoolDoor(self.count, [].append)
        self.clock = ManualClock(50.0)
        self.terms = Terms()
        self.reached = 0
        self.tokens = 0
        app = Starlette(routes=[Route("/v1/x", self.answer, methods=["GET", "POST"])])
        inner = TermsMiddleware(
            app, self.placements, self.door, self.clock, share_prefix_cache=share_prefix_cache
        )
        self.rejected: list[Rejection] = []
        count = self.rejected.append
        checked = BodyMiddleware(inner, 1000, decoded)
        self.app: object = PlacementMiddleware(checked, self.placements, ["/v1/x"], count)
        if keys:
            ring, quotas = KeyRing(keys), Quotas(clock=self.clock)
            self.app = ApiKeyMiddleware(self.app, ring, quotas, [], count)  # type: ignore[arg-type]

    async def count(self, outcome: Outcome) -> None:
        self.refused.append(outcome)

    async def answer(self, request: Request) -> PlainTextResponse:
        self.reached += 1
        self.terms = self.placements.expect("r1")
        self.holder, self.key_name = self.placements.holder, self.placements.key_name
        tokens = [7] * self.tokens
        output = SimpleNamespace(request_id="r1", new_token_ids=tokens, finish_reason=None)
        self.placements.outputs(alone(0), [output])
        self.salt, self.own_salt = self.placements.salt(None), self.placements.salt("mine")
        self.placements.give_up("r1")
        body = (await request.body()).decode()
        return PlainTextResponse(f"{request.headers.getlist('x-vllm-priority')} {body}")

    async def post(
        self, body: str = "{}", headers: dict[str, str] | list[tuple[str, str]] | None = None
    ) -> httpx.Response:
        async with client(self.app) as http:
            return await http.post("/v1/x", content=body, headers=headers)


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("header", "body", "effective"),
    [
        (None, "{}", 0),
        ("0", "{}", 0),
        ("+7", "{}", 7),
        ("007", "{}", 7),
        ("-100", "{}", -100),
        ("100", "{}", 100),
        (None, '{"priority": 5, "prompt": "x"}', 5),
        (None, '{"prompt": {"priority": 1}, "priority":-100}', -100),
        ("2", '{"priority": 5}', 2),
        ("2", '{"priority": "ignored"}', 2),
        ("2", "no JSON", 2),
        (None, "[1]", 0),
        (None, "", 0),
    ],
)
async def test_the_header_wins_over_the_body_and_the_effective_priority_comes_back(
    header: str | None, body: str, effective: int
) -> None:
    headers = {} if header is None else {"X-Vllm-Priority": header}
    response = await Echo().post(body, headers)
    assert response.text == f"['{effective}'] {body}"
    assert response.headers["x-shoal-priority"] == str(effective)


@pytest.mark.parametrize("value", ["", "high", "1.5", "1e1", "1_0", "101", "-101", "9" * 5000])
async def test_any_other_priority_header_is_refused_by_its_name(value: str) -> None:
    echo = Echo()
    response = await echo.post(headers={"X-Vllm-Priority": value})
    assert (response.status_code, echo.reached) == (400, 0)
    assert message_of(response).startswith("X-Vllm-Priority is ")
    assert len(message_of(response)) < 200


@pytest.mark.parametrize("value", ['"3"', "1.0", "1e1", "true", "null", "101", "-101", "[1]"])
async def test_any_other_priority_field_is_refused_by_its_name(value: str) -> None:
    echo = Echo()
    response = await echo.post(f'{{"priority": {value}}}')
    assert (response.status_code, echo.reached) == (400, 0)
    assert message_of(response).startswith("priority is ")


async def test_two_priorities_are_refused() -> None:
    headers = [("X-Vllm-Priority", "1"), ("X-Vllm-Priority", "2")]
    assert (await Echo().post(headers=headers)).status_code == 400


@pytest.mark.parametrize(("asked", "effective"), [(None, 0), ("-50", 0), ("3", 3)])
async def test_a_key_caps_how_urgent_its_requests_are(asked: str | None, effective: int) -> None:
    headers = {"Authorization": "Bearer k"} | ({"X-Vllm-Priority": asked} if asked else {})
    capped = Echo(key("k", "batch", min_priority=0))
    assert (await capped.post(headers=headers)).headers["x-shoal-priority"] == str(effective)
    free = Echo(key("k"))
    assert (await free.post(headers=headers)).headers["x-shoal-priority"] == (asked or "0")


async def test_deadline_and_key_go_with_the_request() -> None:
    echo = Echo(key("k", "batch", max_waiting=3, max_held_bytes=4))
    headers = {"Authorization": "Bearer k", "x-shoal-deadline-ms": "1500"}
    assert (await echo.post(headers=headers)).status_code == 200
    assert echo.terms == Terms(deadline=51.5, caller="batch", max_waiting=3, max_held_bytes=4)


@pytest.mark.parametrize("value", ["", "0", "00", "-1", "+1", "1.5", "soon", "9" * 20])
async def test_a_deadline_that_is_no_positive_integer_is_refused(value: str) -> None:
    response = await Echo().post(headers={"x-shoal-deadline-ms": value})
    assert response.status_code == 400
    assert message_of(response).startswith("x-shoal-deadline-ms is ")


async def test_a_full_pool_is_closed_to_everyone() -> None:
    echo = Echo()
    echo.door.limits(PoolLimits(full="the task pool is full", retry_after=17))
    response = await echo.post(headers={"X-Vllm-Priority": "-3"})
    assert (response.status_code, echo.reached) == (503, 0)
    assert message_of(response) == "the task pool is full"
    assert response.headers["retry-after"] == "17"
    assert response.headers["x-shoal-priority"] == "-3"
    assert echo.refused == [Outcome.POOL_FULL]
    echo.door.limits(PoolLimits())
    assert (await echo.post()).status_code == 200


@pytest.mark.parametrize(("priority", "status"), [("-3", 200), ("-2", 200), ("-1", 503)])
async def test_a_full_pool_lets_those_in_who_are_urgent_enough(priority: str, status: int) -> None:
    echo = Echo()
    echo.door.limits(PoolLimits(full="the task pool is full", let_in=-2))
    response = await echo.post(headers={"X-Vllm-Priority": priority})
    assert response.status_code == status
    assert echo.reached == (status == 200)


async def test_what_a_key_may_not_ask_for_does_not_open_a_full_pool() -> None:
    echo = Echo(key("k", "batch", min_priority=0))
    echo.door.limits(PoolLimits(full="the task pool is full", let_in=-2))
    headers = {"Authorization": "Bearer k", "X-Vllm-Priority": "-50"}
    assert (await echo.post(headers=headers)).status_code == 503


@pytest.mark.parametrize(
    ("body", "several"),
    [
        ('{"n": 2, "prompt": "x"}', True),
        ('{"prompt": ["x", "y"]}', True),
        ('{"prompt": [[1, 2], [3]]}', True),
        ('{"n": 1, "prompt": ["x"]}', False),
        ('{"prompt": [1, 2, 3]}', False),
        ('{"prompt": "x"}', False),
    ],
)
async def test_the_requests_of_one_http_request_are_told_to_belong_together(
    body: str, several: bool
) -> None:
    echo = Echo()
    families = []
    for _ in range(2):
        await echo.post(body)
        families.append(echo.terms.family)
    assert len(set(families)) == (2 if several else 1)
    assert (None in families) == (not several)


async def test_a_background_response_is_told_to_have_begun() -> None:
    echo = Echo()
    await echo.post('{"background": true}')
    assert echo.terms == Terms(begun=True)


async def test_a_closed_door_stays_closed_whatever_the_pool_is_like() -> None:
    echo = Echo()
    echo.door.close()
    echo.door.limits(PoolLimits())
    response = await echo.post()
    assert (response.status_code, echo.reached) == (503, 0)
    assert message_of(response) == "the server is shutting down"
    assert response.headers["retry-after"] == "1"
    assert echo.refused == [Outcome.HANDED_BACK]


async def test_a_caller_at_its_limit_is_refused_and_the_others_are_not() -> None:
    echo = Echo(key("a", "greedy", max_waiting=1), key("b", "modest", max_waiting=1))
    echo.door.limits(PoolLimits(callers={"greedy": "enough"}, retry_after=17))
    refused = await echo.post(headers={"Authorization": "Bearer a"})
    assert (refused.status_code, message_of(refused)) == (429, "enough")
    assert refused.headers["retry-after"] == "17"
    assert echo.refused == [Outcome.CALLER_FULL]
    assert (await echo.post(headers={"Authorization": "Bearer b"})).status_code == 200


async def test_a_request_without_a_body_is_left_to_the_route() -> None:
    async with client(Echo().app) as http:
        assert (await http.get("/v1/x", headers={"X-Vllm-Priority": "x"})).status_code == 200
