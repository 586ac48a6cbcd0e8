"""What passes between vLLM and the node, and who is told of it: vLLM's client is made up."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.protocol.messages import Ended, GoesOn, Interrupted, Outcome, Placed, Received
from shoal.runtime.protocol.wire import RequestType, Terms, unit_index
from shoal.server.frontend.engine_client import EngineClient
from shoal.server.gate.placement import Placements
from shoal.server.observers import Observer, Observers
from tests.units import tp


class Detokenizer:
    """What vLLM keeps of a request's output."""

    def __init__(self) -> None:
        self.output_token_ids: list[int] = []

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


class Core:
    """vLLM's client of an engine core."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        self.aborted: list[str] = []
        self.words: list[tuple[RequestType, Any]] = []
        self.broken = False

    async def add_request_async(self, request: Any) -> None:
        if self.broken:
            raise ConnectionError
        self.sent.append(request)

    async def get_output_async(self) -> Any:
        return await self.outputs_queue.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def _send_input(self, kind: RequestType, payload: Any) -> None:
        self.words.append((kind, payload))


class Processor:
    """vLLM's output processor."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.tracing_enabled = True
        self.processed: list[tuple[str, bool]] = []

    def process_outputs(self, outputs: Sequence[Any], timestamp: float, stats: Any) -> None:
        for output in outputs:
            self.processed.append((output.request_id, self.tracing_enabled))
            del self.request_states[output.request_id]


@dataclass
class Control:
    """The channel to the controller."""

    stopped: list[str] = field(default_factory=list)
    reports: list[Received | GoesOn] = field(default_factory=list)

    def report(self, message: Received | GoesOn) -> None:
        self.reports.append(message)

    async def stop_requests(self, request_ids: Sequence[str]) -> None:
        self.stopped += request_ids


