"""What front ends make of the times they are told: spans, on a clock of the test's."""

import asyncio
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.messages import Ended, Outcome, Placed, Switching, Treatment
from shoal.runtime.protocol.messages.views import Phase, SwitchTrace, SwitchView
from shoal.runtime.protocol.wire import Event, EventType, FinishReason, PrefillStats
from shoal.server.operator.spans import Spans, Trace
from shoal.server.operator.tracing import Traces, TracingMiddleware
from tests.units import tp

WALL = 1_800_000_000
PATH = "/v1/completions"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SWITCH = "00-11111111111111111111111111111111-2222222222222222-01"

FIRST = alone(0)


class Bench:
    """A front end's traces. The times of its spans are seconds of the test's clock."""

    def __init__(self, *, exports_switches: bool = True) -> None:
        self.clock = ManualClock(100.0)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        spans = Spans(provider, self.clock, lambda: WALL * 10**9 + int(self.clock() * 1e9))
        self.traces = Traces(spans, exports_switches=exports_switches, clock=self.clock)

    def open(self, traceparent: str | None = None) -> Trace:
        headers = {} if traceparent is None else {"traceparent": traceparent}
        return self.traces.open("POST", PATH, Headers(headers))

    def start(self, name: str = "r", priority: int = 0) -> None:
        request = SimpleNamespace(request_id=name, external_req_id=f"x-{name}", priority=priority)
        self.traces.sending(request, self.clock())

    def place(self, unit: Unit = FIRST, name: str = "r", pooled: float | None = None) -> None:
        waited = (self.clock() if pooled is None else pooled, self.clock())
        self.traces.placed(Placed(name, unit, waited))

    def carry(self, unit: Unit, name: str = "r") -> None:
        self.traces.placed(Placed(name, unit))

    def output(
        self,
        unit: Unit = FIRST,
        name: str = "r",
        *,
        scheduled: float | None = None,
        reason: FinishReason | None = None,
        tokens: int = 1,
        after: float = 0.0,
    ) -> Any:
        """Take an output; the first one of a unit says when it was scheduled."""
        self.clock.advance(after)
        first = scheduled is not None
        output = SimpleNamespace(
            request_id=name,
            new_token_ids=[7] * tokens,
            finish_reason=reason,
            events=[Event(EventType.SCHEDULED, scheduled)] if scheduled is not None else None,
            prefill_stats=PrefillStats(8, 8) if first else None,
            trace_headers=None,
        )
        self.traces.outputs(unit, [output])
        return output

    def end(self, outcome: Outcome, status: int | None = None, name: str = "r") -> None:
        self.traces.ended(Ended(name, outcome, status))

    def close(self, trace: Trace, status: int | None = 200) -> None:
        trace.status = status
        self.traces.close(trace)

    def switch(
        self,
        units: list[Unit],
        *,
        over: bool,
        engines: Collection[int] = (0, 1),
        treatment: Treatment = Treatment.HARD,
        error: str | None = None,
        paused: Collection[Unit] = (),
    ) -> None:
        done = None
        phases = []
        if over:
            done = SwitchView(
                epoch=7,
                at=0.0,
                before=[(0,), (1,)],
                after=[unit.engines for unit in units],
                treatment=treatment,
                outcome="done" if error is None else "failed",
                error=error,
                duration_seconds=1.0,
                paused=1,
                resumed=0,
                drained=0,
                carried=2,
                recomputed={"no_room": 3, "unreadable": 1},
                carried_bytes=4096,
                carry_seconds=0.004,
                precopied_bytes=8192,
                precopy_seconds=0.002,
            )
            phases = [Phase("drain", tp(0, 1), self.clock() - 0.5, self.clock())]
        told = SwitchTrace(
            SWITCH, self.clock(), 7, treatment, "load", units, done, phases, list(paused)
        )
        self.traces.switching(Switching(list(engines), over, told))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def times(self) -> dict[str, list[tuple[float, float]]]:
        """Return starts and ends of all spans, by name, in the order they were made."""
        found: dict[str, list[tuple[float, float]]] = {}
        for span in self.spans:
            assert span.start_time is not None
            assert span.end_time is not None
            start, end = (t / 1e9 - WALL for t in (span.start_time, span.end_time))
            found.setdefault(span.name, []).append((round(start, 3), round(end, 3)))
        return found

    def span(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.spans if span.name == name)
        return span


