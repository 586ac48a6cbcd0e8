"""Tries how Shoal takes a model of each architecture, on layers without bytes and with no engine.

What a node does at its start is done here: the server's checks of the configuration, DP's model,
its views in a layout of two members, the groups of KV blocks, and the checks of SP.
"""

import copy
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.scheduler.kv_groups import UnservedKVGroups, check_kv_groups
from shoal.runtime.engine.sequence.ulysses import UnexchangeableAttention, check_exchangeable
from shoal.runtime.engine.weights import view_loader
from shoal.runtime.engine.weights.rules import attention
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.rules.unquantised import leave_weights_on_cpus
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.server.errors import UserError
from shoal.server.options import vllm_options
from shoal.server.options.unsupported_models import ONE_KV_GROUP
from tests.depth import among
from tests.models.architectures import config_of

MEMBERS = 2
RANKS = among([MEMBERS - 1], *range(MEMBERS - 1))
"""Members whose views are made: the last one's begin in the middle of what is divided."""


@dataclass(frozen=True)
class Outcome:
    """What became of a model of an architecture."""

    served: bool | None
    """None: it was not tried."""
    reason: str = ""
    """Why it is not served, or not tried."""
    experts: bool = False
    """Whether it has routed experts."""
    kv_groups: int = 1
    without_sp: str = ""
    """Why it cannot run by sequence; empty if it can."""
    option: str = ""
    """An option of ``shoal serve`` without which it would not be served."""


def scan(architecture: str) -> Outcome:
    """Return how Shoal takes a model of an architecture."""
    try:
        found = ModelRegistry.models[architecture].load_model_cls()
    except ImportError as error:
        return Outcome(None, f"vLLM's module for it needs {error.name}")
    ModelRegistry.register_model(architecture, found)  # or vLLM asks a process about each
    config = config_of(architecture)
    if config is None:
        seen: Any = ModelRegistry.models[architecture]
        if seen.interfaces.is_hybrid or seen.interfaces.is_attention_free:
            return Outcome(False, "a model with state-space layers")
        return Outcome(None, "neither vLLM nor Transformers has its configuration's class")
    outcome = scan_config(config)
    if outcome.served or ONE_KV_GROUP not in outcome.reason:
        return outcome
    again = scan_config(config, disable_hybrid_kv_cache_manager=True)
    return replace(again, option=ONE_KV_GROUP) if again.served else outcome


def scan_config(config: dict[str, Any], **options: Any) -> Outcome:
    """Return how Shoal takes a model with this ``config.json``, given these options of vLLM's."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        arguments = AsyncEngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            **options,
        )
        try:
            return _scan_layers(vllm_options.make_vllm_config(arguments))
        except UserError as error:
            kind, is_ours, reason = str(error).partition(f"{directory} is ")
            if kind or not is_ours:
                return Outcome(None, "vLLM refuses the configuration that Transformers has for it")
            return Outcome(False, reason.removesuffix(": not supported"))
        except (UnviewableWeights, UnservedKVGroups) as error:
            return Outcome(False, str(error))
        except AttributeError as error:
            if not isinstance(error.obj, PretrainedConfig):
                raise
            return Outcome(None, f"vLLM reads {error.name}, which Transformers' class lacks")
        except (TypeError, ValueError) as error:
            if not any(name in str(error) for name in ("CPUAttention", "CPU_ATTN")):
                raise
            return Outcome(None, "vLLM has no attention for it on CPUs")


def _scan_layers(config: VllmConfig) -> Outcome:
    dp = _make(config, 0, 1)
    store = ResidentWeights(dp.model)
    view_loader.arrange_weights(store, MEMBERS)
    for rank in RANKS:
        model = _make(config, rank, MEMBERS).model
        # vLLM absorbs matrices of latent attention once weights are there.
        absorbed = patch.object(attention, "_latent_problem", lambda _: "")
        with patch.object(view_loader, "_check_no_meta"), absorbed:
            view_loader.view_weights(model, store, Layout(tp=MEMBERS), rank)
    groups = _kv_groups(dp.config)
    return Outcome(
        served=True,
        experts=config.model_config.is_moe,
        kv_groups=len(groups),
        without_sp=_without_sp(dp.config, dp.model),
    )


@dataclass(frozen=True)
class _Made:
    config: VllmConfig
    model: nn.Module


def _make(config: VllmConfig, rank: int, degree: int) -> _Made:
    """Return one member's model; its layers' tensors have no bytes."""
    own = copy.copy(config)
    own.compilation_config = copy.deepcopy(config.compilation_config)
    own.cache_config = copy.copy(config.cache_config)
    own.cache_config.kv_cache_layout = "BLHNC"
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.tensor_parallel_size = degree
    own.quant_config = SharedWeights(views=True, inner=config.quant_config)
    with _member(rank, degree), set_default_torch_dtype(own.model_config.dtype):
        return _Made(own, initialize_model(vllm_config=own, model_config=own.model_config))


@contextmanager
def _member(rank: int, degree: int) -> Iterator[None]:
    """Let vLLM believe that this process is one of a group's; modules have its functions' names."""
    group: Any = parallel_state._TP
    former = group.rank_in_group, group.world_size
    answers = {
        "get_tensor_model_parallel_rank": lambda: rank,
        "get_tensor_model_parallel_world_size": lambda: degree,
    }
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm")]
    replaced = [
        (vars(module), name, vars(module)[name])
        for module in modules
        for name in answers
        if name in vars(module)
    ]
    group.rank_in_group, group.world_size = rank, degree
    for names, name, _ in replaced:
        names[name] = answers[name]
    try:
        yield
    finally:
        group.rank_in_group, group.world_size = former
        for names, name, function in replaced:
            names[name] = function


def _kv_groups(config: VllmConfig) -> list[Any]:
    """Return the groups of KV blocks that vLLM makes of the model's layers.

    Raises:
        UnservedKVGroups: they cannot be served together.
    """
    layers = config.compilation_config.static_forward_context.items()
    specs = {
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers
        if isinstance(layer, AttentionLayerBase)
    }
    found = {name: spec for name, spec in specs.items() if spec is not None}
    groups: list[Any] = get_kv_cache_groups(config, found)
    check_kv_groups(SimpleNamespace(kv_cache_groups=groups))
    return groups


def _without_sp(config: VllmConfig, model: nn.Module) -> str:
    try:
        check_exchangeable(config, model, reorders=False)
    except UnexchangeableAttention as error:
        return str(error).partition("cannot run by sequence: ")[2].rpartition(";")[0]
    return ""


def prepare() -> None:
    """Make this process one that can make vLLM's models; it must make nothing else afterwards."""
    leave_weights_on_cpus()
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)  # or a third of the time goes to looks at what stays
    with tempfile.NamedTemporaryFile() as meeting, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
