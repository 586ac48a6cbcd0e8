"""The OpenAPI documents of both APIs: what FastAPI sees of the routes, and what it cannot see.

FastAPI cannot see what middleware answers, which headers Shoal reads before a request's route, and
which fields of vLLM's bodies Shoal serves. No port offers the documents; ``shoal openapi`` prints
them.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shoal.runtime.logs import set_vllm_level
from shoal.server.commands.command_parser import CommandParser
from shoal.server.error_models import ErrorResponse, MessagesErrorResponse, refusals
from shoal.server.frontend.anthropic_messages import TEXT_BLOCKS
from shoal.server.frontend.app import (
    GENERATING_PATHS,
    MESSAGES_PATHS,
    OPEN_PATHS,
    AppOptions,
    Backstage,
    build_admin_app,
    build_app,
)
from shoal.server.gate.access import Access
from shoal.server.gate.body_checks import LOCAL_TOOLS, REFUSED_FIELDS, TEXT_PARTS
from shoal.server.gate.priority_and_deadline import DEADLINE_HEADER, PRIORITY_HEADER, PRIORITY_LIMIT

_SCHEMA = "#/components/schemas/{model}"
_KEY = "key"
_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"


@dataclass(frozen=True)
class _Operation:
    """What the public document adds to FastAPI's description of an operation."""

    refusals: tuple[int, ...] = ()
    """Statuses of its errors, beside those of every operation."""
    media: tuple[str, ...] = (_JSON,)
    """Content types of its 200 response."""
    schemas: tuple[str, ...] = ()
    """Names of the bodies of vLLM that it takes, which FastAPI does not see."""


_GENERATES = _Operation((404, 500, 501, 504), media=(_JSON, _EVENTS))
_TOKENIZES = _Operation((404, 500, 501))
_ALIVE = _Operation(media=())
_PUBLIC: Mapping[tuple[str, str], _Operation] = {
    ("post", "/v1/chat/completions"): _GENERATES,
    ("post", "/v1/completions"): _GENERATES,
    ("post", "/v1/chat/completions/batch"): replace(_GENERATES, media=(_JSON,)),
    ("post", "/v1/responses"): _GENERATES,
    ("post", "/v1/messages"): _GENERATES,
    ("post", "/v1/messages/count_tokens"): _TOKENIZES,
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
    ("get", "/ready"): _Operation(),
    ("get", "/metrics"): _Operation((500, 504), media=(_TEXT,)),
}
_BY_MIDDLEWARE = (401, 408, 414, 431, 503)
_BY_MIDDLEWARE_OF_POSTS = (400, 413, 429)

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
"""vLLM's bodies, and the fields of each that must not be empty although its schema allows it."""
_SERVED_TYPES = {"tools": LOCAL_TOOLS, "content": TEXT_PARTS, "output": TEXT_PARTS}
"""Fields that are unions of types, with the types that ``body_checks.py`` accepts."""


def public_document(routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the public API.

    Args:
        routers: vLLM's (``frontend.VLLM_ROUTERS``).

    Raises:
        KeyError: there is a route that this module does not know.
    """
    document = build_app(_backstage(routers), AppOptions(tokenizer_info=True)).openapi()
    document["components"]["schemas"] |= _schemas(ErrorResponse, MessagesErrorResponse)
    for method, path, described in _operations(document):
        statuses = {*_PUBLIC[method, path].refusals, *_BY_MIDDLEWARE}
        if method == "post":
            statuses.update(_BY_MIDDLEWARE_OF_POSTS)
        messages = path in MESSAGES_PATHS
        _refuse(described, statuses, MessagesErrorResponse if messages else ErrorResponse)
        _complete(described, _PUBLIC[method, path])
        if method == "post" and path in GENERATING_PATHS:
            described["parameters"] = [*described.get("parameters", ()), *_TERMS]
            described["responses"]["200"]["headers"] = _PLACE
        if path in OPEN_PATHS:
            described["security"] = []
            del described["responses"]["401"]
    _describe_bodies(document["components"]["schemas"])
    return _finished(document)


def admin_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the admin API."""
    document = build_admin_app(_backstage(()), Access()).openapi()
    for method, _, described in _operations(document):
        _refuse(described, {401, 403, 431, *((413,) if method == "post" else ())}, ErrorResponse)
    return _finished(document)


def main(argv: Sequence[str]) -> int:
    """Run ``shoal openapi`` and return the exit code."""
    parser = CommandParser(
        prog="shoal openapi", description="Print the OpenAPI document of an API as JSON."
    )
    parser.add_argument("api", nargs="?", choices=("public", "admin"), default="public")
    if parser.parse_args(argv).api == "admin":
        document = admin_document()
    else:
        set_vllm_level()
        document = public_document(
            importlib.import_module("shoal.server.frontend.vllm_app").VLLM_ROUTERS
        )
    print(json.dumps(document, indent=2))
    return 0


def _backstage(routers: Sequence[APIRouter]) -> Backstage:
    """Return a ``Backstage`` for routes that are only described and never called."""
    nobody: Any = None
    return Backstage(
        control=nobody,
        placements=nobody,
        door=nobody,
        is_alive=nobody,
        registered=nobody,
        rejected=nobody,
        feed=nobody,
        vllm_routers=routers,
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the method, the path and the description of each operation."""
    for path, item in document["paths"].items():
        for method, described in item.items():
            yield method, path, described


def _refuse(described: dict[str, Any], statuses: Set[int], model: type[BaseModel]) -> None:
    """Add errors, and the optional API key, to the description of an operation, in place."""
    responses = described["responses"]
    responses.pop("422", None)  # it is a 400 here
    content = {_JSON: {"schema": {"$ref": _SCHEMA.format(model=model.__name__)}}}
    for status, response in refusals(*sorted(statuses)).items():
        responses[str(status)] = {**response, "content": content}
        del responses[str(status)]["model"]
    described["security"] = [{}, {_KEY: []}]


def _complete(described: dict[str, Any], operation: _Operation) -> None:
    """Add what an operation takes and answers to its description, in place."""
    content = described["responses"]["200"].pop("content", {})
    if operation.media:
        described["responses"]["200"]["content"] = {
            media: content.get(media, {}) for media in operation.media
        }
    if operation.schemas:
        kinds = [{"$ref": _SCHEMA.format(model=name)} for name in operation.schemas]
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": {"anyOf": kinds}}},
        }


def _schemas(*models: type[BaseModel]) -> dict[str, Any]:
    found = models_json_schema([(m, "serialization") for m in models], ref_template=_SCHEMA)
    schemas: dict[str, Any] = found[1]["$defs"]
    return schemas


def _finished(document: dict[str, Any]) -> dict[str, Any]:
    _drop_unused(document)
    document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return document


# --- bodies that vLLM describes ---


def _describe_bodies(schemas: dict[str, Any]) -> None:
    """Reduce the schemas of vLLM's bodies to what Shoal serves, in place."""
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
    """Keep only the members of a schema's unions whose ``type`` is served, or that have no type."""
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
    """Remove the schemas to which nothing refers any more."""
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
