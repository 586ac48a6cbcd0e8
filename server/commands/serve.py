"""``shoal serve``: from the command line to a running node."""

import errno
import json
import logging
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.registry import get_policy
from shoal.policies.static import MANUAL
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.runtime.clock import process_seconds
from shoal.runtime.config import FakeSettings, FitSettings, NodeConfig
from shoal.runtime.logs import LogFormat, configure_logging
from shoal.runtime.node.child_process import Target, exit_without_teardown
from shoal.runtime.node.runtime_dir import make_runtime_dir
from shoal.runtime.node.supervisor import Say, Supervisor
from shoal.server.batch.batch_options import batch_limits
from shoal.server.batch.batch_process import BatchProcess
from shoal.server.commands import early
from shoal.server.connections.accepting import Tally
from shoal.server.errors import UserError
from shoal.server.gate.access import Access, check_environment, take_access
from shoal.server.options import config_file
from shoal.server.options.adapter_options import adapters_of, check_adapter_files, check_adapters
from shoal.server.options.fit_options import node_fit
from shoal.server.options.image_options import check_images_and_layouts
from shoal.server.options.policy_options import policy_of
from shoal.server.options.pool_options import pool_settings
from shoal.server.options.promise_options import node_cost_model, promised
from shoal.server.options.serve_options import (
    add_shoal_options,
    check_model,
    check_options,
    choose_tracing,
    engines_and_group,
    fake_settings,
    model_defaults,
    prepare_environment,
    serves_demo,
    with_chosen,
)
from shoal.server.options.sharing_options import check_shared_model, settle_share, sharing_settings
from shoal.server.options.shift_options import check_shift, choose_max_sp
from shoal.server.options.speculation_options import check_speculation_and_layouts
from shoal.server.options.step_options import settle_full_graphs, step_settings
from shoal.server.options.tier_option import carry_settings
from shoal.server.options.unsupported_models import check_repacked, check_stages
from shoal.server.options.urgent_options import check_urgent

log = logging.getLogger("shoal.serve")

_KEY_HEADER = " -H 'Authorization: Bearer KEY'"


def say_aloud(line: str) -> None:
    """Tell the user something, in the node's log format."""
    log.info("%s", line)


@dataclass(frozen=True)
class ReadyNode:
    """The model and the addresses of a node that takes requests."""

    address: str
    """Base URL, without a slash at the end."""
    model: str
    """Name to ask for."""
    engines: int
    max_group: int
    needs_key: bool
    """Whether requests to this address need an API key."""
    admin: str | None
    """Base URL of the admin API, if there is one."""
    admin_needs_key: bool
    metrics: str | None = None
    """Base URL of the port for metrics alone, if there is one."""
    policy_decides: bool = False
    """Whether the policy decides the layout, so that operators cannot."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal serve`` and return the exit code.

    Raises:
        UserError: see ``run``.
    """
    if early.shows_help(argv, os.environ):
        return 0
    return run(argv, print_ready)


