"""vLLM's configuration of every layout: made once, in the main process, and handed to all others.

What vLLM derives from its arguments depends on its caller, the device and the environment. So each
process gets what the main process derived, and refuses to start if its own values would differ.
DP's configuration is that of ``vllm serve`` with the same options (``create_engine_config``). A
group's differs only where its size decides (``OF_THE_SIZE``). ``engine_config.py`` has what engines
add so that the layouts share weights and KV cache.
"""

import copy
import enum
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import configure_logging_if_needed
from vllm.platforms import current_platform
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.usage.usage_lib import UsageContext
from vllm.utils.import_utils import has_triton_kernels

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import Facts, LayoutConfigs
from shoal.runtime.served_weights import (
    HOPPER_MXFP4_UNIT,
    MXFP4_BACKENDS,
    MXFP4_QUANTISATIONS,
    STORED_MXFP4_UNIT,
    widest_share,
)
from shoal.runtime.whole_experts import WholeExperts

DEFAULT_BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Smallest block of the attention backends: 32 tokens on CPUs, 16 with FlashAttention."""

SEVERAL = 2
"""With so many front ends, vLLM keeps the features of images in these, and not in engines, too."""

ONLINE_BLOCK_ROWS = 128
"""Rows that share a scale where vLLM quantises in blocks as it loads."""

OF_THE_SIZE: Mapping[str, str] = {
    "instance_id": "names one VllmConfig",
    "parallel_config": "says the size",
    "cache_config.block_size": "a member holds fewer heads of more tokens in the same bytes",
    "compilation_config": "vLLM fuses collectives, which DP has none of, and sizes its graphs",
    "kernel_config": "vLLM chooses kernels by the shapes of a member's shard",
    "speculative_config.target_parallel_config": "says the size again",
    "speculative_config.draft_parallel_config": "says the size again, or is the same for n-grams",
    "speculative_config.draft_tensor_parallel_size": "says the size again",
}
"""Fields of ``VllmConfig`` (with all their parts) that may differ between a group and DP."""

OF_REQUESTS = (
    "model_config",
    "scheduler_config",
    "cache_config.cache_dtype",
    "cache_config.enable_prefix_caching",
    "structured_outputs_config",
    "reasoning_config",
)
"""Fields that affect the answers to requests. They must be the same in every layout."""


REMEMBERED = frozenset({"_supports_multimodal_inputs_cache"})
"""Attributes in which vLLM keeps an answer, once somebody has asked: no values of their own."""


class ConfigurationDiffersError(ValueError):
    """Two configurations that must agree differ; the message names the first field that does."""


def take(configs: LayoutConfigs, layout: Layout) -> VllmConfig:
    """Return a new copy of a layout's configuration.

    Raises:
        ConfigurationDiffersError: this process sees other values than the main process.
    """
    config: VllmConfig = pickle.loads(configs.pickled[layout])
    configure_logging_if_needed(config.logging_config)
    if found := next(differences(facts_of(config), configs.facts[layout]), None):
        path, here, there = found
        raise ConfigurationDiffersError(
            f"{path} is {here} in this process and {there} in the main process"
        )
    return config


def prepare(engine_args: AsyncEngineArgs, api_servers: int) -> AsyncEngineArgs:
    """Fill in those of vLLM's arguments that the node decides, and return all of them.

    Args:
        engine_args: the arguments of the command line, changed in place.
        api_servers: number of front ends.
    """
    if engine_args.block_size is None:
        engine_args.block_size = DEFAULT_BLOCK_TOKENS.get(current_platform.device_type, 16)
    # As ``vllm.entrypoints.cli.serve`` does, but never one front end: vLLM would take its engine
    # for the only one, and send the features of an image only the first time (``_get_cache_type``).
    engine_args._api_process_count = max(api_servers, SEVERAL)
    engine_args._api_process_rank = 0 if api_servers == 1 else -1
    return engine_args


def dp_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """Return what ``vllm serve`` configures; vLLM stores what it derives in ``engine_args``.

    Raises:
        Exception: vLLM refuses the arguments. It may raise any kind of exception.
    """
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def layout_configs(
    engine_args: AsyncEngineArgs,
    dp: VllmConfig,
    layouts: Sequence[Layout],
    whole: WholeExperts | None = None,
) -> LayoutConfigs:
    """Return the configurations of a node's layouts.

    Args:
        engine_args: the arguments from which ``dp_config`` made ``dp``.
        dp: the configuration of DP.
        layouts: the node's layouts, DP first.
        whole: see ``NodeConfig.whole_experts``.

    Raises:
        ConfigurationDiffersError: a group would answer requests differently from DP.
    """
    geometry = geometry_of(dp)
    configs = {DP: dp}
    for layout in layouts[1:]:
        by_number = _divides_experts(dp, layout, whole)
        tokens = geometry.block(layout).tokens
        configs[layout] = _group_config(engine_args, dp, layout, tokens, by_number=by_number)
    maybe_register_config_serialize_by_value()  # for ForkingPickler
    given = (engine_args, engine_args.compilation_config)
    sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    return LayoutConfigs(
        pickled={layout: bytes(ForkingPickler.dumps(config)) for layout, config in configs.items()},
        facts={layout: facts_of(config) for layout, config in configs.items()},
        takes_what_fits=dp.model_config.original_max_model_len == -1,
        log_stats=not engine_args.disable_log_stats,
        asynchronous_on_cpu=bool(engine_args.async_scheduling),
        sizes_are_chosen=any(getattr(of, name) is not None for of in given for name in sizes),
    )


def geometry_of(dp: VllmConfig) -> KvGeometry:
    """Return what a KV block of a model holds; ``dp`` is the configuration of DP."""
    model = dp.model_config
    # The latent of MLA is one head, however many its configuration names, and not divided.
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    return KvGeometry(model.get_total_num_hidden_layers(), heads, dp.cache_config.block_size)


def _group_config(
    engine_args: AsyncEngineArgs,
    dp: VllmConfig,
    layout: Layout,
    block_tokens: int,
    *,
    by_number: bool,
) -> VllmConfig:
    """Return vLLM's configuration for the same arguments, except how members share the model."""
    arguments = copy.copy(engine_args)
    arguments.tensor_parallel_size = layout.tp
    arguments.pipeline_parallel_size = layout.pp
    arguments.block_size = block_tokens
    arguments.enable_expert_parallel = by_number
    may_differ: tuple[str, ...] = ()
    if layout.pp > 1:
        # vLLM's V1 model runner cannot do both, and V2 learns tokens from the scheduler here
        # (``told_tokens``).
        arguments.async_scheduling = False
        may_differ = ("scheduler_config.async_scheduling", "scheduler_config.scheduler_cls")
    config = dp_config(arguments)
    for path, group, alone in differences(facts_of(config), facts_of(dp)):
        if _within(path, OF_REQUESTS) and path not in may_differ:
            raise ConfigurationDiffersError(
                f"vLLM configures {layout.name.upper()} unlike DP: "
                f"{path} is {group}, and not {alone}"
            )
    return config


