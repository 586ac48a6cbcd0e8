"""The options of ``shoal serve``: Shoal's own, and its defaults.

This module works on the parsed ``argparse.Namespace`` and does not import vLLM. ``vllm_options.py``
checks what depends on the model.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.policies.installed_policies import load_policies
from shoal.policies.registry import PolicyError
from shoal.runtime.config import (
    ENGINE_COUNTS,
    PRECOPY_TOKENS,
    SWITCH_WAIT_SECONDS,
    CarryPath,
    FakeSettings,
)
from shoal.runtime.logs import LogFormat
from shoal.server.batch.batch_options import add_batch_options, check_batch_options
from shoal.server.connections.connection_limits import (
    add_connection_options,
    check_connection_options,
)
from shoal.server.errors import UserError
from shoal.server.gate.access import add_access_options
from shoal.server.gate.bounds import DEFAULTS as DEFAULT_BOUNDS
from shoal.server.gate.bounds import add_bounds_options, check_bounds_options
from shoal.server.number_options import add_number, check_at_least, check_positive, flag_of
from shoal.server.options.certificate_options import check_certificate
from shoal.server.options.experts_option import add_experts_option
from shoal.server.options.failure_options import add_failure_options, check_failure_options
from shoal.server.options.fit_options import add_fit_options, check_fit_options
from shoal.server.options.front_end_option import front_ends
from shoal.server.options.policy_options import add_policy_option
from shoal.server.options.pool_options import add_pool_options, check_pool_options
from shoal.server.options.promise_options import (
    add_promise_options,
    check_cost_model_files,
    promised,
)
from shoal.server.options.refused_options import check_vllm_options
from shoal.server.options.sharing_options import add_sharing_options, check_share
from shoal.server.options.shift_options import add_shift_options
from shoal.server.options.speculation_options import check_speculation_options
from shoal.server.options.step_options import add_full_graph_option, add_mixed_option
from shoal.server.options.tier_option import FAKE_BLOCKS, add_tier_option, check_tier
from shoal.server.word_options import one_of

DEFAULT_HOST = "127.0.0.1"
LOOPBACK = "lo"
"""The network interface that only this machine can reach."""
DEFAULT_PORT = 8000

SHUTDOWN_SECONDS = 30
"""vLLM's own default would cut off every running request."""

DEMO_NAME = "shoal-demo"
DEMO_CHECKPOINT = Path(__file__).parents[1] / "demo" / "checkpoint"
"""The checkpoint that is served when no model is named; ``shoal.server.demo.training`` made it."""
DEMO_ENGINES = 2
DEMO_TOOL_PARSER = "hermes"
CPU_ENGINES = 2
DEMO_KV_BYTES = 64 << 20
CPU_KV_BYTES = 1 << 30
"""KV cache of an engine on a CPU, where vLLM's own default is a share of all memory."""

OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
OTLP_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
OTLP_PROTOCOLS = ("grpc", "http/protobuf")
"""The protocols that vLLM's exporter knows; the first is the default."""