def run(argv: Sequence[str], on_ready: Callable[[ReadyNode], None], say: Say = say_aloud) -> int:
    """Serve until a signal or a failure, and return the exit code.

    Args:
        argv: the arguments of ``shoal serve``.
        on_ready: called once requests are taken; the node ends in order if it raises
            ``StopRequestedError``.
        say: prints a line of the start-up report.

    Raises:
        UserError: the node cannot start with these arguments, this model or this port.
    """
    with ExitStack() as sockets:
        listening = _Listening(sockets)
        known = early.known_arguments(argv, os.environ)
        if known is not None:
            listening.bind(early.check_early(known, os.environ))
            configure_logging("shoal", known.log_format, sys.stdout, prefix=False)
            say("Starting Shoal")
        asked, access = _read_all(argv)
        args = asked.args
        # Again: by now vLLM has made loggers with handlers of their own.
        configure_logging("shoal", args.log_format, sys.stdout, prefix=False)
        if known is None:
            say("Starting Shoal")
        config_file.warn_of_secrets(argv)
        say(f"  imports done after {process_seconds():.1f} s")
        listeners = listening.bind(early.bindings_of(args, access))
        for own in filter(None, (listeners.admin, listeners.metrics)):
            # Another front end may be the first to say that the node is ready. Calls of the admin
            # API must then wait for the front end that serves them, not be refused.
            own.listen()
        config = _configure(asked, say)
        say(f"  configuration done after {process_seconds():.1f} s")

        def ready() -> None:
            say(f"  ready after {process_seconds():.1f} s")
            on_ready(_describe(args, config, access, listeners))

        from shoal.server.frontend import frontend

        tally = Tally(config.api_servers)
        frontends = [
            frontend.Frontend(
                *(config, index, args, access, listeners.public, tally),
                admin=listeners.admin if index == 0 else None,
                metrics=listeners.metrics if index == 0 else None,
            )
            for index in range(config.api_servers)
        ]
        supervisor = Supervisor(
            *(config, frontends, say, args.shutdown_timeout), helpers=_helpers(args, config)
        )
        code = supervisor.run(ready)
    exit_without_teardown(code)
    return code


def _helpers(args: Namespace, config: NodeConfig) -> Mapping[str, Target]:
    """Return what the node's other processes run, by name."""
    if args.batch_dir is None:
        return {}
    return {
        "batch worker": BatchProcess(
            directory=args.batch_dir,
            runtime_dir=config.runtime_dir,
            front_ends=config.api_servers,
            models=[
                *(args.served_model_name or [args.model]),
                *(adapter.name for adapter in config.adapters),
            ],
            limits=batch_limits(args),
            line_bytes=args.max_body_bytes,
            most_waiting=args.max_waiting_requests,
        )
    }


def _read_all(argv: Sequence[str]) -> "tuple[Asked, Access]":
    """Import vLLM, and return what the command line asks for, and who may call."""
    model = config_file.named_model(argv)
    prepare_environment(os.environ, argv if model is None else [*argv, f"--model={model}"])
    from shoal.server.frontend import frontend  # noqa: F401 - slow: vLLM, and all that processes are forked with

    asked = read_options(argv)
    check_environment(os.environ)
    access = take_access(asked.args, os.environ)
    choose_tracing(asked.args, os.environ)
    if asked.args.log_format is LogFormat.JSON:
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # read by processes that are not forked
    return asked, access


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    args: Namespace
    """The arguments, with Shoal's defaults for this machine and this model."""
    gpus: int
    demo: bool
    """Whether the command line names no model, so that the demo model is served."""


def read_options(argv: Sequence[str]) -> Asked:
    """Return what the command line asks for.

    Raises:
        UserError: the command line is not valid, or asks for what Shoal does not support.
    """
    from shoal.server.options import vllm_options

    parser = vllm_options.make_parser()
    add_shoal_options(parser, os.environ)
    argv = config_file.expand(parser, argv)
    args = vllm_options.parse(parser, argv)
    check_options(args, parser.get_default)
    gpus, demo = vllm_options.count_gpus(), serves_demo(args, parser.get_default)
    engines, _ = engines_and_group(args, gpus, demo=demo)
    # Only a parser can tell a default from the same value given by the user.
    parser.set_defaults(**model_defaults(engines, on_cpu=not gpus, demo=demo))
    return Asked(with_chosen(vllm_options.parse(parser, argv)), gpus, demo)


