"""The OpenAPI documents of both APIs: what FastAPI sees of the routes, and what it cannot see.

That is what middleware answers, what Shoal reads of a request before its route does, and the bodies
of the admin API. No port offers the documents; ``shoal openapi`` prints them.
"""

import argparse
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI

from shoal.server.frontend.anthropic_messages import TEXT_BLOCKS
from shoal.server.frontend.app import AppOptions, Backstage, build_admin_app, build_app
from shoal.server.gate.access import Access
from shoal.server.gate.body_checks import LOCAL_TOOLS, REFUSED_FIELDS, TEXT_PARTS
from shoal.server.gate.priority_and_deadline import DEADLINE_HEADER, PRIORITY_HEADER, PRIORITY_LIMIT
from shoal.server.operator.admin import LayoutRequest, PolicyRequest, ShiftRequest
from shoal.server.operator.admin_answers import (
    AuditAnswer,
    LayoutAnswer,
    PolicyAnswer,
    ReadyAnswer,
    ShiftAnswer,
    SwitchAnswer,
)

_SCHEMA = "#/components/schemas/{name}"
_KEY = "key"
_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"


class ErrorInfo(msgspec.Struct, rename={"kind": "type"}):
    """What went wrong; ``param`` names the field, if it was one, and ``code`` is the status."""

    message: str
    kind: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """An error as OpenAI's API shapes it."""

    error: ErrorInfo


class MessagesErrorInfo(msgspec.Struct, rename={"kind": "type"}):
    """What went wrong."""

    message: str
    kind: str


class MessagesErrorResponse(msgspec.Struct, tag="error", tag_field="type"):
    """An error as Anthropic's API shapes it."""

    error: MessagesErrorInfo


@dataclass(frozen=True)
class _Operation:
    """What a document says of an operation beside what FastAPI sees."""

    refusals: tuple[int, ...] = ()
    """Statuses of its errors, besides those of every operation of its API."""
    body: type[msgspec.Struct] | None = None
    """None: FastAPI knows it, or there is none."""
    answer: Any = None
    """Type of what a 200 has as JSON; None: any, or no JSON."""
    media: tuple[str, ...] = (_JSON,)
    """Types of the content of a 200."""
    is_open: bool = False
    """Whether it is served to everyone."""
    waits_in_pool: bool = False
    """Whether its requests run on a unit."""
    error: type[msgspec.Struct] = ErrorResponse
    """What its errors are."""
    schemas: tuple[str, ...] = ()
    """Names of vLLM's bodies, any of which it takes: FastAPI does not see them."""


@dataclass(frozen=True)
class _Api:
    """One of the two: its operations, and the statuses that any of them may have."""

    operations: Mapping[tuple[str, str], _Operation]
    of_all: tuple[int, ...]
    of_posts: tuple[int, ...]


_GENERATES = _Operation((404, 500, 501, 504), media=(_JSON, _EVENTS), waits_in_pool=True)
_TOKENIZES = _Operation((404, 500, 501))
_ALIVE = _Operation(media=(), is_open=True)
_PUBLIC = _Api(
    {
        ("post", "/v1/chat/completions"): _GENERATES,
        ("post", "/v1/completions"): _GENERATES,
        ("post", "/v1/chat/completions/batch"): replace(_GENERATES, media=(_JSON,)),
        ("post", "/v1/responses"): _GENERATES,
        ("post", "/v1/messages"): replace(_GENERATES, error=MessagesErrorResponse),
        ("post", "/v1/messages/count_tokens"): replace(_TOKENIZES, error=MessagesErrorResponse),
        ("post", "/invocations"): replace(
            _GENERATES, schemas=("ChatCompletionRequest", "CompletionRequest")
        ),
        ("get", "/v1/responses/{response_id}"): _Operation((400, 404), media=(_JSON, _EVENTS)),
        ("post", "/v1/responses/{response_id}/cancel"): _Operation((404,)),
        ("get", "/v1/models"): _Operation(),
        ("post", "/tokenize"): _TOKENIZES,
        ("post", "/detokenize"): _TOKENIZES,
        ("get", "/tokenizer_info"): _Operation((404, 500)),
        ("get", "/version"): _Operation(),
        ("get", "/load"): _Operation(),
        ("get", "/ping"): _ALIVE,
        ("post", "/ping"): _ALIVE,
        ("get", "/health"): _ALIVE,
        ("get", "/ready"): _Operation(answer=ReadyAnswer, is_open=True),
        ("get", "/metrics"): _Operation((500, 504), media=(_TEXT,)),
    },
    of_all=(401, 408, 414, 431, 503),
    of_posts=(400, 413, 429),
)
_UNANSWERED = (503, 504)
_ADMIN = _Api(
    {
        ("get", "/admin/layout"): _Operation(_UNANSWERED, answer=LayoutAnswer),
        ("post", "/admin/layout"): _Operation(
            (400, 409, *_UNANSWERED), LayoutRequest, SwitchAnswer
        ),
        ("get", "/admin/policy"): _Operation(_UNANSWERED, answer=PolicyAnswer),
        ("post", "/admin/policy"): _Operation((400, *_UNANSWERED), PolicyRequest, PolicyAnswer),
        ("post", "/admin/shift"): _Operation((400, *_UNANSWERED), ShiftRequest, ShiftAnswer),
        ("post", "/admin/audit"): _Operation(_UNANSWERED, answer=AuditAnswer),
    },
    of_all=(401, 403, 431),
    of_posts=(413,),
)

