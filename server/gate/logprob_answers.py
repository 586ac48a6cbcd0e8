"""Builds and encodes answers with many log probabilities in pieces, off the event loop.

vLLM makes an object of every value, a dictionary of every object and one text of them all, in the
event loop: a million values take seconds, in which every other request waits. Here the values of a
large answer first stay as the engine sent them, and vLLM's route answers without them. The headers
of that response and its background task are kept. Its body is replaced by the whole answer, which a
worker thread encodes in pieces, so small that the thread soon releases Python's lock. The bytes are
those that vLLM would have sent.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response, StreamingResponse

LARGE_VALUES = 4096
"""An answer with at least so many log probabilities is encoded here."""
PIECE_VALUES = 1024
"""Log probabilities of one piece."""

ANSWER = "shoal.answer"
"""Key of an ASGI scope: the iterator over the pieces of a large answer."""

_AS_RESPONSE: Mapping[str, Any] = {"mode": "json", "by_alias": True}
"""How vLLM's route of the Responses API dumps an answer."""

_deferred: ContextVar[dict[int, "_Deferred"] | None] = ContextVar("deferred", default=None)
"""The deferred log probabilities of the current context's answer, by the placeholder's id."""


@dataclass(frozen=True)
class _Deferred:
    """Log probabilities of one choice, still as the engine sent them."""

    create: Callable[..., Any]
    """vLLM's ``_create_chat_logprobs`` or the like."""
    token_ids: Sequence[int]
    logprobs: Sequence[Any]
    name: str
    """Name of the argument for ``logprobs``."""
    more: Mapping[str, Any]

    @property
    def values(self) -> int:
        return len(self.token_ids) * _width(self.logprobs)

    def whole(self) -> Any:
        return self._of(slice(None), self.more)

    def parts(self) -> Iterator[Any]:
        """Yield vLLM's object for each slice; text offsets go on from one to the next."""
        more = dict(self.more)
        for at in _slices(self.logprobs):
            part = self._of(at, more)
            yield part
            if getattr(part, "text_offset", None):
                more["initial_text_offset"] = part.text_offset[-1] + len(part.tokens[-1])

    def _of(self, at: slice, more: Mapping[str, Any]) -> Any:
        return self.create(token_ids=self.token_ids[at], **{self.name: self.logprobs[at]}, **more)


HandOver = Callable[[Any, Any, Mapping[int, _Deferred], Any], Any]
"""Takes a request, its answer, the answer's deferred log probabilities, and the ASGI scope."""


def _width(logprobs: Sequence[Any]) -> int:
    return 1 + len((logprobs[-1] if len(logprobs) else None) or ())


