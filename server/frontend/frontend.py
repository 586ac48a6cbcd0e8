"""The front end's process: makes its parts, connects them, serves, and closes.

This module is slow to import, because it imports vLLM. These parts are vLLM's own: the tokenizers
and chat templates, the OpenAI routes (``vllm_app.py``) and the client that speaks to an engine core
(``engine_client.py``).
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from socket import socket
from typing import Any

from shoal.runtime.logs import set_vllm_level

set_vllm_level()  # before the first import of vLLM

# ruff: noqa: E402 - see above
import uvloop
import vllm.envs as vllm_envs
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_tracer_provider
from prometheus_client.core import Metric
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import set_ulimit
from vllm.v1.executor import Executor
from vllm.v1.metrics.prometheus import get_prometheus_registry

from shoal.policies.installed_policies import load_policies
from shoal.policies.values.layouts import DP
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.layout_configs import take
from shoal.runtime.node.heartbeat import HeartbeatMonitor, heartbeat_path
from shoal.runtime.protocol.controller_client import ControlClient
from shoal.server.batch.batch_options import batch_limits
from shoal.server.batch.batch_store import BatchStore
from shoal.server.batch.list_answers import Batches
from shoal.server.batch.worker_door import WorkerDoor, door_listener, running_on
from shoal.server.connections.accepting import Tally
from shoal.server.connections.connection_limits import (
    LOOK_SECONDS,
    ConnectionLimits,
    Connections,
    prepare_listener,
)
from shoal.server.connections.http_protocol import BoundedHttpProtocol
from shoal.server.connections.http_server import DrainingServer, uvicorn_config
from shoal.server.frontend.app import AppOptions, Backstage, build_admin_app, build_metrics_app
from shoal.server.frontend.checked_llm import CheckedAsyncLLM
from shoal.server.frontend.engine_client import EngineClient
from shoal.server.frontend.grammar_queue import GrammarQueue
from shoal.server.frontend.grammars import MEMORY_BYTES as GRAMMAR_MEMORY_BYTES
from shoal.server.frontend.grammars import GrammarCheck, GrammarCompiler
from shoal.server.frontend.keepalive import LOOK_SECONDS as STREAM_LOOK_SECONDS
from shoal.server.frontend.sandbox import Sandbox
from shoal.server.frontend.vllm_app import VLLM_ROUTERS, build_vllm_app, log_no_refusals
from shoal.server.gate.access import Access
from shoal.server.gate.bounds import bounds_of
from shoal.server.gate.placement import Placements
from shoal.server.gate.pool_door import PoolDoor
from shoal.server.gate.silence import Silence
from shoal.server.observers import Observers
from shoal.server.operator.admin_server import serving
from shoal.server.operator.multiprocess_metrics import share_metrics
from shoal.server.operator.page.page_events import About
from shoal.server.operator.page.page_feed import LOOK_SECONDS as PAGE_LOOK_SECONDS
from shoal.server.operator.page.page_feed import Feed
from shoal.server.operator.request_metrics import RequestMetrics, RequestTimes
from shoal.server.operator.spans import Spans
from shoal.server.operator.tracing import Traces
from shoal.server.options.adapter_options import has_prompt_logprobs
from shoal.server.options.vllm_options import load_plugins

_WATCH_SECONDS = 0.5
"""How often overdue outputs and the controller's heartbeat are checked."""


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
        admin: the bound socket of the admin API, which only the first front end serves.
        metrics: the bound socket of the port for metrics alone, likewise.
    """

    config: NodeConfig
    index: int
    args: Namespace
    access: Access
    listener: socket
    tally: Tally
    admin: socket | None = None
    metrics: socket | None = None

    @cached_property
    def vllm_config(self) -> Any:
        """The node's ``VllmConfig``, as vLLM hands it to an API server.

        Raises:
            ConfigurationDiffersError: see ``layout_configs.take``.
        """
        config = take(self.config.vllm, DP)
        config.parallel_config._api_process_rank = self.index
        return config

    def __call__(self, ready: Callable[[], None]) -> None:
        """Serve until SIGTERM, and call ``ready`` when connections are accepted."""
        if self.config.api_servers > 1:
            share_metrics(Path(self.config.runtime_dir, "prometheus"))
        set_ulimit()
        load_plugins(self.args)  # a process that was not forked knows none
        load_policies(self.config.policy)
        compiler = GrammarCompiler(self.vllm_config)
        with Sandbox(compiler, compiler.prepare, memory_bytes=GRAMMAR_MEMORY_BYTES) as sandbox:
            queue = GrammarQueue(
                sandbox.run,
                cpu_seconds=self.args.max_grammar_seconds,
                per_caller=self.args.max_waiting_grammars,
            )
            uvloop.run(self._serve(ready, GrammarCheck(queue)))

    async def _serve(self, ready: Callable[[], None], grammars: GrammarCheck) -> None:
        config, addresses = self.config, Addresses(self.config.runtime_dir)
        observers, placements = Observers(), Placements()
        metrics = RequestMetrics([layout.name for layout in config.layouts])
        async with ControlClient(addresses, self.index, observers.take_note) as control:
            llm = self._connect(addresses, grammars, placements)
            spans = self._spans()
            try:
                client = EngineClient(llm, control, placements, observers, self.index)
                door = PoolDoor(control.count_refused, observers.refused)
                times = RequestTimes(metrics, key_name=lambda: placements.key_name)
                observers.add(placements, door, metrics, times)
                traces = None
                if spans is not None:
                    traces = Traces(spans, exports_switches=self.index == 0)
                    observers.add(traces)
                feed = Feed(control, self._about())
                observers.add(feed)
                backstage = Backstage(
                    control=control,
                    placements=placements,
                    door=door,
                    is_alive=client.is_alive,
                    registered=_registered,
                    rejected=observers.refused,
                    feed=feed,
                    vllm_routers=VLLM_ROUTERS,
                    traces=traces,
                    batches=self._batches(),
                )
                connections, scrapes, operators = (
                    Connections(self._connection_limits, metrics.cut_off) for _ in range(3)
                )
                # The controller knows this front end from here on, and can send it notes.
                await control.get_layout()
                with _calling(
                    (_WATCH_SECONDS, client.interruptions.begin_overdue_again),
                    (_WATCH_SECONDS, self._silence(door, placements, observers, client).look),
                    (STREAM_LOOK_SECONDS, backstage.streams.keep_alive),
                    (PAGE_LOOK_SECONDS, feed.look),
                    (LOOK_SECONDS, connections.end_overdue),
                    (LOOK_SECONDS, scrapes.end_overdue),
                    (LOOK_SECONDS, operators.end_overdue),
                ):
                    async with self._metrics_port(backstage, scrapes):
                        await self._serve_http(llm, backstage, connections, operators, ready)
            finally:
                llm.shutdown()
                if spans is not None:
                    spans.shut_down()

    def _silence(
        self, door: PoolDoor, placements: Placements, observers: Observers, client: EngineClient
    ) -> Silence:
        timeout = self.config.controller_timeout_seconds
        return Silence(
            HeartbeatMonitor(heartbeat_path(self.config.runtime_dir), timeout),
            timeout,
            door,
            placements,
            ended=observers.ended,
            end=client.end_with_error,
        )

    def _about(self) -> About:
        return About(
            model=self.vllm_config.model_config.served_model_name,
            engines=self.config.engines,
            max_group=self.config.max_group,
            max_pp=self.config.max_pp,
            since=time.time(),
        )

    def _batches(self) -> Batches | None:
        """Return the store of files and batches, if the node has one."""
        directory = self.args.batch_dir
        return directory and Batches(BatchStore(directory), batch_limits(self.args))

    def _spans(self) -> Spans | None:
        """Return what makes spans, if any are made; vLLM has set up how they are exported."""
        if not self.config.tracing:
            return None
        provider = get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        return Spans(provider)

    def _connect(
        self, addresses: Addresses, grammars: GrammarCheck, placements: Placements
    ) -> CheckedAsyncLLM:
        args = self.args
        llm = CheckedAsyncLLM(
            grammars,
            placements,
            args.max_image_bytes,
            vllm_config=self.vllm_config,
            executor_class=Executor.get_class(self.vllm_config),
            usage_context=UsageContext.OPENAI_API_SERVER,
            log_requests=args.enable_log_requests,
            log_stats=not args.disable_log_stats,
            client_addresses={
                "input_address": addresses.front_input(self.index),
                "output_address": addresses.front_output(self.index),
            },
            client_count=self.config.api_servers,
            client_index=self.index,
        )
        llm.count_per_engine(self.config.engines, aggregate=args.aggregate_engine_logging)
        return llm

    async def _serve_http(
        self,
        llm: CheckedAsyncLLM,
        backstage: Backstage,
        connections: Connections,
        operators: Connections,
        ready: Callable[[], None],
    ) -> None:
        args = self.args
        app = await build_vllm_app(llm, backstage, self._app_options(), args)
        # Without the cache, vLLM looks up its variables at each use, so with every output token.
        vllm_envs.enable_envs_cache()
        for listener in filter(None, (self.listener, self.admin)):
            prepare_listener(listener, self._connection_limits.client_seconds)

        def begin_to_drain() -> None:
            backstage.door.close()
            log_no_refusals()

        server = DrainingServer(
            uvicorn_config(app, args, connections.protocol),
            connections,
            ready,
            begin_to_drain,
            args.shutdown_timeout,
            share=(self.tally, self.index) if self.config.api_servers > 1 else None,
        )
        app.state.server = server  # vLLM's handlers stop it when the link to the engines breaks
        admin_app = build_admin_app(backstage, self.access, app)
        admin = uvicorn_config(admin_app, args, operators.protocol)
        async with serving(admin, self.admin), self._door(app, backstage):
            try:
                await server.serve(sockets=[self.listener])
            finally:
                backstage.feed.close()

    @asynccontextmanager
    async def _metrics_port(
        self, backstage: Backstage, connections: Connections
    ) -> AsyncIterator[None]:
        """Serve the metrics on their own port, if they have one, until the node has drained."""
        if self.metrics is not None:
            prepare_listener(self.metrics, self._connection_limits.client_seconds)
        app = build_metrics_app(backstage, self._app_options().bounds)
        config = uvicorn_config(app, self.args, connections.protocol)
        async with serving(config, self.metrics):
            yield

    @asynccontextmanager
    async def _door(self, app: FastAPI, backstage: Backstage) -> AsyncIterator[None]:
        """Let the batch worker in, if there is one."""
        if backstage.batches is None:
            yield
            return
        door = WorkerDoor(app, partial(running_on, backstage.control))
        plain = {"ssl_keyfile": None, "ssl_certfile": None, "ssl_ca_certs": None}
        args = Namespace(**{**vars(self.args), **plain, "disable_uvicorn_access_log": True})
        config = uvicorn_config(door, args, BoundedHttpProtocol)
        config.lifespan = "off"  # the application has begun already
        async with serving(config, door_listener(self.config.runtime_dir, self.index)):
            yield

    @property
    def _connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(self.args.max_connections, self.args.client_timeout)

    def _app_options(self) -> AppOptions:
        args, model = self.args, self.vllm_config.model_config
        return AppOptions(
            access=self.access,
            bounds=bounds_of(
                args,
                model.max_model_len,
                model.get_vocab_size(),
                images=model.supports_multimodal_inputs,
                prompt_logprobs=has_prompt_logprobs(
                    args, self.vllm_config.device_config.device_type
                ),
            ),
            tokenizer_info=args.enable_tokenizer_info_endpoint,
            front_ends=self.config.api_servers,
            root_path=args.root_path or "",
            allowed_origins=args.allowed_origins,
            allowed_methods=args.allowed_methods,
            allowed_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
        )


@contextmanager
def _calling(*calls: tuple[float, Callable[[], None]]) -> Iterator[None]:
    """Call each function at its interval, in seconds, for as long as the context lasts."""
    tasks = [asyncio.create_task(_every(seconds, act)) for seconds, act in calls]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _every(seconds: float, act: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        act()


def _registered() -> Iterable[Metric]:
    families: Iterable[Metric] = get_prometheus_registry().collect()
    return families
