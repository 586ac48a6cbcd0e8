"""Follows requests and switches until they end; ``spans.py`` then makes their spans.

Only front ends export spans. The controller's notes and the engines' outputs bring them what the
other processes know, with times of the monotonic clock, which all processes of a node share. So a
front end can make all spans at the end, from the times at which things happened.
"""

from collections.abc import Collection, Iterable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.messages import Ended, Outcome, Placed, Switching
from shoal.runtime.protocol.messages.views import SwitchTrace, SwitchView
from shoal.runtime.protocol.wire import EventType, FinishReason
from shoal.server.gate.placement import route_path
from shoal.server.observers import Observer
from shoal.server.operator.spans import Life, Spans, Stay, Switch, Trace, waited


class Traces(Observer):
    """Follows requests and switches, and has their spans made.

    Args:
        spans: makes the spans.
        exports_switches: whether this front end exports the traces of switches; only one does.
        clock: monotonic seconds, the same as the controller's and the engines'.
    """

    def __init__(self, spans: Spans, *, exports_switches: bool, clock: Clock = monotonic) -> None:
        self._spans = spans
        self._exports_switches = exports_switches
        self._clock = clock
        self._current: ContextVar[Trace | None] = ContextVar("trace", default=None)
        self._followed: dict[str, tuple[Trace, Life]] = {}
        self._switch: Switch | None = None

    def __len__(self) -> int:
        return len(self._followed)

    # --- HTTP requests ------------------------------------------------------------------------

    def open(self, method: str, path: str, headers: Headers) -> Trace:
        """Start or continue the trace of the HTTP request that the current context serves."""
        trace = self._spans.begin(method, path, headers)
        self._current.set(trace)
        return trace

    def refused(self, reason: str) -> None:
        """Note why the HTTP request of the current context is refused."""
        trace = self._current.get()
        if trace is not None:
            trace.refused = reason

    def close(self, trace: Trace) -> None:
        """End the span of an HTTP request whose response has been sent, or broke off."""
        trace.closed = True
        for request_id, life in trace.lives.items():
            if life.outcome is not None:
                self._let_go(request_id)
        self._spans.end(trace)

    # --- engine requests ----------------------------------------------------------------------

    def sending(self, request: Any, arrival: float) -> None:
        """Follow an engine request that the HTTP request of the current context sends now."""
        del arrival  # the HTTP request's span began with it
        trace = self._current.get()
        if trace is None:
            return
        life = Life(request.external_req_id or request.request_id, self._clock())
        if self._switch is not None:
            life.switches.append(self._switch)
        trace.lives[request.request_id] = life
        trace.span.set_attribute("shoal.priority", request.priority)
        self._followed[request.request_id] = trace, life

    def outputs(self, unit: Unit | None, outputs: Iterable[Any]) -> None:
        """Take outputs that go to their clients now, and tell vLLM to which trace each belongs."""
        for output in outputs:
            trace, life = self._followed.get(output.request_id, (None, None))
            if trace is None or life is None:
                continue
            output.trace_headers = trace.carrier
            if output.new_token_ids and unit is not None:
                self._take_tokens(life, unit, output)
            if output.finish_reason is not None:
                aborted = output.finish_reason == FinishReason.ABORT
                life.failed |= output.finish_reason == FinishReason.ERROR
                self._end(output.request_id, Outcome.ABORTED if aborted else Outcome.FINISHED)

    def _take_tokens(self, life: Life, unit: Unit, output: Any) -> None:
        now = self._clock()
        # The first output of a stay says how the prompt was computed.
        if output.prefill_stats is not None or not life.stays or life.stays[-1].unit != unit:
            begun = (e.timestamp for e in output.events or () if e.type == EventType.SCHEDULED)
            life.stays.append(Stay(unit, next(begun, now), now, now))
        life.stays[-1].last = now
        life.stays[-1].tokens += len(output.new_token_ids)

    def finished(self, request_ids: Iterable[str]) -> None:
        """End requests that have had their last output."""
        for request_id in request_ids:
            self._end(request_id, Outcome.FINISHED)

    def aborted(self, request_ids: Iterable[str]) -> None:
        """End requests whose clients have gone."""
        for request_id in request_ids:
            self._end(request_id, Outcome.ABORTED)

    def placed(self, note: Placed) -> None:
        """Note where a request went, if it is followed."""
        _, life = self._followed.get(note.request_id, (None, None))
        if life is None:
            return
        life.unit = note.unit
        if note.waited is None:  # it was carried
            life.resume(self._clock())
        else:
            life.resume(waited(note)[0])
            life.placed.append(note)

    def ended(self, note: Ended) -> None:
        """Note how a request has ended, as the controller says, if the request is followed."""
        _, life = self._followed.get(note.request_id, (None, None))
        if life is not None:
            life.outcome = None  # what was said before was guessed from its last output
            life.failed |= note.status is not None
            self._end(note.request_id, note.outcome)

    def _end(self, request_id: str, outcome: Outcome) -> None:
        """Note how a request has ended, if that is not noted yet."""
        trace, life = self._followed.get(request_id, (None, None))
        if trace is None or life is None or life.outcome is not None:
            return
        life.outcome, life.ended = outcome, self._clock()
        life.resume(life.ended)
        if trace.closed:  # it went on in the background
            self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        self._spans.make_of(*self._followed.pop(request_id))

    # --- switches -----------------------------------------------------------------------------

    def switching(self, note: Switching) -> None:
        """Note which requests a switch concerns, and which it has paused or resumed."""
        told = note.trace
        if told is None:
            return
        if told.done is not None:
            if self._switch is not None:
                self._settle(self._switch, told, told.done)
            return
        self._switch = Switch(told)
        for _, life in self._followed.values():
            if life.unit is None or set(life.unit.engines).intersection(note.engines):
                life.switches.append(self._switch)

    def _settle(self, switch: Switch, told: SwitchTrace, done: SwitchView) -> None:
        self._switch, switch.ended = None, told.at
        for _, life in self._followed.values():
            if life.unit not in told.paused:
                life.resume(told.at)
            elif life.paused is None:
                life.paused = told.at, switch
        if self._exports_switches:
            self._spans.make_of_switch(switch, told, done)


class TracingMiddleware:
    """Traces the requests to generating routes, including those that are refused early.

    Args:
        app: the application behind this middleware.
        traces: the requests in progress.
        paths: the generating routes.
    """

    def __init__(self, app: ASGIApp, traces: Traces, paths: Collection[str]) -> None:
        self._app = app
        self._traces = traces
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        path = route_path(scope) if scope["type"] == "http" else None
        if path not in self._paths:
            await self._app(scope, receive, send)
            return
        trace = self._traces.open(scope["method"], path, Headers(scope=scope))

        async def send_and_see(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        except Exception:
            trace.status = trace.status or 500  # what the server answers with now
            raise
        finally:
            self._traces.close(trace)