def _configure(asked: Asked, say: Say) -> NodeConfig:
    """Return the node that the arguments describe."""
    from shoal.server.options import vllm_options

    args, gpus = asked.args, asked.gpus
    engines, max_group = engines_and_group(args, gpus, demo=asked.demo)
    adapts = (on_gpus := gpus > 0 and not args.fake_engine) and not asked.demo
    asked_for, args.policy = args.policy, policy_of(args, max_group, adapts=adapts)
    check_shift(args, [args.policy], max_group)
    check_urgent(args, [args.policy], engines, max_group)
    check_model(args.model)
    engine_args = vllm_options.engine_args(args)
    vllm_config = vllm_options.make_vllm_config(engine_args)
    settle_share(args, vllm_config, engines, vllm_options.gpu_memory() if on_gpus else 0, say)
    _settle(args, vllm_config, max_group, on_gpus=on_gpus)
    whole, layouts = args.whole_experts, _configured_layouts(args, max_group, vllm_config)
    configs = vllm_options.make_layout_configs(engine_args, vllm_config, layouts, whole)
    gpu = vllm_options.gpu_name() if gpus else None
    cost_model, fit = _costs(args, vllm_config, (engines, max_group), gpu, say)
    if cost_model is None and asked_for is None:
        args.policy = MANUAL.name  # nothing tells how fast layouts are
    return NodeConfig(
        engines=engines,
        max_group=max_group,
        policy=args.policy,
        vllm=configs,
        api_servers=args.api_server_count,
        fake=_fake_settings(args, vllm_config),
        prepare_timeout_seconds=args.prepare_timeout,
        switch_wait_seconds=args.switch_wait,
        **step_settings(args),
        **carry_settings(args),
        rebalance=args.rebalance,
        max_retries=args.max_retries,
        engine_timeout_seconds=args.engine_timeout,
        controller_timeout_seconds=args.controller_timeout,
        outage_limit_seconds=args.outage_limit,
        step_timeout_seconds=args.step_timeout,
        restart_limit=args.restart_limit,
        restart_backoff_seconds=args.restart_backoff,
        seed=args.seed or 0,
        cost_model=cost_model,
        fit=fit,
        targets=promised(args),
        urgent_engines=args.urgent_engines,
        **pool_settings(args),
        max_pp=args.max_pp,
        max_sp=args.max_sp,
        **sharing_settings(args),
        shift_threshold=args.shift_threshold,
        whole_experts=whole,
        recording_dir=args.recording_dir,
        log_format=args.log_format,
        tracing=args.otlp_traces_endpoint is not None,
        adapters=adapters_of(args),
        runtime_dir=str(make_runtime_dir()),  # last, as nothing removes it if an option is refused
    )


def _costs(
    args: Namespace, vllm_config: Any, sizes: tuple[int, int], gpu: str | None, say: Say
) -> tuple[CostModel | None, FitSettings]:
    """Return a node's cost model and fit; ``sizes``: its engines, and those of a widest group."""
    from shoal.server.options import vllm_options

    (engines, most), config, cache = sizes, vllm_config.model_config, vllm_config.cache_config
    model = node_cost_model(args, config, cache.cache_dtype, gpu=gpu, say=say, max_group=most)
    vllm = vllm_options.vllm_version()
    return node_fit(args, vllm_config, model, engines=engines, gpu=gpu, vllm=vllm, say=say)


@dataclass(frozen=True)
class Listeners:
    """The bound sockets of a node's ports; None: the node has no such port."""

    public: socket.socket
    admin: socket.socket | None
    metrics: socket.socket | None


def _settle(args: Namespace, vllm_config: Any, max_group: int, *, on_gpus: bool) -> None:
    """Choose what depends on the model, and refuse what it cannot do.

    Raises:
        UserError: the options of layouts and this model do not go together.
    """
    choose_max_sp(args, vllm_config.model_config, max_group, on_gpus=on_gpus)
    settle_full_graphs(args, has_experts=vllm_config.model_config.is_moe)
    check_adapters(args)
    if not args.fake_engine:
        check_adapter_files(args)
    check_speculation_and_layouts(args, max_group)
    check_images_and_layouts(args, vllm_config)
    check_shared_model(args.share_weights, vllm_config, max(max_group, args.share_weights))
    check_repacked(vllm_config, max_group, args.max_sp, args.max_pp, args.share_weights)


def _fake_settings(args: Namespace, vllm_config: Any) -> FakeSettings | None:
    """Return what fake engines pretend to be; None if the engines are real."""
    return fake_settings(
        args,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
    )


