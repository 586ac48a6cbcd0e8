"""Makes OpenTelemetry spans of requests and switches, and holds the records they are made from.

The exporter, the sampler and the span ``llm_request`` are vLLM's (``vllm.tracing``).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.messages import Outcome, Placed
from shoal.runtime.protocol.messages.views import SwitchTrace, SwitchView, units_text

FLUSH_SECONDS = 1.5
"""How long the last spans may take to be sent when the front end ends."""

_PROPAGATOR = TraceContextTextMapPropagator()

Value = str | int | float
Attributes = Mapping[str, Value]


# --- what they are made of ---


@dataclass(eq=False)
class Switch:
    """A switch that requests may meet."""

    told: SwitchTrace
    ended: float | None = None

    @property
    def name(self) -> str:
        """Name of its span in the trace of a request that met it."""
        return "bind" if any(unit.is_group for unit in self.told.units) else "release"

    @property
    def context(self) -> otel.SpanContext:
        """The ids of the switch's own trace."""
        context = _PROPAGATOR.extract({"traceparent": self.told.traceparent})
        return otel.get_current_span(context).get_span_context()

    @property
    def attributes(self) -> Attributes:
        """The attributes of every span of the switch."""
        return {
            "shoal.switch.epoch": self.told.epoch,
            "shoal.switch.reason": self.told.reason,
            "shoal.switch.treatment": self.told.treatment,
        }


@dataclass(eq=False)
class Stay:
    """One unit's part of a request, as its outputs show it. Times are in monotonic seconds."""

    unit: Unit
    scheduled: float
    """When the request's first step there began."""
    first: float
    last: float
    tokens: int = 0


@dataclass(eq=False)
class Life:
    """One engine request. Times are in monotonic seconds."""

    name: str
    sent: float
    placed: list[Placed] = field(default_factory=list)
    """Its ways out of the task pool."""
    unit: Unit | None = None
    """The unit that has the request; None if no unit has had it yet."""
    stays: list[Stay] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    """The switches that were made while it waited, or on engines of its unit."""
    pauses: list[tuple[float, float, Switch]] = field(default_factory=list)
    paused: tuple[float, Switch] | None = None
    """Since when it has been paused, and by which switch."""
    outcome: Outcome | None = None
    failed: bool = False
    ended: float = 0.0

    @property
    def units(self) -> list[Unit]:
        """The units that have had the request, in order."""
        ways = self.ways()
        return [unit for way, stays, _ in ways for unit in (way.unit, *(s.unit for s in stays))]

    def resume(self, now: float) -> None:
        """Note that the request goes on, if it was paused."""
        if self.paused is not None:
            since, switch = self.paused
            self.pauses.append((since, now, switch))
            self.paused = None

    def ways(self) -> Iterator[tuple[Placed, list[Stay], float]]:
        """Yield every way out of the task pool, the stays that followed, and when these were over.

        There is no stay if the request left its unit before that made a token, and there are
        several if the request was carried.
        """
        stays = list(self.stays)
        for position, placed in enumerate(self.placed, start=1):
            is_last = position == len(self.placed)
            left = self.ended if is_last else waited(self.placed[position])[0]
            followed = []
            while stays and (is_last or stays[0].scheduled <= left):
                followed.append(stays.pop(0))
            yield placed, followed, left


def waited(placed: Placed) -> tuple[float, float]:
    """Return since when and until when a request waited in the task pool."""
    assert placed.waited is not None, "the controller tells it where requests are traced"
    return placed.waited


@dataclass(eq=False)
class Trace:
    """One HTTP request of a generating route."""

    span: otel.Span
    """The span of the HTTP request, the parent of the trace's other spans."""
    offset_ns: int
    """Nanoseconds to add to a time of the monotonic clock to get the time since the epoch."""
    carrier: dict[str, str] = field(default_factory=dict)
    """The trace's context, in the form in which vLLM passes it on."""
    status: int | None = None
    """Status of the response; None while there is none, as when the client leaves early."""
    refused: str | None = None
    lives: dict[str, Life] = field(default_factory=dict)
    """Its engine requests, by vLLM's internal id."""
    closed: bool = False

    def ns(self, seconds: float) -> int:
        """Return a time of the monotonic clock in nanoseconds since the epoch."""
        return self.offset_ns + int(seconds * 1e9)

    @property
    def outcome(self) -> str | None:
        """Why it was refused, or the outcome of the first engine request that did not finish."""
        lives = self.lives.values()
        outcomes = [life.outcome for life in lives if life.outcome is not None]
        unfinished = [outcome for outcome in outcomes if outcome is not Outcome.FINISHED]
        return self.refused or next(iter([*unfinished, *outcomes]), None)

    @property
    def failed(self) -> bool:
        """Whether the request was refused or failed; a lost connection does not count."""
        refused = self.status is not None and self.status >= 400
        return refused or any(life.failed for life in self.lives.values())

    @property
    def attributes(self) -> dict[str, Value]:
        """The attributes of the HTTP request's span that are known at its end."""
        lives = self.lives.values()
        tokens = sum(stay.tokens for life in lives for stay in life.stays)
        found: dict[str, Value] = {"gen_ai.usage.completion_tokens": tokens}
        if self.status is not None:
            found["http.response.status_code"] = self.status
        units = list(dict.fromkeys(unit for life in lives for unit in life.units))
        if units:
            found["shoal.unit"] = units_text(unit.engines for unit in units)
            found["shoal.layout"] = " ".join(unit.name for unit in units)
        if self.outcome is not None:
            found["shoal.outcome"] = self.outcome
        return found


