"""The OpenAPI documents say what FastAPI does not see.

``test_schemathesis.py`` holds a node to them.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import schemathesis

from shoal.server.commands import openapi
from shoal.server.commands.cli import main
from shoal.server.frontend.vllm_app import VLLM_ROUTERS
from shoal.server.gate.body_checks import REFUSED_FIELDS
from tests.server.test_security import ADMIN_ROUTES, ROUTES, TOKENIZER_INFO

_BATCH = "/v1/chat/completions/batch"
_STREAMED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"),
)
_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def public() -> dict[str, Any]:
    return openapi.public_document(VLLM_ROUTERS)


@pytest.fixture(scope="module")
def admin() -> dict[str, Any]:
    return openapi.admin_document()


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_route_is_in_them(public: dict[str, Any], admin: dict[str, Any]) -> None:
    assert operations(public).keys() == ROUTES | {TOKENIZER_INFO}
    assert operations(admin).keys() == ADMIN_ROUTES


def test_a_route_that_nobody_described_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(openapi._PUBLIC, ("post", "/tokenize"))
    with pytest.raises(KeyError):
        openapi.public_document(VLLM_ROUTERS)


def test_they_are_valid_and_whole(public: dict[str, Any], admin: dict[str, Any]) -> None:
    for document in (public, admin):
        schemathesis.openapi.from_dict(document).validate()
        known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
        assert references(document) == known


def test_every_error_is_documented_with_its_shape(
    public: dict[str, Any], admin: dict[str, Any]
) -> None:
    for document in (public, admin):
        for name, operation in operations(document).items():
            refusals = {k: v for k, v in operation["responses"].items() if k >= "400"}
            assert "422" not in refusals, name
            for refusal in refusals.values():
                schema = refusal["content"]["application/json"]["schema"]
                kind = "MessagesErrorResponse" if name[1] in _MESSAGES else "ErrorResponse"
                assert schema == {"$ref": f"#/components/schemas/{kind}"}
        error = document["components"]["schemas"]["ErrorInfo"]
        assert set(error["required"]) == {"message", "type", "param", "code"}


def test_what_is_read_of_headers_is_documented(public: dict[str, Any]) -> None:
    for (method, path), operation in operations(public).items():
        names = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "header"}
        terms = method == "POST" and path in (*_STREAMED, _BATCH)
        assert names == ({"x-vllm-priority", "x-shoal-deadline-ms"} if terms else set())
        answered = set(operation["responses"]["200"].get("headers", ()))
        told = {"x-shoal-priority", "x-shoal-unit", "x-shoal-layout"}
        assert answered == (told if terms else set())
        streamed = (terms and path != _BATCH) or (method, path) == (
            "GET",
            "/v1/responses/{response_id}",
        )
        content = operation["responses"]["200"].get("content", {})
        assert ("text/event-stream" in content) == streamed


def test_what_needs_no_key_says_so(public: dict[str, Any]) -> None:
    found = {path for (_, path), o in operations(public).items() if "401" not in o["responses"]}
    assert found == {"/health", "/ready", "/ping"}


def test_bodies_of_the_admin_api_are_documented(admin: dict[str, Any]) -> None:
    schemas = admin["components"]["schemas"]
    bodies = {route: f"{route.title()}Request" for route in ("layout", "policy", "shift", "memory")}
    for route, name in {**bodies, "drain": "EnginesRequest", "resume": "EnginesRequest"}.items():
        body = operations(admin)["POST", f"/admin/{route}"]["requestBody"]
        assert body["content"]["application/json"]["schema"]["$ref"].endswith(f"/{name}")
        assert schemas[name]["additionalProperties"] is False
    assert schemas["LayoutRequest"]["required"] == ["units"]
    assert set(schemas["Treatment"]["enum"]) == {"sequential", "carry", "soft", "hard"}


def test_answers_of_the_admin_api_are_documented(admin: dict[str, Any]) -> None:
    found = {
        name: operation["responses"]["200"]["content"]["application/json"]["schema"]
        for name, operation in operations(admin).items()
    }
    models = {name: schema["$ref"].rpartition("/")[2] for name, schema in found.items()}
    assert models == {
        ("GET", "/admin/layout"): "LayoutAnswer",
        ("POST", "/admin/layout"): "SwitchAnswer",
        ("POST", "/admin/drain"): "LayoutAnswer",
        ("POST", "/admin/resume"): "LayoutAnswer",
        ("GET", "/admin/policy"): "PolicyAnswer",
        ("POST", "/admin/policy"): "PolicyAnswer",
        ("POST", "/admin/shift"): "ShiftAnswer",
        ("POST", "/admin/memory"): "MemoryAnswer",
        ("POST", "/admin/audit"): "AuditAnswer",
    }
    for model in set(models.values()):
        schema = admin["components"]["schemas"][model]
        assert set(schema["required"]) == set(schema["properties"])


def test_what_is_refused_is_not_offered(public: dict[str, Any]) -> None:
    schemas = public["components"]["schemas"]
    for name in (
        *("ChatCompletionRequest", "BatchChatCompletionRequest", "CompletionRequest"),
        *("ResponsesRequest", "AnthropicMessagesRequest"),
    ):
        assert not REFUSED_FIELDS.keys() & schemas[name]["properties"].keys()
    text = json.dumps(public)
    assert "ChatCompletionContentPartTextParam" in text
    for other in ("ChatCompletionContentPartImageParam", "WebSearchTool", "HTTPValidationError"):
        assert other not in text
    assert schemas["ChatCompletionRequest"]["properties"]["messages"]["minItems"] == 1
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert "image" not in schemas["AnthropicContentBlock"]["properties"]["type"]["enum"]
    body = operations(public)["POST", "/invocations"]["requestBody"]["content"]["application/json"]
    assert len(body["schema"]["anyOf"]) == 2


@pytest.mark.parametrize(("argv", "title"), [(["admin"], "Shoal admin"), ([], "Shoal")])
def test_the_command_prints_them(
    argv: list[str], title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["openapi", *argv]) == 0
    assert json.loads(capsys.readouterr().out)["info"]["title"] == title


def test_the_command_writes_nothing_else() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"
    }
    command = [sys.executable, "-m", "shoal.server.commands.cli", "openapi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["info"]["title"] == "Shoal"