def add_shoal_options(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add Shoal's own options to vLLM's parser, and change the defaults of some of vLLM's.

    Raises:
        UserError: ``PORT`` in ``environ`` is not a port.
    """
    group = parser.add_argument_group("Shoal", "How many engines, and how they may be grouped.")
    _add_layout_options(group)
    add_promise_options(group)
    add_fit_options(group, environ)
    _add_switch_options(group)
    add_failure_options(group)
    add_pool_options(group)
    _add_log_option(group)
    add_access_options(group)
    add_shift_options(group)
    add_sharing_options(group)
    add_bounds_options(group)
    add_batch_options(group)
    add_connection_options(group)
    _add_test_options(group)
    parser.set_defaults(
        host=DEFAULT_HOST,
        port=_port_of(environ),
        uvicorn_log_level="warning",
        shutdown_timeout=SHUTDOWN_SECONDS,
        h11_max_header_count=DEFAULT_BOUNDS.headers,
        h11_max_incomplete_event_size=DEFAULT_BOUNDS.header_bytes,
    )


def _add_layout_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engines",
        type=int,
        help="number of engines: 1, 2, 4 or 8 (default: the GPUs, rounded down to one of these; "
        f"{CPU_ENGINES} on a CPU)",
    )
    group.add_argument(
        "--max-group", type=int, help="largest group of engines (default: all of them)"
    )
    group.add_argument(
        "--max-pp",
        type=int,
        default=1,
        metavar="N",
        help="most pipeline stages of a group; above 1, operators may ask for groups with stages, "
        "and so does --policy batch (default: %(default)s)",
    )
    add_experts_option(group)
    add_policy_option(group)


def _add_switch_options(group: argparse._ArgumentGroup) -> None:
    number = partial(add_number, group)
    number("--prepare-timeout", 10.0, "how long an engine may take to reach a safe point")
    number(
        "--switch-wait",
        SWITCH_WAIT_SECONDS,
        "how long a switch that the policy asks for waits for requests to end, before it goes "
        "on without waiting",
    )
    group.add_argument(
        "--precopy-tokens",
        type=int,
        metavar="TOKENS",
        default=PRECOPY_TOKENS,
        help="a switch copies the KV of running requests ahead, while they go on, and what is "
        "cached of the latest ended ones, if they have so many tokens together; 0: no switch "
        "does (default: %(default)s)",
    )
    add_mixed_option(group)
    add_full_graph_option(group)
    add_tier_option(group)
    group.add_argument(
        "--carry-path",
        type=one_of(CarryPath),
        choices=tuple(CarryPath),
        default=CarryPath.AUTO,
        help="how KV goes between GPUs: auto: straight where a GPU can read the other one's "
        "memory, otherwise through the host's; host: always so (default: %(default)s)",
    )
    group.add_argument(
        "--rebalance",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="carry running requests to units that have less to do, if they gain more by that "
        "than it costs (default: on)",
    )


def _add_log_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-format",
        type=one_of(LogFormat),
        choices=tuple(LogFormat),
        default=LogFormat.TEXT,
        help="lines for people, or one JSON object per line (default: %(default)s)",
    )


def _add_test_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recording-dir",
        metavar="DIR",
        help="for benchmarks: runners record there when groups' first steps begin, and what their "
        "devices do when DIR/record says so",
    )
    group.add_argument(
        "--fake-engine",
        action="store_true",
        help="for tests: engines that run no model and make tokens up",
    )
    group.add_argument(
        "--fake-step-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="for tests: duration of a step of the fake engine (default: %(default)s)",
    )


def _port_of(environ: Mapping[str, str]) -> int:
    text = environ.get("PORT", str(DEFAULT_PORT))
    if not text.isdecimal() or int(text) > 65535:
        raise UserError(f"PORT is {text!r}: it must be a port number from 0 to 65535")
    return int(text)


def prepare_environment(environ: MutableMapping[str, str], argv: Sequence[str]) -> None:
    """Set the defaults of the environment that vLLM and its libraries read when they are imported.

    Args:
        environ: the environment, changed in place; variables that the user has set stay.
        argv: the arguments of ``shoal serve``.
    """
    # Every engine would take a VLLM_CPU_KVCACHE_SPACE that was meant for one.
    environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    defaults = {
        # Several engines share the cores: no pinning, no thread pool in each.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # vLLM's search for n-grams uses one thread, but Numba gives the process's OpenMP all cores.
        "NUMBA_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer would compile its sampler when the server starts.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # On one node, the traffic between the processes over TCP stays on this machine.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "VLLM_HOST_IP": DEFAULT_HOST,
        # A host that is asked for an image must not send the server to another one, and an image
        # takes memory: three bytes for each pixel, in the front end.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "16",
        "VLLM_MAX_IMAGE_PIXELS": str(1 << 25),
        # vLLM and torch warn of every default that does not suit the machine.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        defaults["OTEL_SERVICE_NAME"] = "shoal"
    model = _model_in(argv)
    if model is None or Path(model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        environ.setdefault(name, value)


def _model_in(argv: Sequence[str]) -> str | None:
    """Return the model named first in ``argv`` or by ``--model``, before there is a parser."""
    for position, argument in enumerate(argv):
        if argument.startswith("--model="):
            return argument.removeprefix("--model=")
        if argument == "--model" and position + 1 < len(argv):
            return argv[position + 1]
    if argv and not argv[0].startswith("-"):
        return argv[0]
    return None


def check_options(args: Namespace, default_of: Callable[[str], Any]) -> None:
    """Refuse options that Shoal does not support, and values that are not valid.

    Args:
        args: the parsed arguments.
        default_of: returns the default of an argument.

    Raises:
        UserError: the first such option; the message names it.
    """
    check_vllm_options(args, default_of)
    check_speculation_options(args)
    check_shoal_options(args)


def check_shoal_options(args: Namespace) -> None:
    """Refuse invalid values of Shoal's own options and of a few of vLLM's.

    Raises:
        UserError: the first such option; the message names it.
    """
    try:
        if args.policy is not None:
            load_policies(args.policy)
    except PolicyError as error:
        raise UserError(f"--policy: {error}") from None
    promised(args)
    check_cost_model_files(args)
    check_fit_options(args)
    check_failure_options(args)
    for name in ("engines", "max_group", "max_pp"):
        value = getattr(args, name)
        if value is not None and value not in ENGINE_COUNTS:
            raise UserError(f"{flag_of(name)} {value}: it must be one of 1, 2, 4, 8")
    check_positive(args, "prepare_timeout")
    check_at_least(args, 0, "switch_wait", "precopy_tokens", "fake_step_ms")
    check_at_least(args, 0, "mixed_step_tokens", "full_graph_tokens")
    check_at_least(args, 1, "api_server_count")
    check_pool_options(args)
    check_bounds_options(args)
    check_batch_options(args)
    check_connection_options(args)
    if args.recording_dir is not None:
        if args.fake_engine:
            raise UserError("--recording-dir: fake engines have nothing to record")
        if not Path(args.recording_dir).is_dir():
            raise UserError(f"--recording-dir {args.recording_dir}: no such directory")
    if args.fake_step_ms and not args.fake_engine:
        raise UserError("--fake-step-ms needs --fake-engine")
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: it must be from 0 to 65535")
    check_certificate(args)


def choose_tracing(args: Namespace, environ: Mapping[str, str]) -> None:
    """Fill in where traces are sent, from OpenTelemetry's environment variables.

    Args:
        args: the parsed arguments, changed in place.
        environ: the environment.

    Raises:
        UserError: traces cannot be made or sent as the options and variables ask.
    """
    args.otlp_traces_endpoint = args.otlp_traces_endpoint or environ.get(OTLP_ENDPOINT) or None
    if args.otlp_traces_endpoint is None:
        return
    if args.disable_log_stats:
        raise UserError("--otlp-traces-endpoint: traces need the statistics of --disable-log-stats")
    protocol = environ.get(OTLP_PROTOCOL)
    if protocol is not None and protocol not in OTLP_PROTOCOLS:
        raise UserError(
            f"{OTLP_PROTOCOL} is {protocol!r}: it must be {' or '.join(OTLP_PROTOCOLS)}"
        )


def check_model(model: str) -> None:
    """Refuse a model directory that does not exist or holds no model.

    A name that does not look like a path is left to vLLM, which asks the Hugging Face hub.

    Raises:
        UserError: ``model`` is a path without a model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{model}: no config.json, so no model in Hugging Face format")
    elif path.exists():
        raise UserError(f"{model}: not a directory")
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such directory")


def engines_and_group(args: Namespace, gpus: int, *, demo: bool) -> tuple[int, int]:
    """Return the number of engines and the largest group.

    Args:
        args: the parsed arguments.
        gpus: GPUs that vLLM can use; 0 on a CPU.
        demo: whether it is the demo model that is served.

    Raises:
        UserError: more engines than GPUs, or a group larger than the engines.
    """
    available = gpus or CPU_ENGINES
    if demo:
        available = min(available, DEMO_ENGINES)
    engines = args.engines or max(count for count in ENGINE_COUNTS if count <= available)
    if gpus and engines > gpus and not args.fake_engine:
        raise UserError(f"--engines {engines}: this machine has {gpus} GPUs")
    max_group = args.max_group or engines
    if max_group > engines:
        raise UserError(f"--max-group {max_group}: there are only {engines} engines")
    check_share(args.share_weights, engines)
    check_tier(args, engines)
    if args.max_pp > max_group:
        raise UserError(f"--max-pp {args.max_pp}: a group has at most {max_group} engines")
    return engines, max_group


def serves_demo(args: Namespace, default_of: Callable[[str], Any]) -> bool:
    """Return whether no model is named, so that the demo checkpoint is served.

    Args:
        args: the parsed arguments.
        default_of: returns the default of an argument.
    """
    return args.model_tag is None and args.model == default_of("model")


def model_defaults(engines: int, *, on_cpu: bool, demo: bool) -> dict[str, Any]:
    """Return the defaults that depend on the machine and the model; most replace vLLM's.

    They are set in the parser, so a value that the user gives always takes precedence.

    Args:
        engines: engines of the node.
        on_cpu: whether the engines run on a CPU.
        demo: whether the demo checkpoint is served.
    """
    defaults: dict[str, Any] = {"api_server_count": front_ends(engines, on_cpu=on_cpu)}
    if on_cpu:
        defaults |= {"kv_cache_memory_bytes": CPU_KV_BYTES, "whole_experts": "never"}
    if demo:
        defaults |= {
            "model": str(DEMO_CHECKPOINT),
            "served_model_name": [DEMO_NAME],
            "enforce_eager": True,
            "enable_auto_tool_choice": True,
            "tool_call_parser": DEMO_TOOL_PARSER,
            "kv_cache_memory_bytes": DEMO_KV_BYTES,
        }
        if on_cpu:
            defaults["dtype"] = "float32"
    return defaults


def with_chosen(args: Namespace) -> Namespace:
    """Return the arguments with the values that Shoal decides, whatever the user asks for.

    Args:
        args: the parsed arguments, changed in place.
    """
    if args.model_tag is not None:
        args.model = args.model_tag
    # vLLM accepts priorities only under this policy; requests of equal priority keep their order.
    args.scheduling_policy = "priority"
    return args


def fake_settings(
    args: Namespace, *, max_num_seqs: int, max_model_len: int, prefix_caching: bool
) -> FakeSettings | None:
    """Return the fake engine's settings, or None if real engines are asked for."""
    if not args.fake_engine:
        return None
    return FakeSettings(
        step_seconds=args.fake_step_ms / 1000,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        tier_blocks=FAKE_BLOCKS * args.kv_tier_gib,
    )
