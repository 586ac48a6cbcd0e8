"""Anthropic's Messages API: its bodies, and errors in its shape.

The routes are vLLM's: ``AnthropicServingMessages`` turns a request into a chat completion, and the
result of that into the answer.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.errors import messages_error_body, messages_error_event
from shoal.server.gate.body_checks import Check, check_body, check_tools
from shoal.server.gate.bounds import Bounds, BoundsError
from shoal.server.gate.placement import route_path

TEXT_BLOCKS = frozenset(
    {
        *("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        *("tool_reference", "tool_addition", "tool_removal"),
    }
)
"""Types of the blocks of a message that are text, or about tools; no others are served."""
_RESULT_BLOCKS = frozenset({"text", "tool_reference"})
"""Types of the blocks in a ``tool_result`` that are served: vLLM would silently drop others."""
_CHAT_ERROR = 'data: {"error"'
"""The beginning of the event that ends a failed stream of chat completions."""


# --- bodies ---


def check_messages(body: bytes, bounds: Bounds) -> dict[str, Any]:
    """Check the body of a route of the Messages API, which takes no images, and return its content.

    Raises:
        BoundsError: see ``check_body``.
    """
    return check_body(body, replace(bounds, images=False), _CHECKS)


def _messages(param: str, value: Any, bounds: Bounds) -> None:
    messages = [message for message in _list(value) if isinstance(message, dict)]
    if len(_list(value)) > bounds.messages:
        raise BoundsError(param, f"{len(value)} entries, at most {bounds.messages} are allowed")
    added = []
    for block in (block for message in messages for block in _blocks(message)):
        _check_block(param, block, TEXT_BLOCKS)
        for inner in _blocks(block):
            _check_block(f"{param}.content", inner, _RESULT_BLOCKS)
        tool = block.get("tool")
        if isinstance(tool, dict) and isinstance(tool.get("definition"), dict):
            added.append(tool["definition"])
    check_tools(param, added, bounds)


def _system(param: str, value: Any, bounds: Bounds) -> None:
    del bounds
    for block in _list(value):
        if isinstance(block, dict):
            _check_block(param, block, frozenset({"text"}))


def _blocks(holder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (block for block in _list(holder.get("content")) if isinstance(block, dict))


def _check_block(param: str, block: dict[str, Any], served: Collection[str]) -> None:
    kind = block.get("type")
    if isinstance(kind, str) and kind not in served:
        raise BoundsError(param, f"{kind[:40]} is not supported: the model takes text")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_CHECKS: dict[str, Check] = {"messages": _messages, "system": _system}


# --- errors ---


class MessagesErrorMiddleware:
    """Puts all errors into Anthropic's shape: vLLM does so only with its own.

    Args:
        app: the application behind this middleware.
        paths: the routes of the Messages API.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, _ShapedErrors(send))


class _ShapedErrors:
    """An ASGI ``send`` that holds an error back until it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._head = message
        elif self._head is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                body = _shaped_body(self._body)
                MutableHeaders(raw=self._head["headers"])["content-length"] = str(len(body))
                await self._send(self._head)
                await self._send({**message, "body": body})


def _shaped_body(body: bytes) -> bytes:
    try:
        error = json.loads(body)
        return (
            body
            if error.get("type") == "error"
            else json.dumps(messages_error_body(error)).encode()
        )
    except (ValueError, LookupError, AttributeError, TypeError):  # of something else, or empty
        return body


Convert = Callable[[AsyncGenerator[str, None]], AsyncGenerator[str, None]]


def tell_errors(convert: Convert) -> Convert:
    """Wrap vLLM's ``message_stream_converter`` so that a stream's error gives its reason.

    vLLM takes an error in a stream of chat completions for an invalid chunk, and tells the log and
    the client so.
    """

    async def converted(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        errors: list[str] = []
        async with aclosing(convert(_until_error(chunks, errors))) as events:
            async for event in events:
                yield event
        for error in errors:
            yield messages_error_event(json.loads(error))

    return converted


async def _until_error(chunks: AsyncIterator[str], errors: list[str]) -> AsyncGenerator[str, None]:
    async for chunk in chunks:
        if chunk.startswith(_CHAT_ERROR):
            errors.append(chunk.removeprefix("data: "))
            return
        yield chunk
