"""Which engine requests an HTTP request has become, and what became of these in the task pool.

One HTTP request may become several engine requests (``n``, lists of prompts). Middleware
(``held_responses.py``) opens a ``Placement`` for each HTTP request; the front end's engine client,
called in the same context, adds the ids of the engine requests; the controller's ``Placed`` and
``Ended`` notes say what became of each.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any

import msgspec
from starlette.types import Scope

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.messages import Ended, Outcome, Placed
from shoal.runtime.protocol.wire import FinishReason, Terms
from shoal.server.gate.logprob_bounds import LogprobBudget
from shoal.server.observers import Observer
from shoal.server.rejections import Refused

UNIT_HEADER = "x-shoal-unit"
LAYOUT_HEADER = "x-shoal-layout"
PRIORITY_HEADER = "x-shoal-priority"

_NO_TOKEN = (
    "the request's grammar allows no token that its allowed_token_ids and bad_words leave, so the "
    "answer cannot go on"
)


class Placement:
    """One HTTP request of a generating route: what it asked for, and where it runs.

    Attributes:
        arrival: when the request came.
        number: identifies it among the requests of this front end.
        request_ids: its engine requests.
        terms: what the task pool is told about its engine requests.
        priority: the effective priority; None while it is not known.
        in_background: whether the response does not wait for the generated tokens.
        holder: who holds its API key; None: it has no key.
        tenant: it may find only this tenant's prefixes in the cache; None: those of all requests
            without a tenant.
        spend_tokens: counts the tokens of its prompts and answers.
        ended: the controller's note on the first engine request that it refused or dropped.
        logprobs: how many log probabilities it may ask for; None while that is not known.
        refused: why the front end refused it without an engine; None: it did not.
        unit: the unit that was last given one of its engine requests; None: none was.
        running: its engine requests that have not ended.
        narrowed: those of its engine requests whose grammar may find all of its tokens excluded.
        is_closed: whether its response has ended.
    """

    def __init__(self, arrival: float = 0.0, number: int = 0) -> None:
        self.arrival = arrival
        self.number = number
        self.request_ids: set[str] = set()
        self.terms = Terms()
        self.priority: int | None = None
        self.in_background = False
        self.holder: str | None = None
        self.tenant: str | None = None
        self.spend_tokens: Callable[[int], None] = _spend_nothing
        self.ended: Ended | None = None
        self.logprobs: LogprobBudget | None = None
        self.refused: Refused | None = None
        self.unit: Unit | None = None
        self.running: set[str] = set()
        self.narrowed: set[str] = set()
        self.is_closed = False
        self._units: list[Unit] = []
        self._awaited: set[str] = set()
        self._noted = asyncio.Event()

    def expect(self, request_id: str) -> None:
        """Add an engine request, and await the controller's note on it."""
        self.request_ids.add(request_id)
        self._awaited.add(request_id)

    def take(self, note: Placed | Ended) -> None:
        """Take the controller's note on an engine request."""
        match note:
            case Placed(unit=unit):
                self.unit = unit
                if unit not in self._units:
                    self._units.append(unit)
            case Ended(status=status):
                if status is not None and self.ended is None:
                    self.ended = note
        self._awaited.discard(note.request_id)
        self._noted.set()

    async def wait(self, *, for_all: bool) -> None:
        """Wait for the notes on all engine requests, or for the note on one of them.

        The controller sends the note on an engine request before it hands the request to a unit or
        ends it. An engine request that the front end aborts gets an ``Ended`` note, too.
        """
        while self._awaited and (for_all or len(self._awaited) == len(self.request_ids)):
            self._noted.clear()
            await self._noted.wait()

    def awaits(self, request_id: str) -> bool:
        """Return whether the controller's note on an engine request is awaited."""
        return request_id in self._awaited

    @property
    def is_placed(self) -> bool:
        """Whether any of its engine requests went to a unit."""
        return bool(self._units)

    @property
    def headers(self) -> dict[str, str]:
        """The response headers, as far as they are known.

        They give the effective priority, the distinct units in order of dispatch, and their
        layouts.
        """
        headers = {}
        if self.priority is not None:
            headers[PRIORITY_HEADER] = str(self.priority)
        if self._units:
            units = (",".join(map(str, unit.engines)) for unit in self._units)
            headers[UNIT_HEADER] = ";".join(units)
            headers[LAYOUT_HEADER] = ";".join(unit.name for unit in self._units)
        return headers


def _spend_nothing(tokens: int) -> None:
    """Count nothing: the request has no limit."""