def _divides_experts(dp: VllmConfig, layout: Layout, whole: WholeExperts | None) -> bool:
    """Return whether members have whole experts in all steps.

    They do if the user wants it, or if shares of each expert could be no views.
    """
    text = dp.model_config.hf_text_config
    if not dp.model_config.is_moe or layout.tp == 1:
        return False
    if whole is not None and whole.always:
        return True
    size = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    if dp.model_config.quantization in MXFP4_QUANTISATIONS:
        unit = _packed_unit(dp)
        return unit is None or -(-size // unit) < layout.tp
    return widest_share(size, _block_rows(dp), layout.tp) < layout.tp


def _packed_unit(dp: VllmConfig) -> int | None:
    """Return how many inner features of an expert in MXFP4 are divided together; None: all.

    See ``engine.kernels.mxfp4_shares``, whose units these are. Engines make sure at their start.
    """
    if current_platform.is_cpu():
        return STORED_MXFP4_UNIT
    triton = dp.kernel_config.moe_backend in ("auto", MXFP4_BACKENDS[0])
    if triton and current_platform.is_device_capability(90) and has_triton_kernels():
        return HOPPER_MXFP4_UNIT
    return None


def _block_rows(dp: VllmConfig) -> int:
    """Return how many rows of a weight share a scale; 1 where it is one or the whole weight."""
    if dp.model_config.quantization == "fp8_per_block":
        return ONLINE_BLOCK_ROWS
    schemes = getattr(dp.quant_config, "target_scheme_map", None) or {}
    blocks = [getattr(dp.quant_config, "weight_block_size", None)]
    blocks += [getattr(scheme["weights"], "block_structure", None) for scheme in schemes.values()]
    return max((block[0] for block in blocks if block), default=1)


def _within(path: str, fields: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in fields)


# --- the values of a configuration ----------------------------------------------------------------


def facts_of(config: VllmConfig) -> Facts:
    """Return all values of a configuration, and those that it derives from the environment."""
    found = dict(flat(config))
    for name in _derived(type(config)):
        try:
            value = getattr(config, name)
        except Exception as error:  # noqa: BLE001 - the failure is the value
            value = type(error).__name__
        if isinstance(value, bool | int | str):
            found[name] = repr(value)
    return found


def differences(ours: Facts, theirs: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield each path at which two configurations differ, with our value and theirs."""
    for path in sorted({*ours, *theirs}):
        pair = ours.get(path, "nothing"), theirs.get(path, "nothing")
        if pair[0] != pair[1]:
            yield (path, *pair)


def _derived(kind: type) -> list[str]:
    """Return the properties that a configuration computes again for each caller."""
    return [name for name in dir(kind) if isinstance(getattr(kind, name), property)]


def flat(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the parts of a value as text, by path; ``above`` are the objects that contain it."""
    if id(value) in above:
        return
    inside = (*above, id(value))
    parts = _parts(value)
    if parts is None:
        yield path, _text(value)
        return
    yield path, type(value).__name__
    for name, part in parts.items():
        yield from flat(part, f"{path}.{name}".removeprefix("."), inside)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Return the parts of a value by name; None if the value counts as a whole."""
    if isinstance(value, PretrainedConfig):
        return {str(name): part for name, part in value.to_dict().items()}
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(place): part for place, part in enumerate(value)}
    if isinstance(value, type | enum.Enum | torch.dtype) or not hasattr(value, "__dict__"):
        return None
    kind = type(value)
    return {
        name: part
        for name, part in vars(value).items()
        if name not in REMEMBERED and not isinstance(getattr(kind, name, None), cached_property)
    }


def _text(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