@pytest.fixture
def bench() -> Bench:
    return Bench()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_on_one_unit(bench: Bench) -> None:
    trace = bench.open(TRACEPARENT)
    bench.clock.advance(0.5)
    bench.start(priority=-3)
    bench.clock.advance(1.0)
    bench.place(tp(0, 1), pooled=100.6)
    output = bench.output(tp(0, 1), scheduled=101.75, after=0.5)
    bench.output(tp(0, 1), tokens=3, reason=FinishReason.LENGTH, after=1.0)
    bench.clock.advance(0.25)
    bench.close(trace)
    assert bench.times() == {
        "pool_wait": [(100.6, 101.5)],
        "dispatch": [(101.5, 101.75)],
        "first_token": [(101.75, 102.0)],
        "decode": [(102.0, 103.0)],
        f"POST {PATH}": [(100.0, 103.25)],
    }
    root = bench.span(f"POST {PATH}")
    assert attributes(root) == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "gen_ai.usage.completion_tokens": 4,
        "shoal.priority": -3,
        "shoal.unit": "[0,1]",
        "shoal.layout": "tp2",
        "shoal.outcome": "finished",
    }
    assert root.status.status_code is StatusCode.UNSET
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}" in TRACEPARENT
    assert f"{root.parent.span_id:016x}" in TRACEPARENT
    assert root.context is not None
    # vLLM hangs its own span on what an output carries.
    assert output.trace_headers["traceparent"].split("-")[2] == f"{root.context.span_id:016x}"
    for span in bench.spans[:-1]:
        assert span.parent == root.context
        assert attributes(span)["gen_ai.request.id"] == "x-r"
        assert attributes(span)["shoal.unit"] == "[0,1]"
    assert len(bench.traces) == 0


