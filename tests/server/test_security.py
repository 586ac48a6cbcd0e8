"""Who gets in where, over HTTP: a node of fake engines with keys of all kinds."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from shoal.loadgen.bench.process_memory import tree
from shoal.server.frontend.app import AppOptions, Backstage, build_admin_app, build_app
from shoal.server.frontend.vllm_app import VLLM_ROUTERS
from shoal.server.gate.access import Access, MetricsAccess
from tests.server.listeners import listeners, reachable
from tests.server.node import ServedNode, key_file, served_node

MODEL = "shoal-demo"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
KEYS: list[str | dict[str, Any]] = [
    "tenant",
    {"key": "slow", "name": "slow", "requests_per_minute": 1},
    {"key": "dear", "name": "dear", "tokens_per_minute": 10},
]

ROUTES = {
    ("GET", "/health"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("GET", "/ping"),
    ("GET", "/ready"),
    ("GET", "/v1/models"),
    ("GET", "/v1/responses/{response_id}"),
    ("GET", "/version"),
    ("POST", "/detokenize"),
    ("POST", "/invocations"),
    ("POST", "/ping"),
    ("POST", "/tokenize"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/{response_id}/cancel"),
}
TOKENIZER_INFO = ("GET", "/tokenizer_info")
ADMIN_ROUTES = {
    ("GET", "/admin/layout"),
    ("GET", "/admin/policy"),
    ("POST", "/admin/audit"),
    ("POST", "/admin/drain"),
    ("POST", "/admin/layout"),
    ("POST", "/admin/memory"),
    ("POST", "/admin/policy"),
    ("POST", "/admin/resume"),
    ("POST", "/admin/shift"),
}
PAGE_ROUTES = {
    ("GET", "/"),
    ("GET", "/page.css"),
    ("GET", "/page.js"),
    ("GET", "/admin/events"),
    ("POST", "/admin/chat/completions"),
}
"""The live page's, which are in no OpenAPI document."""
ELSEWHERE = (
    *("/server_info", "/tokenizer_info", "/docs", "/redoc", "/kv_event_sources"),
    *("/openapi.json", "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/collective_rpc", "/abort_requests"),
    *("/update_weights", "/init_weight_transfer_engine", "/get_world_size"),
    *("/update_weights_from_tensor", "/update_weights_from_disk", "/flush_cache"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/inference/v1/generate", "/generate", "/classify", "/score", "/v1/score", "/rerank"),
    *("/v1/rerank", "/v2/rerank", "/pooling", "/v1/embeddings", "/v1/audio/transcriptions"),
    *("/v1/audio/translations", "/v1/realtime", "/v1/messages/batches"),
    *("/v1/completions/render", "/v1/chat/completions/render"),
    *("/cohere/v2/chat", "/v1/files", "/v1/batches", "/v1/models/..", "/admin", "/"),
    *(path for _, path in sorted(ADMIN_ROUTES | PAGE_ROUTES)),
)
"""What vLLM and its peers offer besides, and what is on another port."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[ServedNode]:
    options = {
        "api-key-file": str(key_file(folder / "keys.json", *KEYS)),
        "admin-key-file": str(key_file(folder / "admin.json", "operator")),
        "max-model-len": 256,
        "metrics": "off",
    }
    (config := folder / "serve.json").write_text(json.dumps(options))
    with served_node(
        folder,
        *("--config", str(config), "--metrics", "open", "--max-body-bytes", "20000"),
        *("--metrics-port", "0"),
        fresh=True,
        VLLM_SERVER_DEV_MODE="1",
    ) as served:
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def http(node: ServedNode) -> Iterator[httpx.Client]:
    """A tenant's client of the public port."""
    with httpx.Client(base_url=node.url, headers=bearer("tenant"), timeout=60) as client:
        yield client


@pytest.fixture
def admin(node: ServedNode) -> Iterator[httpx.Client]:
    """A client of the admin port, without a key."""
    with httpx.Client(base_url=node.admin_url, timeout=60) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- routes ---


def routes_of(app: Any) -> set[tuple[str, str]]:
    assert all(isinstance(route, APIRoute) for route in app.routes)
    return {(method, route.path) for route in app.routes for method in route.methods}


def test_no_route_is_there_that_was_not_chosen(backstage: Backstage) -> None:
    assert routes_of(build_app(backstage, AppOptions())) == ROUTES
    assert routes_of(build_admin_app(backstage, Access())) == ADMIN_ROUTES | PAGE_ROUTES
    off = AppOptions(access=Access(metrics=MetricsAccess.OFF))
    assert routes_of(build_app(backstage, off)) == ROUTES - {("GET", "/metrics")}
    more = AppOptions(tokenizer_info=True)
    assert routes_of(build_app(backstage, more)) == ROUTES | {TOKENIZER_INFO}


@pytest.fixture
def backstage() -> Backstage:
    parts: dict[str, Any] = dict.fromkeys(
        ("control", "placements", "door", "is_alive", "registered", "rejected", "feed")
    )
    return Backstage(**parts, vllm_routers=VLLM_ROUTERS)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_what_else_vllm_and_its_peers_offer_is_not_found(http: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        response = http.request(method, path, json={} if method != "GET" else None)
        assert response.status_code == 404, method
        error_of(response)


def test_the_admin_port_has_the_admin_routes_only(admin: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/completions", "/metrics", "/health", "/admin", "/admin/pause"):
        response = admin.get(path, headers=bearer("operator"))
        assert response.status_code == 404, path
        error_of(response)


# --- keys ---


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/admin/layout", "/nothing", "/"])
@pytest.mark.parametrize("key", [None, "tenan", "wrong", "operator"])
def test_without_a_valid_key_nothing_is_told(node: ServedNode, path: str, key: str | None) -> None:
    headers = {} if key is None else bearer(key)
    response = httpx.get(f"{node.url}{path}", headers=headers, timeout=60)
    assert response.status_code == 401
    error_of(response)


def test_health_readiness_and_open_metrics_need_none(node: ServedNode) -> None:
    for path in ("/health", "/ready", "/ping", "/metrics"):
        assert httpx.get(f"{node.url}{path}", timeout=60).status_code == 200


def metrics_url(node: ServedNode) -> str:
    (line,) = (line for line in node.lines if "  metrics on " in line)
    return line.split()[-1]


def test_the_metrics_have_a_port_that_has_nothing_else(node: ServedNode) -> None:
    url = metrics_url(node)
    page = httpx.get(url, timeout=60)
    assert page.status_code == 200
    assert "shoal_ready 1.0" in page.text
    assert 'shoal_requests_total{outcome="finished"}' in page.text
    for path in ("/", "/health", "/v1/models", "/admin/layout"):
        assert error_of(httpx.get(httpx.URL(url).join(path), timeout=60))["code"] == 404
    posted = httpx.post(url, json={}, timeout=60)
    assert error_of(posted)["code"] == 405
    long = httpx.get(url, params={"x": "y" * 20000}, timeout=60)
    assert long.status_code == 414


def test_keys_of_one_port_are_none_of_the_other(admin: httpx.Client) -> None:
    assert admin.get("/admin/layout").status_code == 401
    assert admin.get("/admin/layout", headers=bearer("tenant")).status_code == 401
    assert admin.get("/admin/layout", headers=bearer("operator")).status_code == 200


def test_the_live_page_needs_no_key_but_all_that_it_asks_for_does(admin: httpx.Client) -> None:
    for path in ("/", "/page.js", "/page.css"):
        assert admin.get(path).status_code == 200
    assert 'data-needs-key="true"' in admin.get("/").text
    assert admin.get("/admin/events").status_code == 401
    chat = {**CHAT, "stream": True}
    assert admin.post("/admin/chat/completions", json=chat).status_code == 401
    tenant = admin.post("/admin/chat/completions", json=chat, headers=bearer("tenant"))
    assert tenant.status_code == 401


def test_the_operator_s_key_asks_the_model_through_the_admin_port(admin: httpx.Client) -> None:
    answer = admin.post("/admin/chat/completions", json=CHAT, headers=bearer("operator"))
    assert answer.status_code == 200
    assert answer.headers["x-shoal-unit"] in ("0", "1")
    wrong = {**bearer("operator"), "X-Vllm-Priority": "first"}
    assert admin.post("/admin/chat/completions", json=CHAT, headers=wrong).status_code == 400


def test_a_page_in_a_browser_cannot_act_as_an_operator(admin: httpx.Client) -> None:
    headers = {**bearer("operator"), "Origin": "http://evil.example"}
    response = admin.post("/admin/audit", headers=headers)
    assert response.status_code == 403
    error_of(response)


def test_a_key_s_limits_are_told_in_the_shape_of_other_errors(http: httpx.Client) -> None:
    slow = bearer("slow")
    assert http.post("/v1/completions", json=BODY, headers=slow).status_code == 200
    refused = http.post("/tokenize", json={"model": MODEL, "prompt": "x"}, headers=slow)
    assert refused.status_code == 429
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert "slow" in error_of(refused)["message"]
    body = {**BODY, "prompt": "a b c d", "max_tokens": 30, "ignore_eos": True}
    assert http.post("/v1/completions", json=body, headers=bearer("dear")).status_code == 200
    refused = http.post("/v1/completions", json=body, headers=bearer("dear"))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 60  # it owes more than a minute's tokens
    assert 'shoal_rejected_requests_total{reason="caller_limit"} 2.0' in http.get("/metrics").text


def test_keys_change_while_it_serves(node: ServedNode, folder: Path, http: httpx.Client) -> None:
    key_file(folder / "keys.json", *KEYS, "late")
    try:
        while http.get("/version", headers=bearer("late")).status_code == 401:
            pass  # it looks at the file once a second; the test's time limit bounds this
        key_file(folder / "keys.json", *KEYS)
        while http.get("/version", headers=bearer("late")).status_code == 200:
            pass
    finally:
        key_file(folder / "keys.json", *KEYS)
    assert http.get("/version").status_code == 200


# --- bounds ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_bounds_hold_on_every_route(http: httpx.Client, path: str) -> None:
    too_large = http.post(path, content=b'{"prompt": "' + b"x" * 20_000 + b'"}')
    assert too_large.status_code == 413
    error_of(too_large)
    bad = http.post(path, json={**BODY, "input": "x", "user": "u" * 300})
    assert bad.status_code == 400
    assert error_of(bad)["param"] == "user"
    assert http.get(f"{path}?{'x' * 10_000}").status_code == 414
    assert http.get(path, headers={f"x-{k}": "" for k in range(200)}).status_code == 431


def test_a_refusal_of_vllm_s_is_told_before_a_stream_begins(http: httpx.Client) -> None:
    broken = {**BODY, "structured_outputs": {"regex": "a("}}
    # vLLM begins the stream of a response before it checks what is asked for.
    responses = {"model": MODEL, "input": "x", "structured_outputs": {"regex": "a("}}
    for path, fields in (("/v1/completions", broken), ("/v1/responses", responses)):
        for body in (fields, {**fields, "stream": True}):
            response = http.post(path, json=body)
            assert response.status_code == 400
            assert "structured_outputs" in error_of(response)["message"]
    fine = {**BODY, "structured_outputs": {"regex": "a+"}, "stream": True}
    assert http.post("/v1/completions", json=fine).status_code == 200


# --- inside ---


def test_all_that_listens_is_on_this_machine(node: ServedNode) -> None:
    assert len(list(tree(node.process.pid))) > 4
    ports = {address.rpartition(":")[2] for address in listeners(node.process.pid)}
    metrics = str(httpx.URL(metrics_url(node)).port)
    assert ports == {metrics, *(url.rpartition(":")[2] for url in (node.url, node.admin_url))}
    assert reachable(node.process.pid) == {}


def test_a_listener_that_others_could_reach_would_be_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        assert list(reachable(os.getpid())) == [f"0.0.0.0:{port}"]
    with socket.create_server(("::", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        assert list(reachable(os.getpid())) == [f":::{port}"]


def test_sockets_are_in_a_directory_of_the_node_s_own(node: ServedNode) -> None:
    assert node.runtime_dir.stat().st_mode & 0o777 == 0o700
