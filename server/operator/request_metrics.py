"""Measures a front end's requests: latencies by class and layout, stalls, and refusals.

If there are several front ends, each adds to files that all of them read (prometheus_client's
multi-process mode, which vLLM's own metrics use as well), so the page of any front end shows all.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.messages import Switching
from shoal.runtime.protocol.messages.metrics import PRIORITY_CLASSES, priority_class
from shoal.runtime.protocol.wire import EventType, FinishReason
from shoal.server.connections.connection_limits import Cutoff
from shoal.server.observers import Observer
from shoal.server.rejections import Rejection

MIXED = "mixed"
"""The label ``layout`` of a request that ran in several layouts."""
STALL_SECONDS = 1.0
"""Shortest gap between two outputs of a stream that counts as a stall."""
NO_KEY = "none"
"""The label ``key`` of requests without an API key."""
TOKEN_KINDS = ("prompt", "output")

FIRST_TOKEN_BOUNDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640),
)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10),
)
REQUEST_BOUNDS = (
    *(0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 40, 60),
    *(120, 240, 480, 960, 1920),
)
STALL_BOUNDS = (STALL_SECONDS, 1.5, 2, 3, 5, 10, 20, 30, 60, 120)

_UNANSWERED = (FinishReason.ABORT, FinishReason.ERROR)


class StallCause(enum.StrEnum):
    """Why a stream stalled, as far as a front end can tell."""

    MOVED = "moved"
    """Its request went to another unit."""
    SWITCH = "switch"
    """The engines of its unit were regrouped."""
    OTHER = "other"


class RequestMetrics(Observer):
    """The metrics of requests, with all their series.

    Args:
        layouts: the layouts that the node can form.
        registry: where the metrics are registered.
    """

    def __init__(self, layouts: Sequence[str], registry: CollectorRegistry = REGISTRY) -> None:
        def latency(
            name: str,
            documentation: str,
            bounds: Sequence[float],
            labels: Sequence[str] = ("priority", "layout"),
        ) -> Histogram:
            return Histogram(name, documentation, labels, buckets=bounds, registry=registry)

        def count(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, labels, registry=registry)

        self.first_token = latency(
            "shoal_time_to_first_token_seconds",
            "From a request's arrival until its first token.",
            FIRST_TOKEN_BOUNDS,
        )
        self.inter_token = latency(
            "shoal_inter_token_latency_seconds", "Between two outputs of a stream.", TOKEN_BOUNDS
        )
        self.per_token = latency(
            "shoal_time_per_output_token_seconds",
            "Mean time per token after the first, per request.",
            TOKEN_BOUNDS,
        )
        self.request = latency(
            "shoal_request_seconds",
            "From a request's arrival until its last token.",
            REQUEST_BOUNDS,
        )
        self.stalls = latency(
            "shoal_stream_stall_seconds",
            "Gaps of at least a second between two outputs of a stream.",
            STALL_BOUNDS,
            ("cause",),
        )
        self.rejected = count(
            "shoal_rejected_requests_total",
            "HTTP requests refused before a unit had them.",
            "reason",
        )
        self.late_outputs = count(
            "shoal_late_outputs_total",
            "Outputs of dead engines that came when their requests had been begun again.",
        )
        self.cutoffs = count(
            "shoal_client_cutoffs_total",
            "Connections ended, and requests refused, because of how clients use connections.",
            "reason",
        )
        self.key_tokens = count(
            "shoal_key_tokens_total",
            "Tokens of the requests that have ended, by the name of their API key.",
            *("key", "kind"),
        )
        self.gaps = self._preset(layouts)
        """The series of ``inter_token``, kept here since looking one up per output token is
        slow."""

    def _preset(self, layouts: Sequence[str]) -> dict[tuple[str, str], Histogram]:
        """Make all series, so that they exist from the start; return those of ``inter_token``."""
        for metric, values in (
            (self.cutoffs, Cutoff),
            (self.stalls, StallCause),
            (self.rejected, Rejection),
        ):
            for value in values:
                metric.labels(value)
        for kind in TOKEN_KINDS:
            self.key_tokens.labels(NO_KEY, kind)
        for priority, layout in product(PRIORITY_CLASSES, layouts):
            self.first_token.labels(priority, layout)
        for priority, layout in product(PRIORITY_CLASSES, (*layouts, MIXED)):
            self.per_token.labels(priority, layout)
            self.request.labels(priority, layout)
        return {
            labels: self.inter_token.labels(*labels)
            for labels in product(PRIORITY_CLASSES, layouts)
        }

    def refused(self, reason: Rejection) -> None:
        """Count a refused request."""
        self.rejected.labels(reason).inc()

    def late(self, outputs: int) -> None:
        """Count outputs that were dropped."""
        self.late_outputs.inc(outputs)

    def used(self, key: str, *tokens: int) -> None:
        """Count the tokens that a request used, those of each of ``TOKEN_KINDS``."""
        for kind, number in zip(TOKEN_KINDS, tokens, strict=True):
            self.key_tokens.labels(key, kind).inc(number)

    def cut_off(self, reason: Cutoff) -> None:
        """Count a connection that was ended, or a request that was refused on it."""
        self.cutoffs.labels(reason).inc()


class _Life(msgspec.Struct):
    """One engine request in progress."""

    priority: str
    arrival: float
    sent: float
    key: str
    prompt_tokens: int
    unit: Unit | None = None
    """The unit of its last output."""
    layouts: set[str] = set()
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class RequestTimes(Observer):
    """Follows the requests of one front end from their arrival to their last output.

    Args:
        metrics: take the measurements.
        clock: monotonic seconds.
        key_name: returns the name of the API key of the current context's HTTP request.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        clock: Clock = monotonic,
        key_name: Callable[[], str] = lambda: NO_KEY,
    ) -> None:
        self._metrics = metrics
        self._key_name = key_name
        self._clock = clock
        self._lives: dict[str, _Life] = {}
        self._switching: set[int] = set()
        self._switched: dict[int, float] = {}
        """When the last switch of each engine ended."""

    def __len__(self) -> int:
        return len(self._lives)

    def sending(self, request: Any, arrival: float) -> None:
        """Follow an engine request from now on."""
        priority = priority_class(request.priority)
        prompt_tokens = len(request.prompt_token_ids or ())
        self._lives[request.request_id] = _Life(
            priority, arrival, self._clock(), self._key_name(), prompt_tokens
        )

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Stop following requests whose clients have gone."""
        for request_id in request_ids:
            self._end(request_id)

    def finished(self, request_ids: Iterable[str]) -> None:
        """Conclude requests that have had their last output."""
        for request_id in request_ids:
            life = self._end(request_id)
            if life is not None and life.tokens:
                self._conclude(life)

    def _end(self, request_id: str) -> _Life | None:
        """Stop following a request. Its tokens count once it had one: before, nothing was sent."""
        life = self._lives.pop(request_id, None)
        if life is not None and life.tokens:
            self._metrics.used(life.key, life.prompt_tokens, life.tokens)
        return life

    def switching(self, note: Switching) -> None:
        """Take the controller's note that a switch begins or has ended."""
        if note.over:
            self._switching.difference_update(note.engines)
            self._switched |= dict.fromkeys(note.engines, self._clock())
        else:
            self._switching.update(note.engines)

    def outputs(self, unit: Unit | None, outputs: Iterable[Any]) -> None:
        """Measure outputs, and let vLLM count the wait in the task pool as queueing, only once."""
        now, layout = self._clock(), "" if unit is None else unit.name
        for output in outputs:
            life = self._lives.get(output.request_id)
            if life is None:
                continue
            for event in output.events or ():
                if event.type == EventType.QUEUED:
                    event.timestamp = life.sent
            if output.new_token_ids and unit is not None:
                self._take_tokens(life, unit, layout, len(output.new_token_ids), now)
            if output.finish_reason is None:
                continue
            if output.finish_reason in _UNANSWERED:
                self.aborted([output.request_id])
            else:
                self.finished([output.request_id])

    def _take_tokens(self, life: _Life, unit: Unit, layout: str, tokens: int, now: float) -> None:
        if not life.tokens:
            life.first = now
            labels = life.priority, layout
            self._metrics.first_token.labels(*labels).observe(now - life.arrival)
        else:
            gap = now - life.last
            self._metrics.gaps[life.priority, layout].observe(gap)
            if gap >= STALL_SECONDS:
                self._metrics.stalls.labels(self._cause(life, unit)).observe(gap)
        life.unit, life.last = unit, now
        life.layouts.add(layout)
        life.tokens += tokens

    def _cause(self, life: _Life, unit: Unit) -> StallCause:
        if unit != life.unit:
            return StallCause.MOVED
        regrouped = any(self._switched.get(engine, 0.0) >= life.last for engine in unit.engines)
        if regrouped or self._switching.intersection(unit.engines):
            return StallCause.SWITCH
        return StallCause.OTHER

    def _conclude(self, life: _Life) -> None:
        (layout,) = life.layouts if len(life.layouts) == 1 else (MIXED,)
        labels = life.priority, layout
        self._metrics.request.labels(*labels).observe(life.last - life.arrival)
        if life.tokens > 1:
            mean = (life.last - life.first) / (life.tokens - 1)
            self._metrics.per_token.labels(*labels).observe(mean)
