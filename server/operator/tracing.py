"""Traces of requests and switches, for OpenTelemetry.

Only front ends export. What the others know reaches them anyway: the controller's notes and the
engines' outputs carry times of the monotonic clock, which all processes of a node share. So spans
are made at the end, from when things happened. The exporter, the sampler and the span
``llm_request`` are vLLM's (``vllm.tracing``).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.messages import Ended, Note, Outcome, Placed, Switching
from shoal.runtime.protocol.messages.views import SwitchTrace, SwitchView, units_text
from shoal.runtime.protocol.wire import EventType, FinishReason

FLUSH_SECONDS = 1.5
"""How long the last spans may take to be sent when the front end ends."""

_PROPAGATOR = TraceContextTextMapPropagator()

Value = str | int
Attributes = Mapping[str, Value]


class GivenIds(RandomIdGenerator):
    """Random ids, but for a root span whose ids are given: other processes know them already."""

    def __init__(self) -> None:
        self._given: otel.SpanContext | None = None

    def give(self, context: otel.SpanContext) -> None:
        """Let the root span that is started next have the ids of this context."""
        self._given = context

    def generate_trace_id(self) -> int:
        """Return the trace id of a root span, which asks for its span id next."""
        return super().generate_trace_id() if self._given is None else self._given.trace_id

    def generate_span_id(self) -> int:
        """Return a span id."""
        given, self._given = self._given, None
        return super().generate_span_id() if given is None else given.span_id


@dataclass(eq=False)
class _Switch:
    """A switch as requests meet it."""

    told: SwitchTrace
    ended: float | None = None

    @property
    def name(self) -> str:
        return "bind" if any(unit.is_group for unit in self.told.units) else "release"

    @property
    def context(self) -> otel.SpanContext:
        context = _PROPAGATOR.extract({"traceparent": self.told.traceparent})
        return otel.get_current_span(context).get_span_context()

    @property
    def attributes(self) -> Attributes:
        return {
            "shoal.switch.epoch": self.told.epoch,
            "shoal.switch.reason": self.told.reason,
            "shoal.switch.treatment": self.told.treatment,
        }


@dataclass(eq=False)
class _Stay:
    """What one unit has computed of a request, from its outputs. Monotonic seconds."""

    unit: Unit
    scheduled: float
    """When its first step there began."""
    first: float
    last: float
    tokens: int = 0


@dataclass(eq=False)
class _Life:
    """One engine request. Monotonic seconds."""

    name: str
    sent: float
    placed: list[Placed] = field(default_factory=list)
    stays: list[_Stay] = field(default_factory=list)
    switches: list[_Switch] = field(default_factory=list)
    """Those made while it waited, or on engines of its unit."""
    pauses: list[tuple[float, float, _Switch]] = field(default_factory=list)
    paused: tuple[float, _Switch] | None = None
    """Since when, and by which switch."""
    outcome: Outcome | None = None
    failed: bool = False
    ended: float = 0.0

    @property
    def unit(self) -> Unit | None:
        """That which has it; empty while none has had it."""
        return self.placed[-1].unit if self.placed else None

    def resume(self, now: float) -> None:
        """Note that it goes on, if it was paused."""
        if self.paused is not None:
            since, switch = self.paused
            self.pauses.append((since, now, switch))
            self.paused = None

    def ways(self) -> Iterator[tuple[Placed, _Stay | None, float]]:
        """Yield every placement, what came of it, and when the request left the unit.

        A request may have been moved on before its unit made a token.
        """
        stays = list(self.stays)
        for position, placed in enumerate(self.placed, start=1):
            moved = position < len(self.placed)
            left = _waited(self.placed[position])[0] if moved else self.ended
            made = bool(stays) and stays[0].unit == placed.unit and stays[0].scheduled <= left
            yield placed, stays.pop(0) if made else None, left


def _waited(placed: Placed) -> tuple[float, float]:
    assert placed.waited is not None, "the controller tells it where requests are traced"
    return placed.waited


@dataclass(eq=False)
class Trace:
    """One HTTP request of a generating route."""

    span: otel.Span
    """That of the HTTP request, above all others of the trace."""
    offset_ns: int
    """What makes a time of the monotonic clock one since the epoch."""
    carrier: dict[str, str] = field(default_factory=dict)
    """The trace's context as vLLM carries it."""
    status: int | None = None
    """Of the response; None while there is none: its client may leave before that."""
    refused: str | None = None
    lives: dict[str, _Life] = field(default_factory=dict)
    """Its engine requests, by vLLM's internal id."""
    closed: bool = False

    def ns(self, seconds: float) -> int:
        """Return a time of the monotonic clock in nanoseconds since the epoch."""
        return self.offset_ns + int(seconds * 1e9)

    @property
    def outcome(self) -> str | None:
        """Why it was refused, or how its engine requests ended: the first that did not finish."""
        lives = self.lives.values()
        outcomes = [life.outcome for life in lives if life.outcome is not None]
        unfinished = [outcome for outcome in outcomes if outcome is not Outcome.FINISHED]
        return self.refused or next(iter([*unfinished, *outcomes]), None)

    @property
    def failed(self) -> bool:
        """Whether the caller did not get what was asked for, by no fault of the connection."""
        refused = self.status is not None and self.status >= 400
        return refused or any(life.failed for life in self.lives.values())

    @property
    def attributes(self) -> dict[str, Value]:
        """Those of the HTTP request's span that are known at its end."""
        lives = self.lives.values()
        tokens = sum(stay.tokens for life in lives for stay in life.stays)
        found: dict[str, Value] = {"gen_ai.usage.completion_tokens": tokens}
        if self.status is not None:
            found["http.response.status_code"] = self.status
        units = list(dict.fromkeys(placed.unit for life in lives for placed in life.placed))
        if units:
            found["shoal.unit"] = units_text(unit.engines for unit in units)
            found["shoal.layout"] = " ".join(unit.name for unit in units)
        if self.outcome is not None:
            found["shoal.outcome"] = self.outcome
        return found