def _slices(values: Sequence[Any]) -> Iterator[slice]:
    step = max(PIECE_VALUES // _width(values), 1)
    return (slice(at, at + step) for at in range(0, len(values), step))


# --- in vLLM's serving classes ---


def encode_large_answers(state: Any) -> None:
    """Wrap the serving objects that vLLM has put into the state of an application."""
    chat, completion = "_create_chat_logprobs", "_create_completion_logprobs"
    encode_off_loop(state.openai_serving_chat, "create_chat_completion", chat)
    encode_off_loop(state.openai_serving_chat_batch, "create_batch_chat_completion", chat)
    encode_off_loop(state.openai_serving_completion, "create_completion", completion)
    responses, create = state.openai_serving_responses, "_create_response_logprobs"
    encode_off_loop(responses, "create_responses", create, "logprobs", hand_over_response)


def encode_off_loop(
    serving: Any,
    answer_call: str,
    logprobs_call: str,
    name: str = "top_logprobs",
    hand_over: HandOver | None = None,
) -> None:
    """Make a serving object of vLLM's hand over large answers to ``large_response``.

    Args:
        serving: the object, of which two methods are wrapped.
        answer_call: the method that a route calls: ``create_chat_completion`` or the like.
        logprobs_call: the method that makes the log probabilities of a choice.
        name: the name of that method's argument for the engine's log probabilities.
        hand_over: turns an answer into what the route answers; None: for answers with choices.
    """
    create, answer = getattr(serving, logprobs_call), getattr(serving, answer_call)

    def defer(token_ids: Any, **given: Any) -> Any:
        waiting = _deferred.get()
        if waiting is None:
            return create(token_ids=token_ids, **given)
        logprobs = given.pop(name)
        placeholder = create(token_ids=[], **{name: []}, **given)
        waiting[id(placeholder)] = _Deferred(create, token_ids, logprobs, name, given)
        return placeholder

    async def answer_in_pieces(request: Any, raw_request: Any = None) -> Any:
        background = getattr(request, "background", False)  # its answer is asked for later
        if raw_request is None or getattr(request, "stream", False) or background:
            return await answer(request, raw_request)
        waiting: dict[int, _Deferred] = {}
        token = _deferred.set(waiting)
        try:
            made = await answer(request, raw_request)
        finally:
            _deferred.reset(token)
        return (hand_over or _hand_over)(request, made, waiting, raw_request.scope)

    setattr(serving, logprobs_call, defer)
    setattr(serving, answer_call, answer_in_pieces)


def _hand_over(request: Any, answer: Any, waiting: Mapping[int, _Deferred], scope: Any) -> Any:
    """Return a small answer whole; leave a large one's pieces in the scope, return the rest."""
    del request
    choices = getattr(answer, "choices", None)
    if choices is None:
        return answer
    values = sum(deferred.values for deferred in waiting.values())
    values += sum(_prompt_values(part) for part in (answer, *choices))
    if values >= LARGE_VALUES:
        scope[ANSWER] = _answer(answer, waiting)
        return answer.model_copy(update={"choices": [], "prompt_logprobs": None})
    for choice in choices:
        if id(choice.logprobs) in waiting:
            choice.logprobs = waiting[id(choice.logprobs)].whole()
    return answer


def hand_over_response(
    request: Any, answer: Any, waiting: Mapping[int, _Deferred], scope: Any
) -> Any:
    """Do the same as ``_hand_over`` for an answer of the Responses API, which has at most one text.

    An answer that vLLM stores has to be complete.
    """
    for number, item in enumerate(getattr(answer, "output", ()) if waiting else ()):
        for position, part in enumerate(getattr(item, "content", None) or ()):
            if getattr(part, "logprobs", None) != []:
                continue
            (deferred,) = waiting.values()
            if deferred.values < LARGE_VALUES or request.store:
                part.logprobs = deferred.whole()
            else:
                scope[ANSWER] = _response(answer, number, position, deferred)
    return answer


def _prompt_values(part: Any) -> int:
    values = getattr(part, "prompt_logprobs", None)
    return len(values) * _width(values) if values else 0


# --- the pieces ---


def large_response(response: Response, pieces: Iterator[bytes]) -> Response:
    """Return a response with these pieces as its body, and all else as in ``response``."""
    headers = {k: v for k, v in response.headers.items() if k.lower() != "content-length"}
    return StreamingResponse(
        _off_loop(pieces), response.status_code, headers, background=response.background
    )


async def _off_loop(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        if piece:
            yield piece


def _json(value: Any) -> bytes:
    """Encode as Starlette's ``JSONResponse`` does."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _object(model: Any, parts: Mapping[str, Iterator[bytes]]) -> Iterator[bytes]:
    """Yield a model's JSON, with the pieces in ``parts`` for some of its fields."""
    without: dict[str, Any] = {name: [] if name == "choices" else None for name in parts}
    rest = model.model_copy(update=without).model_dump()
    before = b"{"
    for name, value in rest.items():
        yield before + _json(name) + b":"
        if name in parts:
            yield from parts[name]
        else:
            yield _json(value)
        before = b","
    yield b"}"


def _list(entries: Iterator[Iterator[bytes]]) -> Iterator[bytes]:
    before = b"["
    for entry in entries:
        yield before
        yield from entry
        before = b","
    yield b"]" if before == b"," else b"[]"


def _answer(answer: Any, waiting: Mapping[int, _Deferred]) -> Iterator[bytes]:
    parts = _prompt_parts(answer)
    return _object(
        answer, {**parts, "choices": _list(_choice(choice, waiting) for choice in answer.choices)}
    )


def _response(answer: Any, item: int, part: int, deferred: _Deferred) -> Iterator[bytes]:
    """Yield a ``ResponsesResponse`` as vLLM's route dumps it, with a part's log probabilities."""
    made = answer.model_dump(**_AS_RESPONSE)
    place = made["output"][item]["content"][part]["logprobs"] = secrets.token_hex(16)
    before, after = _json(made).split(_json(place))
    yield before
    yield from _list(
        iter([_json([row.model_dump(**_AS_RESPONSE) for row in rows])[1:-1]])
        for rows in deferred.parts()
    )
    yield after


def _choice(choice: Any, waiting: Mapping[int, _Deferred]) -> Iterator[bytes]:
    parts = _prompt_parts(choice)
    if id(choice.logprobs) in waiting:
        deferred = waiting[id(choice.logprobs)]
        rows = "content" in type(choice.logprobs).model_fields
        parts["logprobs"] = _rows(deferred) if rows else _columns(deferred)
    return _object(choice, parts)


def _prompt_parts(model: Any) -> dict[str, Iterator[bytes]]:
    return {"prompt_logprobs": _prompt(model)} if _prompt_values(model) else {}


def _prompt(model: Any) -> Iterator[bytes]:
    name = "prompt_logprobs"
    values = getattr(model, name)

    def slices() -> Iterator[Iterator[bytes]]:
        for at in _slices(values):
            part = model.model_copy(update={name: values[at]}).model_dump(include={name})
            yield iter([_json(part[name])[1:-1]])

    return _list(slices())


def _rows(deferred: _Deferred) -> Iterator[bytes]:
    """Yield the JSON of ``ChatCompletionLogProbs``: one list, an object for every token."""
    yield b'{"content":'
    yield from _list(iter([_json(part.model_dump()["content"])[1:-1]]) for part in deferred.parts())
    yield b"}"


def _columns(deferred: _Deferred) -> Iterator[bytes]:
    """Yield the JSON of ``CompletionLogProbs``: a list for every field, an entry for every token.

    Only empty pieces come until all slices are encoded, because the first field needs all slices.
    """
    columns: dict[str, list[bytes]] = {}
    for part in deferred.parts():
        for name, values in part.model_dump().items():
            columns.setdefault(name, []).append(_json(values)[1:-1])
        yield b""
    before = b"{"
    for name, pieces in columns.items():
        yield before + _json(name) + b":"
        yield from _list(iter([piece]) for piece in pieces)
        before = b","
    yield b"}"