def _configured_layouts(args: Namespace, max_group: int, vllm_config: Any) -> tuple[Layout, ...]:
    """Return the layouts for which vLLM's configuration is needed.

    Raises:
        UserError: the model cannot have the stages that are asked for.
    """
    if args.fake_engine:
        return (DP,)
    check_stages(args.max_pp, vllm_config)
    return layouts_up_to(max_group, args.max_pp)


class _Listening:
    """The sockets that a node listens on, bound early so that a port in use is known at once."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing
        self._bindings: early.Bindings | None = None
        self._listeners: Listeners

    def bind(self, bindings: early.Bindings) -> Listeners:
        """Return the bound sockets.

        Raises:
            UserError: an address cannot be bound.
        """
        if bindings != self._bindings:
            self._closing.close()
            admin, metrics = bindings.admin, bindings.metrics
            self._listeners = Listeners(
                self._bound(*bindings.public),
                None if admin is None else self._bound(*admin),
                None if metrics is None else self._bound(*metrics),
            )
            self._bindings = bindings
        return self._listeners

    def _bound(self, host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = self._closing.enter_context(socket.socket(family, socket.SOCK_STREAM))
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            cause = "the port is in use" if in_use else (error.strerror or str(error)).lower()
            raise UserError(f"cannot listen on {host}:{port}: {cause}") from None
        return listener


def _describe(
    args: Namespace,
    config: NodeConfig,
    access: Access,
    listeners: Listeners,
) -> ReadyNode:
    scheme = "https" if args.ssl_certfile else "http"
    admin, metrics = listeners.admin, listeners.metrics
    return ReadyNode(
        address=_url(scheme, listeners.public),
        model=args.served_model_name[0] if args.served_model_name else args.model,
        engines=config.engines,
        max_group=config.max_group,
        needs_key=access.needs_key,
        admin=None if admin is None else _url(scheme, admin),
        admin_needs_key=access.admin_key_file is not None,
        metrics=None if metrics is None else _url(scheme, metrics),
        policy_decides=get_policy(config.policy).decides_layout,
    )


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def check_measurable(node: ReadyNode) -> None:
    """Refuse a node that the benchmark could not measure.

    Raises:
        UserError: the node asks for API keys, or has no admin API.
    """
    if node.needs_key or node.admin is None or node.admin_needs_key:
        raise UserError("a node that is measured takes no API keys, and has an admin API")


def print_ready(node: ReadyNode) -> None:
    """Print the node's addresses, and commands to try on it."""
    key = _KEY_HEADER if node.needs_key else ""
    chat = f'{{"model": "{node.model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    say_aloud(f"Shoal serves {node.model} on {node.address}")
    if node.admin is None:
        say_aloud("  no admin API: see --admin-port and --admin-key-file")
    else:
        say_aloud(f"  admin API on {node.admin} (open it in a browser: the live page)")
    if node.metrics is not None:
        say_aloud(f"  metrics on {node.metrics}/metrics")
    say_aloud(
        f"  try it:  curl {node.address}/v1/chat/completions{key} "
        f"-H 'Content-Type: application/json' -d '{chat}'"
    )
    for units in _switch_examples(node) if node.admin is not None else []:
        calls: list[tuple[str, Any]] = [("layout", {"units": units})]
        if node.policy_decides:  # it would refuse the operator's layout
            calls.insert(0, ("policy", {"policy": MANUAL.name}))
        say_aloud(f"  switch:  {' && '.join(_admin_call(node, *call) for call in calls)}")


def _admin_call(node: ReadyNode, route: str, body: Mapping[str, Any]) -> str:
    key = _KEY_HEADER if node.admin_needs_key else ""
    return f"curl -X POST {node.admin}/admin/{route}{key} -d '{json.dumps(body)}'"


def _switch_examples(node: ReadyNode) -> list[list[list[int]]]:
    """Return the partition with the first of the largest groups, if this node can form groups."""
    if node.max_group == 1:
        return []
    group = list(range(node.max_group))
    return [[group, *([engine] for engine in range(node.max_group, node.engines))]]
