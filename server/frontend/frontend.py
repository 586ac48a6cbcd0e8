"""The front end: vLLM's ``AsyncLLM`` and OpenAI routers in Shoal's application.

Slow to import, for it imports vLLM. vLLM's own are the tokenizers and chat templates, the OpenAI
routes and the client that speaks to an engine core; the controller answers that client as if it
were one.
"""

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from socket import socket
from typing import Any

logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
# vLLM sets its loggers up only after some of its modules have logged to the last resort, stderr.

# ruff: noqa: E402 - see above
import uvicorn
import uvloop
import vllm.envs as vllm_envs
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_tracer_provider
from prometheus_client.core import Metric
from vllm.entrypoints.anthropic.api_router import router as messages_router
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.utils.server_utils import lifespan
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.basic import router as basic_router
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize_router
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.exceptions import VLLMValidationError
from vllm.logging_utils import UvicornAccessLogFilter
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import set_ulimit
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.layout_configs import take
from shoal.runtime.logs import LogFormat
from shoal.runtime.node.heartbeat import HeartbeatMonitor, heartbeat_path
from shoal.runtime.protocol.controller_client import ControlClient
from shoal.runtime.protocol.messages import Interrupted, Note, Outcome, PoolLimits, Switching
from shoal.runtime.protocol.wire import RequestType, Terms, unit_of
from shoal.server.connections.accepting import Tally
from shoal.server.connections.connection_limits import (
    LOOK_SECONDS,
    ConnectionLimits,
    Connections,
    Cutoff,
    prepare_listener,
)
from shoal.server.connections.http_protocol import BoundedHttpProtocol
from shoal.server.connections.http_server import DrainingServer
from shoal.server.frontend.anthropic_messages import tell_errors
from shoal.server.frontend.app import AppOptions, Backstage, build_admin_app, build_app
from shoal.server.frontend.decode_streams import shorten_prompt
from shoal.server.frontend.grammar_queue import FIRST_SECONDS, GrammarQueue, QueueFullError
from shoal.server.frontend.grammars import MEMORY_BYTES as GRAMMAR_MEMORY_BYTES
from shoal.server.frontend.grammars import GrammarCheck, GrammarCompiler
from shoal.server.frontend.interruptions import Interruptions
from shoal.server.frontend.keepalive import LOOK_SECONDS as STREAM_LOOK_SECONDS
from shoal.server.frontend.ordering import InOrder
from shoal.server.frontend.sandbox import Sandbox
from shoal.server.gate.access import Access
from shoal.server.gate.bounds import BoundsError, bounds_of
from shoal.server.gate.logprob_answers import encode_large_answers
from shoal.server.gate.placement import Placements, Refused, Rejection
from shoal.server.gate.pool_door import PoolDoor
from shoal.server.gate.silence import Silence
from shoal.server.operator.admin_server import serving
from shoal.server.operator.multiprocess_metrics import share_metrics
from shoal.server.operator.request_metrics import RequestMetrics, RequestTimes
from shoal.server.operator.tracing import Traces
from shoal.server.options.vllm_options import load_plugins

VLLM_ROUTERS = (
    chat_router,
    completion_router,
    responses_router,
    messages_router,
    models_router,
    tokenize_router,
    basic_router,
)

_TASKS = ("generate",)

# vLLM's router has its route of the tokenizer's settings only once it was attached with the option.
_attached = FastAPI()
_attached.state.args = Namespace(enable_tokenizer_info_endpoint=True)
attach_tokenize_router(_attached)

_GENERATION_LOGGER = logging.getLogger("vllm.entrypoints.generate.base.serving")
"""Logs every request that ends with an error, those too that a node hands back as it ends."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a record tells of anything but a request that is refused by its own fault."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, Exception) or create_error_response(error).error.code >= 500


# It logs a traceback of every request that it refuses: any client could fill the log.
logging.getLogger("vllm.entrypoints.anthropic.api_router").addFilter(_is_ours)

_WATCH_SECONDS = 0.5
"""How often requests are looked for whose outputs are overdue, and the controller's heartbeat."""
_CUT_OFF_SECONDS = 1
"""What connections may take to end that are cut off."""


class PlacedAsyncLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's ``AsyncLLM`` whose client speaks to a controller, and to engines that regroup.

    What is added hangs on the client's three calls that every request makes, those of ``n > 1``
    included: ``add_request_async`` in the context of its HTTP request, ``get_output_async`` and
    ``abort_requests_async``.
    """

    def check_first(self, grammars: GrammarCheck, placements: Placements) -> None:
        """Add no request whose grammar these have not passed; tell why one was refused."""
        self._grammars = grammars
        self._placements = placements
        self._words: set[asyncio.Future[Any]] = set()
        """On their way to the controller; asyncio keeps no reference."""

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *rest: Any, **more: Any
    ) -> Any:
        """Add a request as vLLM does, if its grammar and its log probabilities are within bounds.

        vLLM would validate the grammar in the event loop.
        """
        constraint = getattr(params, "structured_outputs", None)
        try:
            if isinstance(prompt, dict):
                self._count_logprobs(params, len(prompt.get("prompt_token_ids") or ()))
            if constraint is not None:
                await self._grammars.check(self._placements.holder, constraint)
            return await super().add_request(request_id, prompt, params, *rest, **more)
        except VLLMValidationError as error:
            self._placements.refuse(Refused(400, str(error)))
            raise
        except QueueFullError as error:
            self._placements.refuse(Refused(429, str(error), FIRST_SECONDS))
            raise VLLMValidationError(str(error), parameter="structured_outputs") from error

    def _count_logprobs(self, params: Any, prompt_tokens: int) -> None:
        placement = self._placements.current
        if placement is not None and placement.logprobs is not None:
            try:
                placement.logprobs.take(params, prompt_tokens)
            except BoundsError as error:
                raise VLLMValidationError(str(error), parameter=error.param) from None

    def follow(self, placements: Placements, times: RequestTimes, traces: Traces | None) -> None:
        """Tell these of every request, the controller of its terms, and vLLM of its tenant."""
        send = self.engine_core.add_request_async

        async def add_request_async(request: Any) -> None:
            terms = placements.expect(request.request_id)
            placements.spend_tokens(request.request_id, len(request.prompt_token_ids or ()))
            request.cache_salt = placements.salt(request.cache_salt)
            times.start(request.request_id, request.priority, placements.arrival)
            if traces is not None:
                traces.start(request)
            if terms != Terms():
                request.trace_headers = terms.added_to(request.trace_headers)
            state = self.output_processor.request_states.get(request.request_id)
            if state is not None:
                shorten_prompt(state.detokenizer, request.prompt_token_ids)
            try:
                await send(request)
            except BaseException:
                placements.give_up(request.request_id)
                times.forget([request.request_id])
                if traces is not None:
                    traces.abort([request.request_id])
                raise

        self.engine_core.add_request_async = add_request_async

    def standing(self, request_id: str) -> tuple[int, int] | None:
        """Return a request's prompt tokens and the output tokens taken in; None if unknown."""
        state = self.output_processor.request_states.get(request_id)
        if state is None or state.detokenizer is None:
            return None
        return state.prompt_len, state.detokenizer.num_output_tokens()

    def tokens_of(self, request_id: str) -> Sequence[int] | None:
        """Return a request's output tokens that were taken in; None if it has ended."""
        state = self.output_processor.request_states.get(request_id)
        if state is None or state.detokenizer is None:
            return None
        tokens: Sequence[int] = state.detokenizer.output_token_ids
        return tokens

    def read_outputs(
        self,
        order: InOrder,
        interruptions: Interruptions,
        placements: Placements,
        times: RequestTimes,
        traces: Traces | None,
    ) -> None:
        """Take the outputs of requests that have moved in order; time and count them."""
        receive = self.engine_core.get_output_async

        async def get_output_async() -> Any:
            # Where messages are waiting, vLLM takes one after the other and lets nothing else run.
            await asyncio.sleep(0)
            interruptions.settle()
            message = await receive()
            unit = unit_of(message.engine_index)
            message.engine_index = 0 if unit is None else unit.leader
            if unit is None:
                for output in message.outputs:
                    placements.expect_end(output.request_id)
            outputs = order.take(unit, interruptions.admit(unit, message.outputs))
            if traces is not None:
                traces.take(unit, outputs)
            _queue_from_here(outputs, times)
            times.take(unit, outputs)
            for output in outputs:
                placements.spend_tokens(output.request_id, len(output.new_token_ids))
            message.outputs = self._take_unstarted(outputs, message.timestamp)
            return message

        self.engine_core.get_output_async = get_output_async

    def _take_unstarted(self, outputs: Sequence[Any], timestamp: float) -> list[Any]:
        """End the requests that end without a token, and return the other outputs.

        vLLM would take such an end for a first token, in its histograms and its span.
        """
        states, rest = self.output_processor.request_states, []
        traced, self.output_processor.tracing_enabled = self.output_processor.tracing_enabled, False
        for output in outputs:
            ends = not output.new_token_ids and output.finished
            state = states.get(output.request_id) if ends else None
            if state is not None and state.is_prefilling:
                uncounted = IterationStats() if self.log_stats else None
                self.output_processor.process_outputs([output], timestamp, uncounted)
            else:
                rest.append(output)
        self.output_processor.tracing_enabled = traced
        return rest

    def end_with_error(self, request_ids: Sequence[str]) -> None:
        """End requests as the controller would, which does not answer; it is left word of it."""
        error = FinishReason.ERROR
        outputs = [EngineCoreOutput(name, [], finish_reason=error) for name in request_ids]
        self.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=outputs))
        # The same way as the requests, so that it arrives after them.
        word = self.engine_core._send_input(RequestType.UNANSWERED, list(request_ids))
        self._words.add(sending := asyncio.ensure_future(word))
        sending.add_done_callback(self._words.discard)

    def tell_ends(self, control: ControlClient, times: RequestTimes, traces: Traces | None) -> None:
        """Have a request count as finished, not as aborted, that ended at a stop string.

        vLLM sees these in the front end, in its output handler, which aborts them in the engine.
        """
        abort = self.engine_core.abort_requests_async

        async def abort_requests_async(request_ids: list[str]) -> None:
            if asyncio.current_task() is self.output_handler:
                times.finish(request_ids)
                if traces is not None:
                    traces.finish(request_ids)
                await control.stop_requests(request_ids)
            else:
                times.forget(request_ids)
                if traces is not None:
                    traces.abort(request_ids)
                await abort(request_ids)

        self.engine_core.abort_requests_async = abort_requests_async

    def count_per_engine(self, engines: int, *, aggregate: bool) -> None:
        """Label metrics with the engine whose unit ran a step, not as of one engine core.

        Args:
            engines: number of engines.
            aggregate: whether vLLM's log lines of them are one.
        """
        if self.log_stats:
            self.logger_manager: Any = StatLoggerManager(
                vllm_config=self.vllm_config,
                engine_idxs=list(range(engines)),
                client_count=self._client_count,
                aggregate_engine_logging=aggregate,
            )
            self.logger_manager.log_engine_initialized()
            for engine in range(engines):  # prometheus_client hides gauges that were never set
                self.logger_manager.record(SchedulerStats(), None, engine_idx=engine)
            # The output handler runs already, and looks here for the loggers.
            self._logger_ref[0] = self.logger_manager


