"""What a front end measures, on a clock of the test's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.messages import Switching
from shoal.runtime.protocol.wire import EventType, FinishReason
from shoal.server.operator.request_metrics import STALL_SECONDS, RequestMetrics, RequestTimes
from shoal.server.rejections import Rejection
from tests.units import tp

FIRST, BETWEEN = "shoal_time_to_first_token_seconds", "shoal_inter_token_latency_seconds"
PER_TOKEN, WHOLE = "shoal_time_per_output_token_seconds", "shoal_request_seconds"
STALL = "shoal_stream_stall_seconds"


ENGINE = alone(0)


@dataclass
class Bench:
    """A front end's measures."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(["dp", "tp2"], self.registry)
        self.key = "none"
        self.times = RequestTimes(self.metrics, self.clock, lambda: self.key)

    def start(self, priority: int, arrival: float) -> None:
        request = SimpleNamespace(request_id="r", priority=priority, prompt_token_ids=[1, 2, 3])
        self.times.sending(request, arrival)

    def used(self, key: str) -> tuple[float | None, ...]:
        """Return the tokens of prompts and outputs that a key has used; None: never seen."""
        name, value = "shoal_key_tokens_total", self.registry.get_sample_value
        return tuple(value(name, {"key": key, "kind": kind}) for kind in ("prompt", "output"))

    def output(
        self,
        request_id: str = "r",
        tokens: int = 1,
        unit: Unit | None = ENGINE,
        reason: FinishReason | None = None,
        after: float = 0.0,
        events: Sequence[Any] | None = None,
    ) -> None:
        self.clock.advance(after)
        output = SimpleNamespace(
            request_id=request_id, new_token_ids=[7] * tokens, finish_reason=reason, events=events
        )
        self.times.outputs(unit, [output])

    def seen(self, name: str) -> dict[tuple[str, ...], tuple[float, float]]:
        """Return count and sum of a histogram's series that have observations."""
        found: dict[tuple[str, ...], list[float]] = {}
        for metric in self.registry.collect():
            for sample in metric.samples if metric.name == name else ():
                labels = tuple(sample.labels[k] for k in sorted(sample.labels) if k != "le")
                pair = found.setdefault(labels, [0, 0])
                if sample.name.endswith("_count"):
                    pair[0] = sample.value
                if sample.name.endswith("_sum"):
                    pair[1] = sample.value
        return {labels: (n, pytest.approx(total)) for labels, (n, total) in found.items() if n}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_from_its_arrival_to_its_last_token(bench: Bench) -> None:
    bench.start(-3, arrival=99.0)
    bench.output(after=1.0)
    bench.output(after=0.2)
    bench.output(after=0.4, reason=FinishReason.LENGTH)
    assert bench.seen(FIRST) == {("dp", "urgent"): (1, 2.0)}
    assert bench.seen(BETWEEN) == {("dp", "urgent"): (2, 0.6)}
    assert bench.seen(PER_TOKEN) == {("dp", "urgent"): (1, 0.3)}
    assert bench.seen(WHOLE) == {("dp", "urgent"): (1, 2.6)}
    assert bench.seen(STALL) == {}
    assert len(bench.times) == 0


def test_vllm_counts_the_wait_since_a_request_was_sent_as_queueing(bench: Bench) -> None:
    bench.start(0, arrival=99.0)
    queued, scheduled = (
        SimpleNamespace(type=kind, timestamp=107.0)
        for kind in (EventType.QUEUED, EventType.SCHEDULED)
    )
    bench.output(events=[queued, scheduled], after=8.0)
    moved = SimpleNamespace(type=EventType.QUEUED, timestamp=109.0)
    bench.output(events=[moved], after=2.0)
    assert (queued.timestamp, scheduled.timestamp, moved.timestamp) == (100.0, 107.0, 100.0)


