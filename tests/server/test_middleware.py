import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from server.middleware import ApiKeyMiddleware, PriorityMiddleware, is_priority


async def ok(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


APP = Starlette(
    routes=[Route(path, ok, methods=["GET", "POST", "OPTIONS"]) for path in ("/health", "/v1/x")]
)


def client(app: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://shoal")


@pytest.mark.parametrize("key", ["first", "second"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_any_of_the_keys_opens(key: str, scheme: str) -> None:
    async with client(ApiKeyMiddleware(APP, ["first", "second"], ["/health"])) as http:
        response = await http.get("/v1/x", headers={"Authorization": f"{scheme} {key}"})
    assert response.text == "ok"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer firstsecond"},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"X-Api-Key": "first"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/x", "/metrics", "/admin/layout", "/not/there", "/healthy"])
async def test_without_a_key_everything_is_shut(headers: dict[str, str], path: str) -> None:
    async with client(ApiKeyMiddleware(APP, ["first", "second"], ["/health"])) as http:
        response = await http.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == 401
    assert response.headers["www-authenticate"] == "Bearer"


async def test_open_paths_and_preflights_need_no_key() -> None:
    async with client(ApiKeyMiddleware(APP, ["first"], ["/health"])) as http:
        assert (await http.get("/health")).text == "ok"
        assert (await http.options("/v1/x")).text == "ok"


@pytest.mark.parametrize("value", ["0", "-1", "+7", "2147483647", "-2147483648", "007"])
async def test_a_priority_in_range_passes(value: str) -> None:
    assert is_priority(value)
    async with client(PriorityMiddleware(APP)) as http:
        assert (await http.post("/v1/x", headers={"X-Vllm-Priority": value})).text == "ok"


@pytest.mark.parametrize(
    "value", ["", "high", "1.5", "1e3", "1_0", "2147483648", "-2147483649", "9" * 5000, "0x1"]
)
async def test_any_other_priority_is_refused_with_its_value(value: str) -> None:
    async with client(PriorityMiddleware(APP)) as http:
        response = await http.post("/v1/x", headers={"X-Vllm-Priority": value})
    assert response.status_code == 400
    assert "X-Vllm-Priority" in response.json()["error"]["message"]


async def test_two_priorities_are_refused() -> None:
    headers = [("X-Vllm-Priority", "1"), ("X-Vllm-Priority", "2")]
    async with client(PriorityMiddleware(APP)) as http:
        assert (await http.post("/v1/x", headers=headers)).status_code == 400


async def test_no_priority_passes() -> None:
    async with client(PriorityMiddleware(APP)) as http:
        assert (await http.post("/v1/x")).text == "ok"