def test_a_request_that_moves_has_spans_of_every_unit(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.place(alone(0))
    bench.output(alone(0), scheduled=100.0, tokens=2, after=1.0)
    # Back to the unit it came from, and on before that has made a token.
    bench.clock.advance(1.0)
    bench.place(alone(0), pooled=101.5)
    bench.clock.advance(1.0)
    bench.place(tp(0, 1), pooled=102.75)
    bench.output(tp(0, 1), scheduled=103.25, reason=FinishReason.STOP, after=1.0)
    bench.close(trace)
    times = bench.times()
    assert times["pool_wait"] == [(100.0, 100.0), (101.5, 102.0), (102.75, 103.0)]
    assert times["dispatch"] == [(100.0, 100.0), (102.0, 102.75), (103.0, 103.25)]
    assert times["first_token"] == [(100.0, 101.0), (103.25, 104.0)]
    root = attributes(bench.span(f"POST {PATH}"))
    assert (root["shoal.unit"], root["shoal.layout"]) == ("[0] [0,1]", "dp tp2")
    assert root["gen_ai.usage.completion_tokens"] == 3


def test_a_request_that_is_carried_has_a_span_of_every_way(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.place(alone(0))
    bench.output(alone(0), scheduled=100.0, tokens=2, after=1.0)
    bench.carry(tp(0, 1))
    bench.output(tp(0, 1), scheduled=101.25, tokens=3, after=0.5)
    bench.output(tp(0, 1), after=0.5)
    # Its first output in the next unit need not say how the prompt was computed.
    bench.carry(alone(1))
    bench.output(alone(1), after=0.5, reason=FinishReason.STOP)
    bench.close(trace)
    times = bench.times()
    assert times["pool_wait"] == [(100.0, 100.0)]
    assert times["dispatch"] == [(100.0, 100.0)]
    assert times["first_token"] == [(100.0, 101.0)]
    assert times["carry"] == [(101.0, 101.5), (102.0, 102.5)]
    assert times["decode"] == [(101.0, 101.0), (101.5, 102.0), (102.5, 102.5)]
    decodes = [attributes(span) for span in bench.spans if span.name == "decode"]
    assert [each["shoal.unit"] for each in decodes] == ["[0]", "[0,1]", "[1]"]
    assert [each["gen_ai.usage.completion_tokens"] for each in decodes] == [2, 4, 1]
    root = attributes(bench.span(f"POST {PATH}"))
    assert (root["shoal.unit"], root["shoal.layout"]) == ("[0] [0,1] [1]", "dp tp2 dp")


def test_a_request_may_be_carried_before_its_first_token_and_moved_after_it(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.place(alone(0))
    bench.carry(tp(0, 1))
    bench.output(tp(0, 1), scheduled=100.5, after=1.0)
    bench.clock.advance(1.0)
    bench.place(alone(1), pooled=101.5)
    bench.output(alone(1), scheduled=102.0, after=1.0, reason=FinishReason.STOP)
    bench.close(trace)
    times = bench.times()
    assert times["dispatch"] == [(100.0, 100.5), (102.0, 102.0)]
    assert times["first_token"] == [(100.5, 101.0), (102.0, 103.0)]
    assert "carry" not in times
    root = attributes(bench.span(f"POST {PATH}"))
    assert root["shoal.unit"] == "[0] [0,1] [1]"


def test_a_paused_request_goes_on_when_it_is_carried(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.place(alone(0))
    bench.switch([tp(0, 1)], over=False)
    bench.switch([tp(0, 1)], over=True, paused=[alone(0)])
    bench.clock.advance(2.0)
    bench.carry(tp(0, 1))
    # A switch from now on concerns it if it concerns its new unit.
    bench.switch([alone(0), alone(1)], over=False, engines=(1,))
    bench.output(tp(0, 1), scheduled=102.0, after=1.0, reason=FinishReason.STOP)
    bench.close(trace)
    assert bench.times()["paused"] == [(100.0, 102.0)]
    assert "release" in bench.times()


def test_the_controllers_word_on_an_end_counts_whenever_it_comes(bench: Bench) -> None:
    for early in (True, False):
        trace = bench.open()
        bench.start()
        bench.place()
        bench.output(scheduled=bench.clock())
        if early:
            bench.end(Outcome.LOST, 500)
        bench.output((), tokens=0, reason=FinishReason.ERROR)
        if not early:
            bench.end(Outcome.LOST, 500)
        bench.close(trace)
    roots = [span for span in bench.spans if span.kind.name == "SERVER"]
    assert [attributes(root)["shoal.outcome"] for root in roots] == ["lost", "lost"]
    assert {root.status.status_code for root in roots} == {StatusCode.ERROR}


def test_a_request_that_leaves_the_pool_unplaced_has_only_waited(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.clock.advance(2.0)
    bench.output((), tokens=0, reason=FinishReason.ABORT)
    bench.end(Outcome.EXPIRED, 504)
    bench.traces.refused("expired")
    bench.close(trace, 504)
    assert bench.times() == {"pool_wait": [(100.0, 102.0)], f"POST {PATH}": [(100.0, 102.0)]}
    root = bench.span(f"POST {PATH}")
    assert attributes(root)["shoal.outcome"] == "expired"
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "expired")


@pytest.mark.parametrize("status", [200, None])
def test_a_client_that_leaves_is_no_error(bench: Bench, status: int | None) -> None:
    trace = bench.open()
    bench.start()
    bench.place()
    bench.output(scheduled=100.0)
    bench.traces.aborted(["r"])
    bench.close(trace, status)
    root = bench.span(f"POST {PATH}")
    assert attributes(root)["shoal.outcome"] == "aborted"
    assert attributes(root).get("http.response.status_code") == status
    assert root.status.status_code is StatusCode.UNSET


def test_one_engine_request_of_several_decides_the_outcome(bench: Bench) -> None:
    trace = bench.open()
    for name in "ab":
        bench.start(name)
        bench.place(name=name)
        bench.output(name=name, scheduled=100.0)
    bench.traces.finished(["a"])
    bench.traces.aborted(["b"])
    bench.close(trace)
    assert attributes(bench.span(f"POST {PATH}"))["shoal.outcome"] == "aborted"
    names = {attributes(span).get("gen_ai.request.id") for span in bench.spans}
    assert names == {"x-a", "x-b", None}


def test_what_goes_on_in_the_background_is_traced_when_it_ends(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.close(trace)
    assert [span.name for span in bench.spans] == [f"POST {PATH}"]
    bench.place()
    bench.output(scheduled=100.0, reason=FinishReason.STOP, after=1.0)
    assert bench.times()["decode"] == [(101.0, 101.0)]
    assert len(bench.traces) == 0


def test_what_the_caller_does_not_sample_makes_no_span(bench: Bench) -> None:
    trace = bench.open(TRACEPARENT[:-1] + "0")
    bench.start()
    bench.place()
    output = bench.output(scheduled=100.0, reason=FinishReason.STOP)
    bench.close(trace)
    assert bench.spans == []
    # vLLM must not begin a trace of its own for it.
    assert output.trace_headers["traceparent"].endswith("-00")


# --- switches ---


def test_a_switch_shows_in_the_requests_it_concerns(bench: Bench) -> None:
    trace = bench.open()
    for name, unit in (("here", alone(0)), ("away", alone(2))):
        bench.start(name)
        bench.place(unit, name)
    bench.start("waits")
    bench.clock.advance(1.0)
    bench.switch([tp(0, 1), alone(2), alone(3)], over=False)
    bench.start("comes")
    bench.clock.advance(1.0)
    bench.switch([tp(0, 1), alone(2), alone(3)], over=True, paused=[alone(0)])
    bench.start("later")
    bench.clock.advance(1.0)
    for name in ("here", "away", "waits", "comes", "later"):
        bench.output(name=name, scheduled=103.0, reason=FinishReason.STOP)
    bench.close(trace)
    concerned = {attributes(s)["gen_ai.request.id"] for s in bench.spans if s.name == "bind"}
    assert concerned == {"x-here", "x-waits", "x-comes"}
    assert bench.times()["bind"] == [(101.0, 102.0)] * 3
    # Only what had its unit taken away is paused: until it ends here, for it does not come back.
    assert bench.times()["paused"] == [(102.0, 103.0)]
    for span in bench.spans:
        if span.name in ("bind", "paused"):
            (link,) = span.links
            assert (link.context.trace_id, link.context.span_id) == (
                int("1" * 32, 16),
                int("2" * 16, 16),
            )
            assert attributes(span)["shoal.switch.reason"] == "load"
            assert attributes(span)["shoal.switch.treatment"] == "hard"


def test_a_pause_ends_when_the_unit_is_back(bench: Bench) -> None:
    trace = bench.open()
    bench.start()
    bench.place(alone(0))
    bench.switch([tp(0, 1)], over=False)
    bench.switch([tp(0, 1)], over=True, paused=[alone(0)])
    # The token of a step that was in flight.
    bench.output(scheduled=100.0, after=1.0)
    bench.clock.advance(1.0)
    bench.switch([alone(0), alone(1)], over=False)
    bench.clock.advance(1.0)
    bench.switch([alone(0), alone(1)], over=True)
    bench.output(reason=FinishReason.STOP, after=1.0)
    bench.close(trace)
    assert bench.times()["paused"] == [(100.0, 103.0)]
    assert bench.times()["release"] == [(102.0, 103.0)]


@pytest.mark.parametrize("paused", [[], [alone(0)]])
@pytest.mark.parametrize("treatment", list(Treatment))
def test_what_a_switch_says_is_paused(
    bench: Bench, treatment: Treatment, paused: list[Unit]
) -> None:
    """It need not be a hard one: it may have waited for requests for too long."""
    trace = bench.open()
    bench.start()
    bench.place(alone(0))
    bench.switch([tp(0, 1)], over=False, treatment=treatment)
    bench.switch([tp(0, 1)], over=True, treatment=treatment, paused=paused)
    bench.close(trace)
    bench.traces.aborted(["r"])
    assert "bind" in bench.times()
    assert ("paused" in bench.times()) == bool(paused)


def test_a_switch_has_a_trace_of_its_own_with_the_ids_it_was_given(bench: Bench) -> None:
    bench.switch([tp(0, 1)], over=False)
    bench.clock.advance(1.0)
    bench.switch([tp(0, 1)], over=True)
    assert bench.times() == {"drain": [(100.5, 101.0)], "switch": [(100.0, 101.0)]}
    switch, drain = bench.span("switch"), bench.span("drain")
    assert switch.context is not None
    assert (switch.context.trace_id, switch.context.span_id) == (
        int("1" * 32, 16),
        int("2" * 16, 16),
    )
    assert switch.parent is None
    assert drain.parent == switch.context
    assert attributes(switch)["shoal.switch.before"] == "[0] [1]"
    assert attributes(switch)["shoal.switch.after"] == "[0,1]"
    counts = {"carried": 2, "recomputed": 4, "carried_bytes": 4096, "carry_seconds": 0.004}
    counts |= {"precopied_bytes": 8192, "precopy_seconds": 0.002}
    for name, value in counts.items():
        assert attributes(switch)[f"shoal.switch.{name}"] == value
    assert attributes(drain)["shoal.layout"] == "tp2"
    # Ids that are not given are random again.
    bench.close(bench.open())
    assert bench.span(f"POST {PATH}").context.trace_id != switch.context.trace_id  # type: ignore[union-attr]


def test_a_switch_that_failed_is_an_error(bench: Bench) -> None:
    bench.switch([tp(0, 1)], over=False)
    bench.switch([alone(0), alone(1)], over=True, error="no safe point")
    status = bench.span("switch").status
    assert (status.status_code, status.description) == (StatusCode.ERROR, "no safe point")


def test_one_front_end_exports_switches() -> None:
    bench = Bench(exports_switches=False)
    bench.switch([tp(0, 1)], over=False)
    bench.switch([tp(0, 1)], over=True)
    assert bench.spans == []


# --- the middleware ---


def statuses(bench: Bench) -> Iterator[tuple[int, StatusCode]]:
    for span in bench.spans:
        yield attributes(span)["http.response.status_code"], span.status.status_code


async def test_the_middleware_traces_generating_routes_only(bench: Bench) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/fails":
            raise RuntimeError
        status = 404 if scope["path"] == "/none" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    traced = TracingMiddleware(app, bench.traces, ("/fails", "/none", "/v1/completions"))
    transport = httpx.ASGITransport(traced, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        for path in ("/health", PATH, "/none", "/fails"):
            await http.post(path)
    assert list(statuses(bench)) == [
        (200, StatusCode.UNSET),
        (404, StatusCode.ERROR),
        (500, StatusCode.ERROR),
    ]


async def test_a_route_is_traced_behind_a_root_path_as_well(bench: Bench) -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    traced = TracingMiddleware(app, bench.traces, (PATH,))
    transport = httpx.ASGITransport(traced, root_path="/models")
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        await http.post(f"/models{PATH}")
    assert attributes(bench.span(f"POST {PATH}"))["http.route"] == PATH


async def test_concurrent_requests_keep_their_traces_apart(bench: Bench) -> None:
    async def serve(name: str) -> None:
        trace = bench.open()
        await asyncio.sleep(0)
        bench.start(name)
        await asyncio.sleep(0)
        bench.output(name=name, scheduled=100.0, reason=FinishReason.STOP)
        bench.close(trace)

    await asyncio.gather(*(asyncio.create_task(serve(name)) for name in "abc"))
    roots = {s.context.span_id for s in bench.spans if s.kind.name == "SERVER" and s.context}
    parents = [s.parent.span_id for s in bench.spans if s.name == "pool_wait" and s.parent]
    assert len(parents) == 3
    assert set(parents) == roots
