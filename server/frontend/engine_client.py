"""A front end's way to the controller and the engines: what vLLM's ``AsyncLLM`` talks to.

vLLM's client of an engine core makes three calls for every request, those with ``n > 1`` included:
``add_request_async``, in the context of its HTTP request, ``get_output_async`` and
``abort_requests_async``. The controller answers that client as if it were one engine core; what a
node needs beyond that is added around these three calls.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import IterationStats

from shoal.runtime.protocol.controller_client import ControlClient
from shoal.runtime.protocol.messages import Ended, Outcome, Stopped
from shoal.runtime.protocol.wire import RequestType, sender_of
from shoal.server.frontend.bad_outputs import BadOutputs
from shoal.server.frontend.decode_streams import shorten_prompt
from shoal.server.frontend.interruptions import Interruptions
from shoal.server.frontend.ordering import InOrder
from shoal.server.gate.placement import Placements
from shoal.server.observers import Observers

log = logging.getLogger("shoal.frontend")

MOST_ATTEMPTS = 3
"""How often a request is begun again, if its outputs are lost again and again."""
_GARBLED = "the server could not read the model's output for this request"


class EngineClient:
    """Replaces the three calls, and tells the observers what passes through them.

    Args:
        llm: calls this object from now on.
        control: the channel to the controller for everything but requests.
        placements: the HTTP requests in progress.
        observers: hear of every engine request; ``interruptions`` is added to them.
        index: number of the front end.

    Attributes:
        interruptions: requests whose engines have died.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        control: ControlClient,
        placements: Placements,
        observers: Observers,
        index: int,
    ) -> None:
        self._llm = llm
        self._states = llm.output_processor.request_states
        self._control = control
        self._placements = placements
        self._observers = observers
        self._order = InOrder(self._standing)
        self.interruptions = Interruptions(
            index,
            self._order,
            self._tokens_of,
            send=control.report,
            expect=placements.expect_again,
            count_late=observers.late,
        )
        observers.add(self.interruptions)
        self._words: set[asyncio.Future[Any]] = set()
        """Messages on their way to the controller; asyncio keeps no reference to them."""
        core = llm.engine_core
        self._send = core.add_request_async
        self._receive = core.get_output_async
        self._abort = core.abort_requests_async
        core.add_request_async = self._add_request
        core.get_output_async = self._get_output
        core.abort_requests_async = self._abort_requests
        BadOutputs(llm, self._fail, lambda: self._lose(list(self._states)))

    def is_alive(self) -> bool:
        """Return whether the link to the controller and the engines works."""
        return not self._llm.errored

    def end_with_error(self, request_ids: Sequence[str]) -> None:
        """End requests in place of a controller that does not answer, and leave it a message."""
        core, error = self._llm.engine_core, FinishReason.ERROR
        outputs = [EngineCoreOutput(name, [], finish_reason=error) for name in request_ids]
        core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=outputs))
        # Sent over the same connection as the requests, so that it arrives after them.
        word = core._send_input(RequestType.UNANSWERED, list(request_ids))
        self._words.add(sending := asyncio.ensure_future(word))
        sending.add_done_callback(self._words.discard)

    async def _add_request(self, request: Any) -> None:
        """Send an engine request, with what the task pool needs to know about it."""
        self._placements.count_in(request)
        self._observers.sending(request, self._placements.arrival)
        state = self._states.get(request.request_id)
        if state is not None:
            shorten_prompt(state.detokenizer, request.prompt_token_ids)
        try:
            await self._send(request)
        except BaseException:
            self._placements.give_up(request.request_id)
            self._observers.aborted([request.request_id])
            raise

    async def _get_output(self) -> Any:
        """Return the next message, in which the outputs of moved requests are in order."""
        # While messages are waiting, vLLM would take one after the other and let nothing else run.
        await asyncio.sleep(0)
        self.interruptions.settle()
        message = await self._receive()
        try:
            self._take(message)
        except Exception:  # vLLM's output handler would end with it, and all streams
            log.exception("outputs of a message are lost")
            self._lose([output.request_id for output in message.outputs])
            message.engine_index, message.outputs, message.scheduler_stats = 0, [], None
        return message

    def _take(self, message: Any) -> None:
        """Put the outputs of a message in order, and leave in it those that are due."""
        unit = sender_of(message.engine_index)
        message.engine_index = 0 if unit is None else unit.leader
        outputs = self._order.take(unit, self.interruptions.admit(unit, message.outputs))
        self._observers.outputs(unit, outputs)
        message.outputs = self._end_unstarted(outputs, message.timestamp)

    def _lose(self, request_ids: Sequence[str]) -> None:
        """Have requests begun again that have lost outputs, but for those that lose them always."""
        again = self.interruptions.attempts
        self._fail([name for name in request_ids if again(name) >= MOST_ATTEMPTS])
        self.interruptions.begin_again(name for name in request_ids if name in self._states)

    def _fail(self, request_ids: Sequence[str]) -> None:
        """End requests with an error, for their clients, for vLLM and for the controller."""
        processor, error = self._llm.output_processor, ValueError(_GARBLED)
        failed = [name for name in request_ids if name in self._states]
        for name in failed:
            queue = self._states[name].queue
            self._observers.ended(Ended(name, Outcome.GARBLED, 500, _GARBLED))
            with suppress(Exception):  # it makes a last output, which may be what it fails at
                processor.abort_requests([name], internal=True)
            self._order.drop(name)
            queue.put(error)
        if failed:
            self._observers.aborted(failed)
            self._control.report(Stopped(failed, Outcome.GARBLED))

    async def _abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests; requests that ended at a stop string count as finished.

        vLLM sees a stop string in the front end, in its output handler, which then aborts the
        request in the engine.
        """
        if asyncio.current_task() is self._llm.output_handler:
            self._observers.finished(request_ids)
            await self._control.stop_requests(request_ids)
        else:
            self._observers.aborted(request_ids)
            await self._abort(request_ids)

    def _standing(self, request_id: str) -> tuple[int, int] | None:
        """Return how many prompt and received output tokens a request has; None if unknown."""
        state = self._decoding(request_id)
        return None if state is None else (state.prompt_len, state.detokenizer.num_output_tokens())

    def _tokens_of(self, request_id: str) -> Sequence[int] | None:
        """Return the output tokens received for a request; None if it has ended."""
        state = self._decoding(request_id)
        return None if state is None else state.detokenizer.output_token_ids

    def _decoding(self, request_id: str) -> Any:
        """Return vLLM's state of a request whose tokens it decodes; None if there is none."""
        state = self._states.get(request_id)
        return state if state is not None and state.detokenizer is not None else None

    def _end_unstarted(self, outputs: list[Any], timestamp: float) -> list[Any]:
        """End the requests that end without a token, and return the other outputs.

        vLLM's histograms and span would take such an end for a first token.
        """
        unstarted = [out for out in outputs if not out.new_token_ids and self._is_unstarted(out)]
        if not unstarted:
            return outputs
        processor = self._llm.output_processor
        traced, processor.tracing_enabled = processor.tracing_enabled, False
        uncounted = IterationStats() if self._llm.log_stats else None
        processor.process_outputs(unstarted, timestamp, uncounted)
        processor.tracing_enabled = traced
        ended = {out.request_id for out in unstarted}
        return [out for out in outputs if out.request_id not in ended]

    def _is_unstarted(self, output: Any) -> bool:
        state = self._states.get(output.request_id) if output.finished else None
        return state is not None and state.is_prefilling
