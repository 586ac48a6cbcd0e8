"""Options of what requests are promised, and of the cost model that policies use to keep it."""

import argparse
from argparse import Namespace
from typing import Any, Literal

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.shift import ShiftRule
from shoal.policies.values.snapshot import Target
from shoal.runtime.node.supervisor import Say
from shoal.runtime.served_weights import FP8_QUANTISATIONS, MXFP4_QUANTISATIONS
from shoal.runtime.simulation.data_sheets import all_hardware, hardware_named, name_of
from shoal.runtime.simulation.shape_files import (
    FileError,
    ShapeFile,
    built_in,
    cost_model,
    read_shape,
)
from shoal.server.errors import UserError
from shoal.server.options.urgent_options import add_urgent_option
from shoal.server.options.workload_options import add_target_option, read_objectives

UNKNOWN_GPU = "h200"
"""The hardware assumed for a GPU of which nothing is known; measured steps correct it."""
CPU_HARDWARE = "cpu-2core"
"""The hardware assumed for engines on a CPU."""
DTYPES: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}
"""The names of dtypes in shape files, by torch's names."""
WHOLE_VOCABULARY = ("GptOssForCausalLM",)
"""Architectures that are what ``ShapeFile.whole_vocabulary`` says."""


def add_promise_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--target``, ``--urgent-engines`` and the files of the cost model."""
    add_target_option(group)
    add_urgent_option(group)
    group.add_argument(
        "--cost-model-shape",
        metavar="FILE|NAME",
        help="model whose step times policies assume (default: the served one; built in: "
        f"{', '.join(built_in('shapes'))})",
    )
    group.add_argument(
        "--cost-model-hardware",
        metavar="FILE|NAME",
        help="hardware that policies assume (default: what the GPU's name says, and "
        f"{CPU_HARDWARE} for CPUs; built in: {', '.join(all_hardware())})",
    )


def promised(args: Namespace) -> tuple[Target, ...]:
    """Return what requests are promised, as policies need it: the most urgent class first."""
    return tuple(Target(o.priority, o.ttft, o.tpot) for o in read_objectives(args))


def check_cost_model_files(args: Namespace) -> None:
    """Refuse a shape or hardware file that cannot be read.

    Raises:
        UserError: the message names the option and the file.
    """
    for option, name, read in (
        ("--cost-model-shape", args.cost_model_shape, read_shape),
        ("--cost-model-hardware", args.cost_model_hardware, hardware_named),
    ):
        try:
            _ = name and read(name)
        except FileError as error:
            raise UserError(f"{option}: {error}") from None


def node_cost_model(
    args: Namespace,
    model: Any,
    cache_dtype: str,
    *,
    gpu: str | None,
    say: Say,
    max_group: int = 1,
) -> CostModel | None:
    """Return a node's cost model before any measurement; None if there can be none.

    Args:
        args: the parsed arguments.
        model: vLLM's ``ModelConfig``.
        cache_dtype: vLLM's name of the KV cache's dtype.
        gpu: the driver's name of this machine's GPUs; None on a CPU.
        say: called with the reason if there is none, and with a GPU of which nothing is known.
        max_group: members of the widest group.

    Raises:
        UserError: there can be none, but promises, a group for urgent requests or the shift need
            one, or the user gave an option of it.
    """
    shape, hardware = args.cost_model_shape, args.cost_model_hardware
    try:
        return cost_model(
            read_shape(shape) if shape else shape_of(model, cache_dtype),
            hardware_named(hardware or _hardware_of(gpu, say)),
            args.max_sp,
            args.share_weights,
            max_group,
        )
    except FileError as error:
        needed = args.target or args.urgent_engines or args.shift_threshold is ShiftRule.AUTO
        if needed or shape or hardware:
            raise UserError(f"no cost model: {error}") from error
        say(f"  no cost model: {error}")
        return None


def _hardware_of(gpu: str | None, say: Say) -> str:
    if gpu is None:
        return CPU_HARDWARE
    known = name_of(gpu)
    if known is None:
        assumed = UNKNOWN_GPU.upper()
        say(f"  nothing is known of {gpu}: taken for an {assumed} until steps are measured")
    return known or UNKNOWN_GPU


_SIZES = ("num_attention_heads", "intermediate_size")
"""Attributes read from a model's own configuration, which may lack them (BLOOM, MPT)."""


def shape_of(model: Any, cache_dtype: str) -> ShapeFile:
    """Return the shape of a model that vLLM has read.

    Quantised weights are FP8, whether the checkpoint or the user asks for it, except that GPT-OSS
    has experts in MXFP4, and that what vLLM repacks counts as what it is computed in.

    Args:
        model: vLLM's ``ModelConfig``.
        cache_dtype: vLLM's name of the KV cache's dtype.

    Raises:
        FileError: its dtype is unknown in shape files, or its configuration does not name the sizes
            in ``_SIZES``, as those of models with gated MLPs do.
    """
    text = model.hf_text_config
    own = str(model.dtype).removeprefix("torch.")
    if own not in DTYPES:
        raise FileError(f"nothing is known of dtype {own}")
    missing = [name for name in _SIZES if not hasattr(text, name)]
    if missing:
        raise FileError(f"the model's configuration has no {missing[0]}")
    dtype = DTYPES[own]
    return ShapeFile(
        layers=model.get_total_num_hidden_layers(),
        hidden=model.get_hidden_size(),
        heads=text.num_attention_heads,
        intermediate=text.intermediate_size,
        vocab=model.get_vocab_size(),
        weight_dtype="fp8" if model.quantization in FP8_QUANTISATIONS else dtype,
        kv_dtype="fp8" if cache_dtype.startswith("fp8") else dtype,
        max_model_len=model.max_model_len,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        whole_vocabulary=model.architecture in WHOLE_VOCABULARY,
        **(_latent_attention if model.use_mla else _attention)(model, text),
        **_experts_of(model, text),
    )


def _attention(model: Any, _text: Any) -> dict[str, Any]:
    return {"kv_heads": model.get_total_num_kv_heads(), "head_dim": model.get_head_size()}


def _latent_attention(model: Any, text: Any) -> dict[str, Any]:
    """Return what a shape says of latent attention (MLA), whose heads share one latent.

    A shape counts a key and a value of ``head_dim`` for each token, so each is half a latent.
    """
    hidden, heads = model.get_hidden_size(), text.num_attention_heads
    query = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
    rank = text.q_lora_rank
    latent, values = model.get_head_size(), heads * text.v_head_dim
    return {
        "kv_heads": 1,
        "head_dim": latent // 2,
        "attention_parameters": (rank * (hidden + query) if rank else hidden * query)
        + hidden * (latent + values)
        + text.kv_lora_rank * (heads * text.qk_nope_head_dim + values),
    }


def _experts_of(model: Any, text: Any) -> dict[str, Any]:
    """Return what a shape says of routed experts; configurations name it in several ways."""
    if not model.is_moe:
        return {}
    layers, size = model.get_total_num_hidden_layers(), text.intermediate_size
    expert = getattr(text, "moe_intermediate_size", None) or size
    shared = getattr(text, "shared_expert_intermediate_size", None) or (
        expert * (getattr(text, "n_shared_experts", None) or 0)
    )
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    dense |= set(range(getattr(text, "first_k_dense_replace", None) or 0))
    return {
        "experts": model.get_num_experts(),
        "experts_per_token": model.get_num_experts_per_tok(),
        "expert_intermediate": expert,
        "shared_intermediate": shared,
        "dense_layers": len(dense & set(range(layers))),
        "expert_dtype": "mxfp4" if model.quantization in MXFP4_QUANTISATIONS else "",
    }