class Placements(Observer):
    """The placements of the HTTP requests in progress, by engine request.

    The engine requests of a response in the background go on when it has ended, and may even be
    sent after that. Each of these is known until it ends itself.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._current: ContextVar[Placement | None] = ContextVar("placement", default=None)
        self._by_request: dict[str, Placement] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._by_request)

    @property
    def current(self) -> Placement | None:
        """The placement of the HTTP request that the current context serves."""
        return self._current.get()

    @property
    def holder(self) -> str | None:
        """The holder of the API key of the HTTP request that the current context serves, if any."""
        placement = self.current
        return None if placement is None else placement.holder

    @property
    def key_name(self) -> str:
        """The name of the API key of the HTTP request that the current context serves, as a label.

        It is ``none`` without a key, and ``unnamed`` for a key of ``--api-key``.
        """
        placement = self.current
        if placement is None or placement.holder is None:
            return "none"
        return placement.terms.caller or "unnamed"

    @property
    def arrival(self) -> float:
        """When the current context's HTTP request came; the current time if there is none."""
        placement = self.current
        return self._clock() if placement is None else placement.arrival

    def open(self) -> Placement:
        """Start the placement of the HTTP request that the current context serves."""
        placement = Placement(self._clock(), next(self._numbers))
        self._current.set(placement)
        return placement

    def close(self, placement: Placement) -> None:
        """Forget a placement whose response has ended, but for what goes on in the background."""
        placement.is_closed = True
        goes_on = placement.running if placement.in_background else frozenset()
        for request_id in placement.request_ids - goes_on:
            self._by_request.pop(request_id, None)

    def count_in(self, request: Any) -> None:
        """Count an engine request towards the HTTP request of the current context.

        This spends its prompt tokens, and adds its cache salt and what the task pool is told.

        Args:
            request: vLLM's ``EngineCoreRequest``.
        """
        terms = self.expect(request.request_id)
        if (placement := self.current) is not None:
            placement.spend_tokens(len(request.prompt_token_ids or ()))
            if _is_narrowed(request.sampling_params):
                placement.narrowed.add(request.request_id)
        request.cache_salt = self.salt(request.cache_salt)
        if terms != Terms():
            request.trace_headers = terms.added_to(request.trace_headers)

    def expect(self, request_id: str) -> Terms:
        """Count an engine request towards the HTTP request of the current context, if any.

        Returns:
            What the task pool is told about it.
        """
        placement = self._current.get()
        if placement is None:
            return Terms()
        placement.expect(request_id)
        placement.running.add(request_id)
        self._by_request[request_id] = placement
        if placement.is_placed:
            return msgspec.structs.replace(placement.terms, begun=True)
        return placement.terms

    def expect_again(self, request_id: str) -> None:
        """Await another note on an engine request whose engine has died."""
        placement = self._by_request.get(request_id)
        if placement is not None:
            placement.expect(request_id)

    def awaiting(self) -> list[str]:
        """Return the engine requests that await a note of the controller."""
        placements = self._by_request.items()
        return [request_id for request_id, placement in placements if placement.awaits(request_id)]

    def refuse(self, refused: Refused) -> None:
        """Note why the HTTP request of the current context is refused without an engine."""
        placement = self._current.get()
        if placement is not None:
            placement.refused = refused

    def give_up(self, request_id: str) -> None:
        """Stop awaiting a note on an engine request, which never reached the controller."""
        self.take(Ended(request_id, Outcome.ABORTED))

    def salt(self, own: str | None) -> str | None:
        """Return the cache salt of the HTTP request that the current context serves.

        Only requests with the same salt find each other's prefixes in a cache: vLLM mixes the salt
        into the hash of the first block.

        Args:
            own: the salt that the request asks for.
        """
        placement = self._current.get()
        if placement is None or placement.tenant is None:
            return own
        mixed = f"{len(placement.tenant)}:{placement.tenant}:{own or ''}"
        return hashlib.sha256(mixed.encode()).hexdigest()

    def take(self, note: Placed | Ended) -> None:
        """Take a note of the controller; a note on a request that has ended is ignored."""
        placement = self._by_request.get(note.request_id)
        if placement is not None:
            placement.take(note)

    placed = take

    def ended(self, note: Ended) -> None:
        """Take a note of the controller on a request that has ended."""
        self.take(note)
        self._end(note.request_id)

    def finished(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended, if the response has ended before them."""
        for request_id in request_ids:
            self._end(request_id)

    aborted = finished

    def _end(self, request_id: str) -> None:
        placement = self._by_request.get(request_id)
        if placement is not None:
            placement.running.discard(request_id)
            if placement.is_closed:
                del self._by_request[request_id]

    def outputs(self, unit: Unit | None, outputs: Sequence[Any]) -> None:
        """Count the tokens of outputs, and await the controller's notes on requests that it ends.

        Notes and outputs come over different connections, so a note may already have come.

        An engine ends a request with an error if no token is left to it. vLLM would call that an
        internal error; ``Scheduler.update_from_output`` tells no more.
        """
        for output in outputs:
            placement = self._by_request.get(output.request_id)
            if placement is not None:
                placement.spend_tokens(len(output.new_token_ids))
                if unit is None and placement.ended is None:
                    placement.expect(output.request_id)
                elif output.request_id in placement.narrowed and _failed(output):
                    note = Ended(output.request_id, Outcome.FINISHED, 400, _NO_TOKEN)
                    placement.ended = placement.ended or note
                if output.finish_reason is not None:
                    self._end(output.request_id)


def _is_narrowed(sampling: Any) -> bool:
    """Return whether the tokens of a grammar are narrowed by other fields of a request."""
    if sampling is None or sampling.structured_outputs is None:
        return False
    return bool(sampling.allowed_token_ids or sampling.bad_words)


def _failed(output: Any) -> bool:
    return bool(output.finish_reason == FinishReason.ERROR)


def route_path(scope: Scope) -> str:
    """Return the path by which a request is routed, without the application's ``root_path``.

    Middleware that decides by path must see the same path as Starlette's router, or a client could
    bypass it with a prefix.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path
