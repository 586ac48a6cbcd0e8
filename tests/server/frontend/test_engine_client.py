"""What passes between vLLM and the node, and who is told of it: vLLM's client is made up."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.protocol.messages import (
    Ended,
    GoesOn,
    Interrupted,
    Outcome,
    Placed,
    Received,
    Stopped,
)
from shoal.runtime.protocol.wire import RequestType, Terms, unit_index
from shoal.server.frontend.engine_client import MOST_ATTEMPTS, EngineClient
from shoal.server.gate.placement import Placements
from shoal.server.observers import Observer, Observers
from tests.units import tp

BAD = 666
"""A token that the processor fails at."""


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
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
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

    def process_outputs(self, outputs: Iterable[Any], timestamp: float, stats: Any) -> Any:
        stopped = []
        for output in outputs:
            if BAD in output.new_token_ids:
                raise ValueError("a bad output")
            self.processed.append((output.request_id, self.tracing_enabled))
            del self.request_states[output.request_id]
            if not output.finished:
                stopped.append(output.request_id)
        return SimpleNamespace(reqs_to_abort=stopped)

    def abort_requests(self, request_ids: Sequence[str], *, internal: bool) -> None:
        assert internal
        for request_id in request_ids:
            del self.request_states[request_id]
        raise ValueError("what has failed once may fail again")


@dataclass
class Control:
    """The channel to the controller."""

    stopped: list[str] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def report(self, message: Received | GoesOn | Stopped) -> None:
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
            request_id=name,
            prompt_token_ids=[1, 2],
            sampling_params=None,
            cache_salt=None,
            trace_headers=None,
        )
        self.processor.request_states[name] = SimpleNamespace(
            detokenizer=Detokenizer(), prompt_len=2, is_prefilling=True, queue=SimpleQueue()
        )
        await self.core.add_request_async(request)
        return request

    async def receive(self, unit: Unit | None, *outputs: EngineCoreOutput) -> Any:
        index = 0 if unit is None else unit_index(unit)
        self.core.outputs_queue.put_nowait(
            SimpleNamespace(engine_index=index, outputs=list(outputs), timestamp=1.0)
        )
        return await self.core.get_output_async()

    def decode(self, *outputs: EngineCoreOutput) -> EngineCoreOutputs:
        """Decode a message as vLLM's task does."""
        message = EngineCoreOutputs(unit_index(alone(0)), list(outputs), timestamp=1.0)
        decoded: EngineCoreOutputs = self.core.decoder.decode(MsgpackEncoder().encode(message))
        return decoded


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


async def test_what_cannot_be_decoded_ends_its_request(front: Front) -> None:
    placement = front.placements.open()
    for name in ("bad", "good"):
        await front.send(name)
    error = front.processor.request_states["bad"].queue
    wrong: Any = EngineCoreOutput("bad", "tokens")  # type: ignore[arg-type]
    message = front.decode(wrong, output("good", 7))
    assert [out.request_id for out in message.outputs] == ["good"]
    assert (message.engine_index, message.timestamp) == (unit_index(alone(0)), 1.0)
    assert isinstance(error.get_nowait(), ValueError)
    assert list(front.processor.request_states) == ["good"]
    assert placement.ended is not None
    assert (placement.ended.outcome, placement.ended.status) == (Outcome.GARBLED, 500)
    assert front.control.reports == [Stopped(["bad"], Outcome.GARBLED)]
    assert front.ear.heard[-1] == ("aborted", "bad")


async def test_what_the_processor_fails_at_ends_its_request(front: Front) -> None:
    """The others are processed once each, and those that a stop string has ended are aborted."""
    for name in ("stopped", "bad", "worse", "good"):
        await front.send(name)
    bad, worse = (front.processor.request_states[name].queue for name in ("bad", "worse"))
    outputs = [
        output("stopped", 7),
        output("bad", BAD),
        output("worse", BAD),
        output("good", 8, reason=FinishReason.STOP),
    ]
    processed = front.processor.process_outputs(outputs, 1.0, None)
    assert [name for name, _ in front.processor.processed] == ["stopped", "good"]
    assert processed.reqs_to_abort == ["stopped"]
    for queue in (bad, worse):
        assert isinstance(queue.get_nowait(), ValueError)
    ended = [Stopped([name], Outcome.GARBLED) for name in ("bad", "worse")]
    assert front.control.reports == ended


def test_what_fails_for_no_output_is_raised(front: Front) -> None:
    with pytest.raises(TypeError):
        front.processor.process_outputs([], 1.0, None, "nothing like it")  # type: ignore[call-arg]


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x92\x01\x07", b"\x94\x01\x91\x01\xc0\x00"])
async def test_all_requests_begin_again_when_nobody_knows_whose_outputs_are_lost(
    front: Front, garbage: bytes
) -> None:
    for name in ("a", "b"):
        await front.send(name)
    front.processor.request_states["a"].detokenizer.output_token_ids.append(7)
    assert front.core.decoder.decode([garbage]).outputs == []
    (report,) = front.control.reports
    found = {name: progress.tokens for name, progress in report.progress.items()}
    assert found == {"a": [7], "b": []}


async def test_outputs_that_cannot_be_ordered_are_lost_but_not_for_ever(front: Front) -> None:
    await front.send()
    error = front.processor.request_states["r"].queue
    await front.receive(alone(0), output("r", 7))
    front.client.interruptions.begin_again(["r"])
    for _ in range(MOST_ATTEMPTS):
        assert error.empty()
        message = await front.receive(alone(0), output(headers={"x-shoal-attempt": "no number"}))
        assert message.outputs == []
    assert isinstance(error.get_nowait(), ValueError)
    assert front.control.reports[-1] == Stopped(["r"], Outcome.GARBLED)


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
