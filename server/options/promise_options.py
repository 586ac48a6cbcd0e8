"""Options of what requests are promised, and of the cost model that policies use to keep it."""

import argparse
from argparse import Namespace
from typing import Any, Literal

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.shift import ShiftRule
from shoal.policies.values.snapshot import Target
from shoal.runtime.node.supervisor import Say
from shoal.runtime.served_weights import FP8_QUANTISATIONS
from shoal.runtime.simulation.shape_files import (
    FileError,
    ShapeFile,
    built_in,
    cost_model,
    read_hardware,
    read_shape,
)
from shoal.server.errors import UserError
from shoal.server.options.workload_options import add_target_option, read_objectives

GPU_HARDWARE = "h200"
"""The hardware assumed for GPUs unless the user names another; measured steps correct it."""
CPU_HARDWARE = "cpu-2core"
"""The hardware assumed for engines on a CPU."""
DTYPES: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}
"""The names of dtypes in shape files, by torch's names."""


def add_promise_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--target``, ``--cost-model-shape`` and ``--cost-model-hardware``."""
    add_target_option(group)
    group.add_argument(
        "--cost-model-shape",
        metavar="FILE|NAME",
        help="model whose step times policies assume (default: the served one; built in: "
        f"{', '.join(built_in('shapes'))})",
    )
    group.add_argument(
        "--cost-model-hardware",
        metavar="FILE|NAME",
        help=f"hardware that policies assume (default: {GPU_HARDWARE} for GPUs, {CPU_HARDWARE} for "
        f"CPUs; built in: {', '.join(built_in('hardware'))})",
    )


def promised(args: Namespace) -> tuple[Target, ...]:
    """Return what requests are promised, as policies need it: the most urgent class first."""
    return tuple(Target(o.priority, o.ttft, o.tpot) for o in read_objectives(args))


def node_cost_model(
    args: Namespace, model: Any, cache_dtype: str, *, gpus: int, say: Say
) -> CostModel | None:
    """Return a node's cost model before any measurement; None if there can be none.

    Args:
        args: the parsed arguments.
        model: vLLM's ``ModelConfig``.
        cache_dtype: vLLM's name of the KV cache's dtype.
        gpus: GPUs of this machine; 0 on a CPU.
        say: called with the reason if there is none.

    Raises:
        UserError: there can be none, but promises or the shift need one, or the user gave an
            option of it.
    """
    shape, hardware = args.cost_model_shape, args.cost_model_hardware
    try:
        return cost_model(
            read_shape(shape) if shape else shape_of(model, cache_dtype),
            read_hardware(hardware or (GPU_HARDWARE if gpus else CPU_HARDWARE)),
            args.max_sp,
        )
    except FileError as error:
        needed = args.target or args.shift_threshold is ShiftRule.AUTO
        if needed or shape or hardware:
            raise UserError(f"no cost model: {error}") from error
        say(f"  no cost model: {error}")
        return None


_SIZES = ("num_attention_heads", "intermediate_size")
"""Attributes read from a model's own configuration, which may lack them (BLOOM, MPT)."""


def shape_of(model: Any, cache_dtype: str) -> ShapeFile:
    """Return the shape of a model that vLLM has read.

    Weights are FP8 in every format that Shoal serves, whether the checkpoint or the user asks for
    it; a model in another format is refused elsewhere.

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
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        intermediate=text.intermediate_size,
        vocab=model.get_vocab_size(),
        weight_dtype="fp8" if model.quantization in FP8_QUANTISATIONS else dtype,
        kv_dtype="fp8" if cache_dtype.startswith("fp8") else dtype,
        max_model_len=model.max_model_len,
    )