_REASONS = {
    400: "the request is not valid, or asks for too much",
    401: "no valid API key",
    403: "a web page calls the admin API",
    404: "no such model or response",
    408: "the request was not there in time",
    409: "another switch is running, or the policy decides the layout",
    413: "the body is too large",
    414: "the URL is too long",
    429: "the caller is at one of its limits",
    431: "the headers are too large",
    500: "the request failed in its engine",
    501: "the model cannot do this",
    503: "it cannot be served now",
    504: "it was not done in time",
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "seconds after which to try again, where that would help",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_MAY_BE_TRIED_AGAIN = (429, 503)
_TERMS = [
    {
        "name": PRIORITY_HEADER,
        "in": "header",
        "required": False,
        "description": "lower is earlier; overrides the body's",
        "schema": {"type": "integer", "minimum": -PRIORITY_LIMIT, "maximum": PRIORITY_LIMIT},
    },
    {
        "name": DEADLINE_HEADER,
        "in": "header",
        "required": False,
        "description": "milliseconds that the request may wait in the task pool",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10**12 - 1},
    },
]
_PLACE = {
    name: {"description": text, "schema": {"type": "string"}}
    for name, text in {
        "x-shoal-priority": "the priority that the request got",
        "x-shoal-unit": "the engines of its unit; of each, if the request became several",
        "x-shoal-layout": "the layout of that unit: dp, tp2, tp4 or tp8",
    }.items()
}

_NOT_EMPTY: Mapping[str, tuple[str, ...]] = {
    "ChatCompletionRequest": ("messages", "tools", "allowed_token_ids"),
    "CompletionRequest": ("prompt", "allowed_token_ids"),
    "ResponsesRequest": (),
    "TokenizeChatRequest": ("messages",),
    "TokenizeCompletionRequest": (),
    "DetokenizeRequest": (),
    "BatchChatCompletionRequest": ("messages",),
    "AnthropicMessagesRequest": ("messages",),
    "AnthropicCountTokensRequest": ("messages",),
}
"""vLLM's bodies, and their fields that must not be empty, of which its schemas say nothing."""
_SERVED_TYPES = {"tools": LOCAL_TOOLS, "content": TEXT_PARTS, "output": TEXT_PARTS}
"""Fields with members of many types, of which ``body_checks.py`` lets these through."""


def public_document(routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the public API.

    Args:
        routers: vLLM's (``frontend.VLLM_ROUTERS``).

    Raises:
        KeyError: there is a route that this module does not know.
    """
    return _document(build_app(_backstage(routers), AppOptions(tokenizer_info=True)), _PUBLIC)


def admin_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the admin API.

    Raises:
        KeyError: there is a route that this module does not know.
    """
    return _document(build_admin_app(_backstage(()), Access()), _ADMIN)


def main(argv: Sequence[str]) -> int:
    """Run ``shoal openapi`` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="shoal openapi", description="Print the OpenAPI document of an API as JSON."
    )
    parser.add_argument("api", nargs="?", choices=("public", "admin"), default="public")
    if parser.parse_args(argv).api == "admin":
        document = admin_document()
    else:
        document = public_document(
            importlib.import_module("shoal.server.frontend.vllm_app").VLLM_ROUTERS
        )
    print(json.dumps(document, indent=2))
    return 0


def _backstage(routers: Sequence[APIRouter]) -> Backstage:
    """Return one for routes that are looked at and never called."""
    nobody: Any = None
    return Backstage(
        control=nobody,
        placements=nobody,
        door=nobody,
        is_alive=nobody,
        registered=nobody,
        rejected=nobody,
        vllm_routers=routers,
    )


def _document(app: FastAPI, api: _Api) -> dict[str, Any]:
    document = app.openapi()
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, item in document["paths"].items():
        for method, described in item.items():
            _complete(described, method, api.operations[method, path], api)
    if api is _PUBLIC:
        _describe_bodies(schemas)
    schemas.update(_schemas(api.operations.values()))
    _drop_unused(document)
    components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return document


def _complete(described: dict[str, Any], method: str, operation: _Operation, api: _Api) -> None:
    """Add to FastAPI's description of an operation, in place."""
    responses = described["responses"]
    responses.pop("422", None)  # it is a 400 here
    content = responses["200"].pop("content", {})
    content = {media: content.get(media, {}) for media in operation.media}
    if operation.answer is not None:
        content[_JSON] = _reference(operation.answer)
    if content:
        responses["200"]["content"] = content
    statuses = {*operation.refusals, *api.of_all, *(api.of_posts if method == "post" else ())}
    for status in sorted(statuses - ({401} if operation.is_open else set())):
        responses[str(status)] = _refusal(status, operation.error)
    described["security"] = [] if operation.is_open else [{}, {_KEY: []}]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: _reference(operation.body)},
        }
    if operation.schemas:
        kinds = [{"$ref": _SCHEMA.format(name=name)} for name in operation.schemas]
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": {"anyOf": kinds}}},
        }
    if operation.waits_in_pool:
        described["parameters"] = [*described.get("parameters", ()), *_TERMS]
        responses["200"]["headers"] = _PLACE