def _hide_directory(models: Any, model: str) -> None:
    """Have ``/v1/models`` say of a model in a directory what it is called, not where it is."""
    for served in models.base_model_paths if Path(model).exists() else ():
        served.model_path = served.name


def _queue_from_here(outputs: Iterable[Any], times: RequestTimes) -> None:
    """Have vLLM count the wait in the task pool as queueing, and a moved request's once."""
    for output in outputs:
        for event in output.events or ():
            sent = times.sent(output.request_id)
            if event.type == EngineCoreEventType.QUEUED and sent is not None:
                event.timestamp = sent


@dataclass(frozen=True)
class Frontend:
    """One front-end process: what ``shoal.runtime.node.child_process.Child`` runs. Picklable.

    Attributes:
        config: the node.
        index: number of this front end.
        args: the parsed arguments of ``shoal serve``.
        access: who may call.
        listener: the bound socket that all front ends share.
        tally: the connections that each of them has accepted from it.
        admin: that of the admin API, which the first of them serves.
    """

    config: NodeConfig
    index: int
    args: Namespace
    access: Access
    listener: socket
    tally: Tally
    admin: socket | None = None

    @cached_property
    def vllm_config(self) -> Any:
        """The node's ``VllmConfig``, as vLLM hands it to an API server.

        Raises:
            ConfigurationDiffersError: see ``layout_configs.take``.
        """
        config = take(self.config.vllm, 1)
        config.parallel_config._api_process_rank = self.index
        return config

    def __call__(self, ready: Callable[[], None]) -> None:
        """Serve until SIGTERM. Calls ``ready`` when connections are accepted."""
        if self.config.api_servers > 1:
            share_metrics(Path(self.config.runtime_dir, "prometheus"))
        set_ulimit()
        load_plugins(self.args)  # a process that was not forked knows none
        compiler = GrammarCompiler(self.vllm_config)
        with Sandbox(compiler, compiler.prepare, memory_bytes=GRAMMAR_MEMORY_BYTES) as sandbox:
            queue = GrammarQueue(
                sandbox.run,
                cpu_seconds=self.args.max_grammar_seconds,
                per_caller=self.args.max_waiting_grammars,
            )
            uvloop.run(self._serve(ready, GrammarCheck(queue)))

    async def _serve(self, ready: Callable[[], None], grammars: GrammarCheck) -> None:
        placements = Placements()
        addresses = Addresses(self.config.runtime_dir)
        layouts = [layout.name for layout in self.config.layouts]
        metrics = RequestMetrics(layouts)
        times = RequestTimes(metrics)

        def take_note(note: Note) -> None:
            match note:
                case PoolLimits():
                    door.update(note)
                case Switching():
                    times.note(note)
                case Interrupted():
                    interruptions.take_note(note)
                case _:
                    placements.take(note)
            if traces is not None:
                traces.take_note(note)

        def reject(reason: Rejection) -> None:
            metrics.reject(reason)
            if traces is not None:
                traces.refuse(reason)

        async def refused(outcome: Outcome) -> None:
            reject(Rejection(outcome))
            await control.count_refused(outcome)

        async with ControlClient(addresses, self.index, take_note) as control:
            door = PoolDoor(refused)
            engine = self._connect(addresses)
            order = InOrder(engine.standing)
            interruptions = Interruptions(
                self.index,
                order,
                engine.tokens_of,
                send=control.report,
                expect=placements.expect_again,
                count_late=metrics.late_outputs.inc,
            )
            traces = self._traces()
            backstage = Backstage(
                control=control,
                placements=placements,
                door=door,
                is_alive=lambda: not engine.errored,
                registered=_registered,
                rejected=reject,
                vllm_routers=VLLM_ROUTERS,
                traces=traces,
            )
            try:
                engine.check_first(grammars, placements)
                engine.follow(placements, times, traces)
                engine.read_outputs(order, interruptions, placements, times, traces)
                engine.tell_ends(control, times, traces)
                engine.count_per_engine(
                    self.config.engines, aggregate=self.args.aggregate_engine_logging
                )
                # The controller knows this front end from here on, and can send it notes.
                await control.get_layout()
                silence = self._silence(door, placements, take_note, engine)
                tasks = [
                    asyncio.create_task(_every(seconds, act))
                    for seconds, act in (
                        (_WATCH_SECONDS, interruptions.begin_overdue_again),
                        (_WATCH_SECONDS, silence.look),
                        (STREAM_LOOK_SECONDS, backstage.streams.keep_alive),
                    )
                ]
                await self._serve_http(engine, backstage, metrics.cut_off, ready)
                for task in tasks:
                    task.cancel()
            finally:
                engine.shutdown()
                if traces is not None:
                    traces.shut_down()

    def _silence(
        self,
        door: PoolDoor,
        placements: Placements,
        take_note: Callable[[Note], None],
        engine: PlacedAsyncLLM,
    ) -> Silence:
        timeout = self.config.controller_timeout_seconds
        return Silence(
            HeartbeatMonitor(heartbeat_path(self.config.runtime_dir), timeout),
            timeout,
            door,
            placements,
            take_note=take_note,
            end=engine.end_with_error,
        )

    def _traces(self) -> Traces | None:
        """Return the traces, if there are to be any; vLLM has set up how spans are exported."""
        if not self.config.tracing:
            return None
        provider = get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        return Traces(provider, exports_switches=self.index == 0)

    def _connect(self, addresses: Addresses) -> PlacedAsyncLLM:
        engine: PlacedAsyncLLM = PlacedAsyncLLM.from_vllm_config(
            self.vllm_config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=self.args.enable_log_requests,
            disable_log_stats=self.args.disable_log_stats,
            client_addresses={
                "input_address": addresses.front_input(self.index),
                "output_address": addresses.front_output(self.index),
            },
            client_count=self.config.api_servers,
            client_index=self.index,
        )
        return engine

    async def _serve_http(
        self,
        engine: PlacedAsyncLLM,
        backstage: Backstage,
        cut_off: Callable[[Cutoff], None],
        ready: Callable[[], None],
    ) -> None:
        app = build_app(backstage, self._app_options(), lifespan)
        if self.args.enable_request_id_headers:
            app.add_middleware(XRequestIdMiddleware)
        init_exception_handler(app)
        await init_app_state(engine, app.state, self.args, _TASKS)
        _hide_directory(app.state.openai_serving_models, self.args.model)
        _complete_serving(app.state)
        # Before, each is looked up in the environment at each use: with every output token.
        vllm_envs.enable_envs_cache()
        _leave_out_of_the_access_log(self.args.disable_access_log_for_endpoints)
        limits = ConnectionLimits(self.args.max_connections, self.args.client_timeout)
        connections = Connections(limits, cut_off)
        prepare_listener(self.listener, limits.client_seconds)

        def begin_to_drain() -> None:
            backstage.door.close()
            _GENERATION_LOGGER.setLevel(logging.CRITICAL)

        server = DrainingServer(
            _uvicorn_config(app, self.args, connections.protocol),
            connections,
            ready,
            begin_to_drain,
            self.args.shutdown_timeout,
            share=(self.tally, self.index) if self.config.api_servers > 1 else None,
        )
        app.state.server = server  # vLLM's handlers stop it when the link to the engines breaks
        admin_app = build_admin_app(backstage, self.access)
        watching = asyncio.create_task(_every(LOOK_SECONDS, connections.end_overdue))
        async with serving(_uvicorn_config(admin_app, self.args, BoundedHttpProtocol), self.admin):
            await server.serve(sockets=[self.listener])
        watching.cancel()

    def _app_options(self) -> AppOptions:
        args, model = self.args, self.vllm_config.model_config
        return AppOptions(
            access=self.access,
            bounds=bounds_of(args, model.max_model_len, model.get_vocab_size()),
            tokenizer_info=args.enable_tokenizer_info_endpoint,
            front_ends=self.config.api_servers,
            root_path=args.root_path or "",
            allowed_origins=args.allowed_origins,
            allowed_methods=args.allowed_methods,
            allowed_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
        )


def _complete_serving(state: Any) -> None:
    """Wrap what vLLM's serving classes do in the event loop, or tell wrongly."""
    encode_large_answers(state)
    messages = state.anthropic_serving_messages
    messages.message_stream_converter = tell_errors(messages.message_stream_converter)


async def _every(seconds: float, act: Callable[[], None]) -> None:
    """Call ``act`` again and again, for ever."""
    while True:
        await asyncio.sleep(seconds)
        act()


def _leave_out_of_the_access_log(paths: str | None) -> None:
    """Leave requests for these paths, separated by commas, out of uvicorn's access log."""
    left_out = [path.strip() for path in (paths or "").split(",") if path.strip()]
    if left_out:
        logging.getLogger("uvicorn.access").addFilter(UvicornAccessLogFilter(left_out))


def _uvicorn_config(app: FastAPI, args: Namespace, protocol: Any) -> uvicorn.Config:
    as_json = args.log_format is LogFormat.JSON
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None if as_json else uvicorn.config.LOGGING_CONFIG,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=vllm_envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=_CUT_OFF_SECONDS,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or "TLSv1",
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
    )


def _registered() -> Iterable[Metric]:
    families: Iterable[Metric] = get_prometheus_registry().collect()
    return families