# --- how they are made ---


class GivenIds(RandomIdGenerator):
    """Random ids, except for a root span whose ids other processes already know."""

    def __init__(self) -> None:
        self._given: otel.SpanContext | None = None

    def give(self, context: otel.SpanContext) -> None:
        """Give the ids of this context to the root span that is started next."""
        self._given = context

    def generate_trace_id(self) -> int:
        """Return the trace id of a root span; the next call asks for its span id."""
        return super().generate_trace_id() if self._given is None else self._given.trace_id

    def generate_span_id(self) -> int:
        """Return a span id."""
        given, self._given = self._given, None
        return super().generate_span_id() if given is None else given.span_id


class Spans:
    """Makes the spans of requests and switches that have ended.

    Args:
        provider: makes and exports spans.
        clock: monotonic seconds, the same as the controller's and the engines'.
        wall_ns: nanoseconds since the epoch.
    """

    def __init__(
        self,
        provider: TracerProvider,
        clock: Clock = monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._provider = provider
        self._ids = provider.id_generator = GivenIds()
        self._tracer = provider.get_tracer("shoal")
        self._clock = clock
        self._wall_ns = wall_ns

    def shut_down(self) -> None:
        """Send the remaining spans, but do not wait long for a collector that does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)

    def _offset_ns(self) -> int:
        # Computed for every trace, because the wall clock is adjusted while a server runs.
        return self._wall_ns() - int(self._clock() * 1e9)

    def begin(self, method: str, path: str, headers: Headers) -> Trace:
        """Start or continue the trace of an HTTP request."""
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
        return trace

    def end(self, trace: Trace) -> None:
        """End the span of an HTTP request."""
        trace.span.set_attributes(trace.attributes)
        if trace.failed:
            trace.span.set_status(otel.StatusCode.ERROR, trace.outcome)
        trace.span.end(trace.ns(self._clock()))

    def make_of(self, trace: Trace, life: Life) -> None:
        """Make the spans of an engine request that has ended, if its trace is sampled."""
        if not trace.span.get_span_context().trace_flags.sampled:
            return
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
        for placed, stays, left in life.ways():
            unit = _of_unit(placed.unit)
            pooled, dispatched = waited(placed)
            make("pool_wait", pooled, dispatched, unit)
            make("dispatch", dispatched, stays[0].scheduled if stays else left, unit)
            before: Stay | None = None
            for stay in stays:
                unit = _of_unit(stay.unit)
                if before is None:
                    make("first_token", stay.scheduled, stay.first, unit)
                else:
                    make("carry", before.last, stay.first, unit)
                tokens = {"gen_ai.usage.completion_tokens": stay.tokens}
                make("decode", stay.first, stay.last, {**unit, **tokens})
                before = stay
        for switch in life.switches:
            start = max(switch.told.at, life.sent)
            end = life.ended if switch.ended is None else min(switch.ended, life.ended)
            make(switch.name, start, end, switch.attributes, [otel.Link(switch.context)])
        for start, end, switch in life.pauses:
            make("paused", start, end, switch.attributes, [otel.Link(switch.context)])

    def make_of_switch(self, switch: Switch, told: SwitchTrace, done: SwitchView) -> None:
        """Make the trace of a switch, whose ids the traces of requests may already refer to.

        Args:
            switch: the switch as it began.
            told: the controller's note that the switch is over.
            done: the switch's outcome.
        """
        offset = self._offset_ns()
        self._ids.give(switch.context)
        root = self._tracer.start_span(
            "switch",
            context=Context(),
            start_time=offset + int(switch.told.at * 1e9),
            attributes={
                **switch.attributes,
                "shoal.switch.before": done.text_before,
                "shoal.switch.after": done.text_after,
                "shoal.switch.outcome": done.outcome,
                "shoal.switch.paused": done.paused,
                "shoal.switch.resumed": done.resumed,
                "shoal.switch.drained": done.drained,
                "shoal.switch.moved": done.moved,
                "shoal.switch.carried": done.carried,
                "shoal.switch.recomputed": sum(done.recomputed.values()),
                "shoal.switch.carried_bytes": done.carried_bytes,
                "shoal.switch.carry_seconds": done.carry_seconds,
                "shoal.switch.precopied_bytes": done.precopied_bytes,
                "shoal.switch.precopy_seconds": done.precopy_seconds,
            },
        )
        parent = otel.set_span_in_context(root)
        for phase in told.phases:
            self._tracer.start_span(
                phase.name,
                context=parent,
                start_time=offset + int(phase.start * 1e9),
                attributes=_of_unit(phase.unit),
            ).end(offset + int(phase.end * 1e9))
        if done.error is not None:
            root.set_status(otel.StatusCode.ERROR, done.error)
        root.end(offset + int(told.at * 1e9))


def _of_unit(unit: Unit) -> Attributes:
    return {"shoal.unit": units_text([unit.engines]), "shoal.layout": unit.name}