def test_a_single_token_has_no_time_per_token(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.output(after=0.5, reason=FinishReason.STOP)
    assert bench.seen(WHOLE) == {("dp", "normal"): (1, 0.5)}
    assert bench.seen(PER_TOKEN) == {}


def test_tokens_count_where_they_were_made_and_a_whole_request_as_mixed(bench: Bench) -> None:
    bench.start(4, arrival=100.0)
    bench.output(unit=alone(0), after=0.1)
    bench.output(unit=tp(0, 1), after=0.3)
    bench.output(unit=tp(0, 1), after=0.1, reason=FinishReason.LENGTH)
    assert bench.seen(FIRST) == {("dp", "background"): (1, 0.1)}
    assert bench.seen(BETWEEN) == {("tp2", "background"): (2, 0.4)}
    assert bench.seen(WHOLE) == {("mixed", "background"): (1, 0.5)}
    assert bench.seen(PER_TOKEN) == {("mixed", "background"): (1, 0.2)}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_request_that_was_not_answered_is_in_no_total(bench: Bench, reason: FinishReason) -> None:
    bench.start(0, arrival=100.0)
    bench.output(after=0.5)
    bench.output(tokens=0, unit=None, reason=reason, after=0.5)
    assert bench.seen(WHOLE) == bench.seen(PER_TOKEN) == bench.seen(BETWEEN) == {}
    assert len(bench.times) == 0


def test_a_refused_request_has_no_first_token(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.output(tokens=0, unit=None, reason=FinishReason.ABORT, after=0.5)
    assert bench.seen(FIRST) == {}
    assert len(bench.times) == 0


def test_a_client_that_leaves_ends_its_measure(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.output(after=0.5)
    bench.times.aborted(["r", "unknown"])
    bench.output(after=0.5, reason=FinishReason.LENGTH)
    assert bench.seen(WHOLE) == {}
    assert len(bench.times) == 0


def test_a_stop_string_ends_a_request_at_its_last_output(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.output(after=0.5)
    bench.output(after=0.5)
    bench.clock.advance(7.0)
    bench.times.finished(["r", "unknown"])
    assert bench.seen(WHOLE) == {("dp", "normal"): (1, 1.0)}


def stalled(bench: Bench, gap: float, unit: Unit | None = ENGINE) -> None:
    bench.output(unit=unit, after=gap)


def test_a_gap_of_a_second_is_a_stall_and_a_shorter_one_is_none(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.output(after=5.0)
    stalled(bench, STALL_SECONDS - 0.25)
    assert bench.seen(STALL) == {}
    stalled(bench, STALL_SECONDS)
    assert bench.seen(STALL) == {("other",): (1, STALL_SECONDS)}


@pytest.mark.parametrize(
    ("engines", "over", "cause"),
    [
        ([0, 1], True, "switch"),
        ([0, 1], False, "switch"),
        ([2, 3], True, "other"),
        ([2, 3], False, "other"),
    ],
)
def test_a_stall_in_a_switch_of_its_engines_is_the_switchs(
    bench: Bench, engines: Sequence[int], over: bool, cause: str
) -> None:
    bench.start(0, arrival=100.0)
    bench.output()
    bench.clock.advance(1.0)
    bench.times.switching(Switching(list(engines), over=False))
    if over:
        bench.times.switching(Switching(list(engines), over=True))
    stalled(bench, 1.0)
    assert bench.seen(STALL) == {(cause,): (1, 2.0)}


def test_a_switch_before_the_last_output_is_not_the_cause(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.times.switching(Switching([0, 1], over=False))
    bench.times.switching(Switching([0, 1], over=True))
    bench.output(after=1.0)
    stalled(bench, 3.0)
    assert bench.seen(STALL) == {("other",): (1, 3.0)}


def test_a_stall_of_a_moved_request_is_the_moves(bench: Bench) -> None:
    bench.start(0, arrival=100.0)
    bench.output(unit=alone(0))
    bench.times.switching(Switching([0, 1], over=False))
    stalled(bench, 2.0, unit=tp(0, 1))
    assert bench.seen(STALL) == {("moved",): (1, 2.0)}


def test_outputs_that_were_dropped_are_counted(bench: Bench) -> None:
    bench.metrics.late(2)
    bench.metrics.late(1)
    assert bench.registry.get_sample_value("shoal_late_outputs_total") == 3.0


def test_refusals_are_counted_by_reason(bench: Bench) -> None:
    bench.metrics.refused(Rejection.EXPIRED)
    bench.metrics.refused(Rejection.EXPIRED)
    counts = {
        reason: bench.registry.get_sample_value("shoal_rejected_requests_total", {"reason": reason})
        for reason in Rejection
    }
    assert counts == dict.fromkeys(Rejection, 0.0) | {Rejection.EXPIRED: 2.0}


def test_tokens_count_for_the_key_once_a_request_ends(bench: Bench) -> None:
    assert bench.used("none") == (0, 0)
    bench.key = "chat"
    bench.start(0, arrival=99.0)
    bench.key = "another"  # the context of another request
    bench.output(tokens=2)
    assert bench.used("chat") == (None, None)
    bench.output(reason=FinishReason.LENGTH)
    assert bench.used("chat") == (3, 3)
    assert bench.used("none") == (0, 0)


def test_tokens_of_a_client_that_left_count_but_not_of_a_request_that_never_ran(
    bench: Bench,
) -> None:
    bench.key = "chat"
    bench.start(0, arrival=99.0)
    bench.times.aborted(["r"])
    assert bench.used("chat") == (None, None)
    bench.start(0, arrival=99.0)
    bench.output()
    bench.times.aborted(["r"])
    assert bench.used("chat") == (3, 1)
