"""vLLM's parser of options, and vLLM's configuration, as the main process uses them."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from shoal.policies.values.layouts import Layout
from shoal.runtime.config import LayoutConfigs
from shoal.runtime.layout_configs import dp_config, layout_configs, prepare
from shoal.runtime.whole_experts import WholeExperts
from shoal.server.errors import UserError, one_line
from shoal.server.options.adapter_options import adapters_of, make_room
from shoal.server.options.image_options import images_alone
from shoal.server.options.speculation_options import check_speculation
from shoal.server.options.unsupported_models import (
    check_adapted_model,
    check_experts,
    check_kv_groups,
    check_kv_type,
    check_model_config,
    check_quantisation,
)

_NO_DEVICE = (
    "no GPU found: the installed vLLM is a build for GPUs, and its driver names none here. "
    "nvidia-smi must list one; a container needs --gpus all. On CPUs, make serve in a checkout of "
    "Shoal sets up the build for CPUs"
)


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, with one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()))


def make_parser() -> argparse.ArgumentParser:
    """Return vLLM's parser of ``vllm serve``, without Shoal's own options.

    Raises:
        UserError: vLLM finds no device that it was built for, which the defaults depend on.
    """
    if not current_platform.device_type:
        raise UserError(_NO_DEVICE)
    parser: argparse.ArgumentParser = make_arg_parser(
        _Parser(
            prog="shoal serve",
            description="Serve one model on this machine and switch between DP and TP.",
        )
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse the arguments of ``shoal serve``.

    Raises:
        UserError: they are not valid.
    """
    try:
        args = parser.parse_args(list(argv))
        validate_parsed_serve_args(args)
        load_plugins(args)
        validate_api_server_args(args)
    except (VLLMError, ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(one_line(error)) from error
    return args


def load_plugins(args: Namespace) -> None:
    """Register the user's own parsers with vLLM. Every process that uses them must call this."""
    for plugin, load in (
        (args.tool_parser_plugin, ToolParserManager.import_tool_parser),
        (args.reasoning_parser_plugin, ReasoningParserManager.import_reasoning_parser),
    ):
        if plugin:
            load(plugin)


def count_gpus() -> int:
    """Return the number of GPUs that vLLM can use, without initialising CUDA; 0 on a CPU."""
    return int(current_platform.device_count()) if current_platform.is_cuda_alike() else 0


def vllm_version() -> str:
    """Return the version of the installed vLLM."""
    return str(vllm.__version__)


def gpu_name() -> str:
    """Return the driver's name of the first GPU, without initialising CUDA."""
    return str(current_platform.get_device_name())


def gpu_memory() -> int:
    """Return the bytes of one of this machine's GPUs, by their driver."""
    return int(current_platform.get_device_total_memory())


def engine_args(args: Namespace) -> AsyncEngineArgs:
    """Return vLLM's arguments of an engine, made as ``build_async_engine_client`` makes them.

    vLLM writes some options, such as ``--reasoning-parser``, into a configuration that the result
    shares with ``args``. So they are in ``args`` too, where vLLM's application looks for them.

    Raises:
        UserError: vLLM refuses the arguments, or they ask for videos or sound.
    """
    try:
        found = prepare(AsyncEngineArgs.from_cli_args(args), args.api_server_count or 1)
    except Exception as error:  # see make_vllm_config
        raise UserError(_said(error, args.model)) from error
    found.limit_mm_per_prompt = images_alone(found.limit_mm_per_prompt)
    on_cpu = not count_gpus() and not args.fake_engine
    make_room(found, len(adapters_of(args)), on_cpu=on_cpu)
    return found


def _said(error: BaseException, model: str) -> str:
    """Return what a user reads of an error; the hub's own texts do not name the model.

    The hub's library is vLLM's dependency and none of Shoal's, so its errors are known by name
    (``huggingface_hub.errors``).
    """
    cause: BaseException | None = error
    while cause is not None:
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        if "RepositoryNotFoundError" in kinds:
            return f"{model}: the hub has no such model, or shows it to nobody without HF_TOKEN"
        if "LocalEntryNotFoundError" in kinds:
            return f"{model}: no such directory, not downloaded yet, and the hub cannot be reached"
        cause = cause.__cause__ or cause.__context__
    return one_line(error)


def make_vllm_config(engine_args: AsyncEngineArgs) -> Any:
    """Return the ``VllmConfig`` of the node, checked for what Shoal supports.

    Args:
        engine_args: see the function ``engine_args``; vLLM adds the values that it derives.

    Raises:
        UserError: vLLM refuses the arguments, or Shoal does not support this kind of model.
    """
    try:
        config = dp_config(engine_args)
    except Exception as error:  # vLLM and transformers raise every kind here
        raise UserError(_said(error, engine_args.model)) from error
    check_model_config(config.model_config)
    check_kv_groups(config)
    check_kv_type(config)
    check_experts(config)
    check_adapted_model(config)
    check_quantisation(config)
    check_speculation(config)
    return config


def make_layout_configs(
    engine_args: AsyncEngineArgs,
    vllm_config: Any,
    layouts: Sequence[Layout],
    whole: WholeExperts | None = None,
) -> LayoutConfigs:
    """Return vLLM's configuration in the form that all processes of the node are given.

    Args:
        engine_args: the arguments that ``vllm_config`` was made from.
        vllm_config: see ``make_vllm_config``.
        layouts: the layouts that engines have, DP first.
        whole: see ``NodeConfig.whole_experts``.

    Raises:
        UserError: vLLM refuses a layout.
    """
    try:
        return layout_configs(engine_args, vllm_config, layouts, whole)
    except Exception as error:  # see make_vllm_config
        raise UserError(one_line(error)) from error