def _refusal(status: int, error: type[msgspec.Struct]) -> dict[str, Any]:
    refusal = {"description": _REASONS[status], "content": {_JSON: _reference(error)}}
    return {**refusal, "headers": _RETRY_AFTER} if status in _MAY_BE_TRIED_AGAIN else refusal


def _reference(kind: Any) -> dict[str, Any]:
    return {"schema": {"$ref": _SCHEMA.format(name=kind.__name__)}}


def _schemas(operations: Iterable[_Operation]) -> dict[str, Any]:
    known = [kind for o in operations for kind in (o.error, o.body, o.answer)]
    kinds = [kind for kind in dict.fromkeys(known) if kind is not None]
    return msgspec.json.schema_components(kinds, ref_template=_SCHEMA)[1]


# --- bodies that vLLM describes ---


def _describe_bodies(schemas: dict[str, Any]) -> None:
    """Say in the schemas of vLLM's bodies what of them is served, in place."""
    for name, fields in _NOT_EMPTY.items():
        properties = schemas[name]["properties"]
        for refused in REFUSED_FIELDS:
            properties.pop(refused, None)
        for field in fields:
            _forbid_empty(properties[field])
    completion = schemas["CompletionRequest"]
    completion["required"] = ["prompt"]  # vLLM takes embeddings in its place
    prompt = completion["properties"]["prompt"]
    prompt["anyOf"] = [kind for kind in prompt["anyOf"] if kind != {"type": "null"}]
    schemas["AnthropicMessagesRequest"]["properties"]["max_tokens"]["minimum"] = 1
    block = schemas["AnthropicContentBlock"]["properties"]
    block["type"]["enum"] = [kind for kind in block["type"]["enum"] if kind in TEXT_BLOCKS]
    for schema in schemas.values():
        for field, served in _SERVED_TYPES.items():
            _keep_types(schema.get("properties", {}).get(field, {}), served, schemas)


def _forbid_empty(schema: dict[str, Any]) -> None:
    for kind in (schema, *schema.get("anyOf", ())):
        if kind.get("type") == "string":
            kind["minLength"] = 1
        elif kind.get("type") == "array":
            kind["minItems"] = 1
            _forbid_empty(kind["items"])


def _keep_types(schema: dict[str, Any], served: Set[str], schemas: Mapping[str, Any]) -> None:
    """Leave in the unions of a schema the members whose ``type`` is served, or that have none."""
    for union in {"anyOf", "oneOf"} & schema.keys():
        schema[union] = [kind for kind in schema[union] if _is_served(kind, served, schemas)]
        schema.pop("discriminator", None)  # it maps the others, too
        for kind in schema[union]:
            _keep_types(kind, served, schemas)
    if isinstance(schema.get("items"), dict):
        _keep_types(schema["items"], served, schemas)


def _is_served(kind: Mapping[str, Any], served: Set[str], schemas: Mapping[str, Any]) -> bool:
    schema = schemas.get(_target(kind), {})
    described = schema.get("properties", {}).get("type", {})
    types = {described["const"]} if "const" in described else set(described.get("enum", ()))
    return not types or bool(types & served)


def _target(schema: Mapping[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _drop_unused(document: dict[str, Any]) -> None:
    """Take out the schemas to which nothing refers any more."""
    schemas = document["components"]["schemas"]
    pending: list[Any] = [document["paths"]]
    used: set[str] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            name = _target(node)
            if name in schemas and name not in used:
                used.add(name)
                pending.append(schemas[name])
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    document["components"]["schemas"] = {name: schemas[name] for name in schemas if name in used}