class Traces:
    """Follows requests and switches, and makes their spans.

    Args:
        provider: makes and exports spans.
        exports_switches: whether this front end exports the traces of switches: one of them does.
        clock: monotonic seconds, the same as the controller's and the engines'.
        wall_ns: nanoseconds since the epoch.
    """

    def __init__(
        self,
        provider: TracerProvider,
        *,
        exports_switches: bool,
        clock: Clock = monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._provider = provider
        self._ids = provider.id_generator = GivenIds()
        self._tracer = provider.get_tracer("shoal")
        self._exports_switches = exports_switches
        self._clock = clock
        self._wall_ns = wall_ns
        self._current: ContextVar[Trace | None] = ContextVar("trace", default=None)
        self._followed: dict[str, tuple[Trace, _Life]] = {}
        self._switch: _Switch | None = None

    def __len__(self) -> int:
        return len(self._followed)

    def shut_down(self) -> None:
        """Send what there is, but do not wait long for a collector that does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)

    def _offset_ns(self) -> int:
        # Taken anew for every trace: the wall clock is adjusted while a server runs.
        return self._wall_ns() - int(self._clock() * 1e9)

    # --- HTTP requests ------------------------------------------------------------------------

    def open(self, method: str, path: str, headers: Headers) -> Trace:
        """Start or continue the trace of the HTTP request that the current context serves."""
        offset = self._offset_ns()
        span = self._tracer.start_span(
            f"{method} {path}",
            context=_PROPAGATOR.extract(headers),
            kind=otel.SpanKind.SERVER,
            start_time=offset + int(self._clock() * 1e9),
            attributes={"http.request.method": method, "http.route": path},
        )
        trace = Trace(span, offset)
        _PROPAGATOR.inject(trace.carrier, otel.set_span_in_context(span))
        self._current.set(trace)
        return trace

    def refuse(self, reason: str) -> None:
        """Note why the HTTP request is refused that the current context serves."""
        trace = self._current.get()
        if trace is not None:
            trace.refused = reason

    def close(self, trace: Trace) -> None:
        """End the span of an HTTP request: its response has been sent, or broke off."""
        trace.closed = True
        for request_id, life in trace.lives.items():
            if life.outcome is not None:
                self._let_go(request_id)
        trace.span.set_attributes(trace.attributes)
        if trace.failed:
            trace.span.set_status(otel.StatusCode.ERROR, trace.outcome)
        trace.span.end(trace.ns(self._clock()))

    # --- engine requests ----------------------------------------------------------------------

    def start(self, request: Any) -> None:
        """Follow an engine request that the HTTP request of the current context sends now.

        Args:
            request: vLLM's ``EngineCoreRequest``.
        """
        trace = self._current.get()
        if trace is None:
            return
        life = _Life(request.external_req_id or request.request_id, self._clock())
        if self._switch is not None:
            life.switches.append(self._switch)
        trace.lives[request.request_id] = life
        trace.span.set_attribute("shoal.priority", request.priority)
        self._followed[request.request_id] = trace, life

    def take(self, unit: Unit | None, outputs: Iterable[Any]) -> None:
        """Take outputs that go to their clients now, and tell vLLM the trace they belong to.

        Args:
            unit: who made them; None: the controller, which only ends requests.
            outputs: vLLM's ``EngineCoreOutput``.
        """
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

    def _take_tokens(self, life: _Life, unit: Unit, output: Any) -> None:
        now = self._clock()
        # A unit says with its first output how it has computed the prompt.
        if not life.stays or output.prefill_stats is not None:
            begun = (e.timestamp for e in output.events or () if e.type == EventType.SCHEDULED)
            life.stays.append(_Stay(unit, next(begun, now), now, now))
        life.stays[-1].last = now
        life.stays[-1].tokens += len(output.new_token_ids)

    def finish(self, request_ids: Iterable[str]) -> None:
        """End requests whose last output was taken, though it did not say so."""
        for request_id in request_ids:
            self._end(request_id, Outcome.FINISHED)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests whose clients have gone."""
        for request_id in request_ids:
            self._end(request_id, Outcome.ABORTED)

    def take_note(self, note: Note) -> None:
        """Take a note of the controller; one for a request that is not followed is ignored."""
        match note:
            case Placed():
                self._take_placed(note)
            case Ended():
                self._take_ended(note)
            case Switching(trace=SwitchTrace() as told):
                self._take_switching(told, note.engines)

    def _take_placed(self, note: Placed) -> None:
        _, life = self._followed.get(note.request_id, (None, None))
        if life is not None:
            life.resume(_waited(note)[0])
            life.placed.append(note)

    def _take_ended(self, note: Ended) -> None:
        _, life = self._followed.get(note.request_id, (None, None))
        if life is not None:
            life.outcome = None  # what was said before was guessed from its last output
            life.failed |= note.status is not None
            self._end(note.request_id, note.outcome)

    def _end(self, request_id: str, outcome: Outcome) -> None:
        """Note how a request has ended, if nobody has said so before."""
        trace, life = self._followed.get(request_id, (None, None))
        if trace is None or life is None or life.outcome is not None:
            return
        life.outcome, life.ended = outcome, self._clock()
        life.resume(life.ended)
        if trace.closed:  # it went on in the background
            self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        trace, life = self._followed.pop(request_id)
        if trace.span.get_span_context().trace_flags.sampled:
            self._make_spans(trace, life)

    # --- their spans --------------------------------------------------------------------------

    def _make_spans(self, trace: Trace, life: _Life) -> None:
        parent = otel.set_span_in_context(trace.span)

        def make(
            name: str,
            start: float,
            end: float,
            attributes: Attributes,
            links: Collection[otel.Link] = (),
        ) -> None:
            self._tracer.start_span(
                name,
                context=parent,
                start_time=trace.ns(start),
                attributes={"gen_ai.request.id": life.name, **attributes},
                links=list(links),
            ).end(trace.ns(max(start, end)))

        if not life.placed:
            make("pool_wait", life.sent, life.ended, {})
        for placed, stay, left in life.ways():
            unit = {
                "shoal.unit": units_text([placed.unit.engines]),
                "shoal.layout": placed.unit.name,
            }
            pooled, dispatched = _waited(placed)
            make("pool_wait", pooled, dispatched, unit)
            make("dispatch", dispatched, left if stay is None else stay.scheduled, unit)
            if stay is not None:
                make("first_token", stay.scheduled, stay.first, unit)
                tokens = {"gen_ai.usage.completion_tokens": stay.tokens}
                make("decode", stay.first, stay.last, {**unit, **tokens})
        for switch in life.switches:
            start = max(switch.told.at, life.sent)
            end = life.ended if switch.ended is None else min(switch.ended, life.ended)
            make(switch.name, start, end, switch.attributes, [otel.Link(switch.context)])
        for start, end, switch in life.pauses:
            make("paused", start, end, switch.attributes, [otel.Link(switch.context)])

    # --- switches -----------------------------------------------------------------------------

    def _take_switching(self, told: SwitchTrace, engines: Collection[int]) -> None:
        if told.done is not None:
            if self._switch is not None:
                self._settle(self._switch, told, told.done)
            return
        self._switch = _Switch(told)
        for _, life in self._followed.values():
            if life.unit is None or set(life.unit.engines).intersection(engines):
                life.switches.append(self._switch)

    def _settle(self, switch: _Switch, told: SwitchTrace, done: SwitchView) -> None:
        self._switch, switch.ended = None, told.at
        for _, life in self._followed.values():
            if life.unit not in told.paused:
                life.resume(told.at)
            elif life.paused is None:
                life.paused = told.at, switch
        if self._exports_switches:
            self._export(switch, told, done)

    def _export(self, switch: _Switch, told: SwitchTrace, done: SwitchView) -> None:
        offset = self._offset_ns()
        self._ids.give(switch.context)
        root = self._tracer.start_span(
            "switch",
            context=Context(),
            start_time=offset + int(switch.told.at * 1e9),
            attributes={
                **switch.attributes,
                "shoal.switch.before": units_text(done.before),
                "shoal.switch.after": units_text(done.after),
                "shoal.switch.outcome": done.outcome,
                "shoal.switch.paused": done.paused,
                "shoal.switch.resumed": done.resumed,
                "shoal.switch.drained": done.drained,
                "shoal.switch.moved": done.moved,
            },
        )
        parent = otel.set_span_in_context(root)
        for phase in told.phases:
            self._tracer.start_span(
                phase.name,
                context=parent,
                start_time=offset + int(phase.start * 1e9),
                attributes={
                    "shoal.unit": units_text([phase.unit.engines]),
                    "shoal.layout": phase.unit.name,
                },
            ).end(offset + int(phase.end * 1e9))
        if done.error is not None:
            root.set_status(otel.StatusCode.ERROR, done.error)
        root.end(offset + int(told.at * 1e9))


class TracingMiddleware:
    """Traces the requests to generating routes, those that are refused at the door included.

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
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        trace = self._traces.open(scope["method"], scope["path"], Headers(scope=scope))

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