class Ear(Observer):
    """Writes down what it hears of engine requests."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def sending(self, request: Any, arrival: float) -> None:
        self.heard.append(("sending", request.request_id, arrival))

    def outputs(self, unit: Any, outputs: Sequence[Any]) -> None:
        self.heard.append(("outputs", unit, [output.request_id for output in outputs]))

    def finished(self, request_ids: Sequence[str]) -> None:
        self.heard.append(("finished", *request_ids))

    def aborted(self, request_ids: Sequence[str]) -> None:
        self.heard.append(("aborted", *request_ids))

    def late(self, outputs: int) -> None:
        self.heard.append(("late", outputs))


class Front:
    """A front end whose vLLM and node are made up."""

    def __init__(self) -> None:
        self.core, self.processor = Core(), Processor()
        self.llm: Any = SimpleNamespace(
            engine_core=self.core,
            output_processor=self.processor,
            output_handler=None,
            log_stats=True,
            errored=False,
        )
        self.control: Any = Control()
        self.placements, self.ear, self.observers = Placements(lambda: 50.0), Ear(), Observers()
        self.observers.add(self.placements, self.ear)
        self.client = EngineClient(self.llm, self.control, self.placements, self.observers, index=3)

    async def send(self, name: str = "r") -> Any:
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=[1, 2], cache_salt=None, trace_headers=None
        )
        self.processor.request_states[name] = SimpleNamespace(
            detokenizer=Detokenizer(), prompt_len=2, is_prefilling=True
        )
        await self.core.add_request_async(request)
        return request

    async def receive(self, unit: Unit | None, *outputs: EngineCoreOutput) -> Any:
        index = 0 if unit is None else unit_index(unit)
        self.core.outputs_queue.put_nowait(
            SimpleNamespace(engine_index=index, outputs=list(outputs), timestamp=1.0)
        )
        return await self.core.get_output_async()


@pytest.fixture
def front() -> Front:
    return Front()


def output(
    name: str = "r",
    *tokens: int,
    reason: FinishReason | None = None,
    headers: dict[str, str] | None = None,
) -> EngineCoreOutput:
    return EngineCoreOutput(name, list(tokens), finish_reason=reason, trace_headers=headers)


async def test_a_request_takes_its_terms_tenant_and_tokens_along(front: Front) -> None:
    placement, spent = front.placements.open(), list[int]()
    placement.terms, placement.tenant = Terms(caller="ada"), "ada"
    placement.spend_tokens = spent.append
    request = await front.send()
    assert front.core.sent == [request]
    assert request.trace_headers == placement.terms.added_to({})
    assert request.cache_salt == front.placements.salt(None)
    assert spent == [2]
    assert placement.request_ids == {"r"}
    assert front.ear.heard == [("sending", "r", 50.0)]


async def test_a_request_that_is_no_ones_is_sent_as_it_is(front: Front) -> None:
    request = await front.send()
    assert (request.trace_headers, request.cache_salt) == (None, None)


async def test_a_request_that_cannot_be_sent_is_awaited_no_longer(front: Front) -> None:
    front.placements.open()
    front.core.broken = True
    with pytest.raises(ConnectionError):
        await front.send()
    assert front.placements.awaiting() == []
    assert front.ear.heard == [("sending", "r", 50.0), ("aborted", "r")]


async def test_outputs_are_those_of_the_first_engine_of_their_unit(front: Front) -> None:
    placement, spent = front.placements.open(), list[int]()
    await front.send()
    placement.spend_tokens = spent.append
    message = await front.receive(tp(2, 3), output("r", 7, 8))
    assert message.engine_index == 2
    assert [out.new_token_ids for out in message.outputs] == [[7, 8]]
    assert front.ear.heard[1:] == [("outputs", tp(2, 3), ["r"])]
    assert spent == [2]


async def test_an_end_by_the_controller_awaits_its_note(front: Front) -> None:
    front.placements.open()
    await front.send()
    front.observers.placed(Placed("r", alone(0)))
    assert front.placements.awaiting() == []
    await front.receive(None, output(reason=FinishReason.ABORT))
    assert front.placements.awaiting() == ["r"]
    front.observers.ended(Ended("r", Outcome.HANDED_BACK, 503, "the end", 1))
    assert front.placements.awaiting() == []


async def test_an_end_without_a_token_is_no_first_token(front: Front) -> None:
    for name in ("ends", "runs", "ran"):
        await front.send(name)
    front.processor.request_states["ran"].is_prefilling = False
    ends = [output(name, reason=FinishReason.ABORT) for name in ("ends", "ran")]
    message = await front.receive(alone(0), ends[0], output("runs", 7), ends[1])
    assert [out.request_id for out in message.outputs] == ["runs", "ran"]
    assert front.processor.processed == [("ends", False)]
    assert front.processor.tracing_enabled
    assert front.ear.heard[-1] == ("outputs", alone(0), ["ends", "runs", "ran"])


async def test_outputs_of_a_dead_engine_are_dropped(front: Front) -> None:
    await front.send()
    await front.receive(alone(0), output("r", 7))
    front.processor.request_states["r"].detokenizer.output_token_ids.append(7)
    front.observers.interrupted(Interrupted({"r": 1}))
    assert front.control.reports == [], "the message may not have been taken in"
    message = await front.receive(alone(0), output("r", 8))
    (report,) = front.control.reports
    assert (report.client, report.progress["r"].tokens) == (3, [7])
    assert message.outputs == []
    assert front.ear.heard[-2:] == [("late", 1), ("outputs", alone(0), [])]


async def test_a_client_that_leaves_aborts_its_request(front: Front) -> None:
    await front.core.abort_requests_async(["r"])
    assert (front.core.aborted, front.control.stopped) == (["r"], [])
    assert front.ear.heard == [("aborted", "r")]


async def test_a_stop_string_that_vllm_finds_finishes_its_request(front: Front) -> None:
    front.llm.output_handler = asyncio.create_task(front.core.abort_requests_async(["r"]))
    await front.llm.output_handler
    assert (front.core.aborted, front.control.stopped) == ([], ["r"])
    assert front.ear.heard == [("finished", "r")]


async def test_what_a_silent_controller_leaves_ends_with_an_error(front: Front) -> None:
    front.client.end_with_error(["r"])
    message = await front.core.outputs_queue.get()
    assert [(out.request_id, out.finish_reason) for out in message.outputs] == [
        ("r", FinishReason.ERROR)
    ]
    await asyncio.sleep(0)
    assert front.core.words == [(RequestType.UNANSWERED, ["r"])]


async def test_it_is_alive_until_vllm_says_otherwise(front: Front) -> None:
    assert front.client.is_alive()
    front.llm.errored = True
    assert not front.client.is_alive()


def test_vllm_counts_the_prompt_of_a_request_that_goes_to_another_unit_once() -> None:
    """The first output of every unit has these statistics; ``ordering`` reads them."""
    processor, stats = OutputProcessor(None, log_stats=True), IterationStats()
    request = EngineCoreRequest(
        "r", [1, 2, 3, 4], None, SamplingParams(max_tokens=8), None, 0.0, None, None, None
    )
    request.external_req_id = "r"
    processor.add_request(request, None)
    for token, tokens, cached in ((5, 4, 3), (6, 5, 0)):
        found = PrefillStats()
        found.set(tokens, cached, 0)
        processor.process_outputs([EngineCoreOutput("r", [token], prefill_stats=found)], 1.0, stats)
    assert stats.num_prompt_tokens == 4
    assert stats.prompt_token_stats.cached_tokens == 3
    assert processor.request_states["r"].num_cached_tokens == 3
    assert stats.num_generation_tokens == 2
