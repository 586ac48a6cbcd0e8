"""Small random checkpoints of families whose models Transformers makes.

Each has what real ones have: windows in some layers, norms, biases, scales. Weights are drawn as
``tests.random_checkpoint`` draws them, so that greedy output varies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import random_checkpoint as drawn
from tests.random_checkpoint import CheckpointSpec, write_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 48
SPEC = CheckpointSpec(layers=2)
INPUTS_FIRST = ("experts.gate_up_proj", "experts.down_proj")
SINK_SCALE = 2.0
EMBEDDINGS = ("embed_tokens", "wte", "embed_in")


@dataclass(frozen=True)
class Family:
    """What its configuration says beside the sizes, and how its weights are drawn."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    around_zero: bool = False
    """Whether the weights of its norms are added to 1."""


_WINDOWS = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
_TIED = {"tie_word_embeddings": True}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        "gemma3_text",
        _WINDOWS
        | {
            "query_pre_attn_scalar": SPEC.head_dim,
            "rope_parameters": {
                SLIDING: _ROPE,
                FULL: _ROPE | {"rope_theta": 100_000.0},
            },
        },
        around_zero=True,
    ),
    "cohere": Family("cohere", _TIED | {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": Family("cohere2", _WINDOWS | _TIED | {"logit_scale": 0.5}),
    "ernie": Family("ernie4_5", {"use_bias": True}),
    "exaone4": Family("exaone4", _WINDOWS),
    "glm4": Family("glm4"),
    "gpt_oss": Family(
        "gpt_oss",
        _WINDOWS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 2.0,
                "original_max_position_embeddings": SPEC.max_positions // 2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "granite": Family(
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": SPEC.head_dim**-0.5,
        },
    ),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "olmo2": Family("olmo2"),
    "olmoe": Family("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "phi3": Family("phi3", {"partial_rotary_factor": 0.5}),
    "qwen2_moe": Family(
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "qwen3": Family("qwen3"),
    "stablelm": Family("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
}


def write_family(path: Path, name: str, layers: int = SPEC.layers) -> None:
    """Write a checkpoint of a family to directory ``path``; it always gets the same weights.

    Args:
        path: the directory.
        name: of the family.
        layers: a multiple of two: layers with windows and without them alternate.
    """
    write_checkpoint(path, SPEC)  # for its tokenizer
    family = FAMILIES[name]
    settings = sizes() | dict(family.config) | {"num_hidden_layers": layers}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"] * (layers // SPEC.layers)
    config = AutoConfig.for_model(family.kind, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(SPEC.seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = drawn_like(parameter_name, parameter, draw, around_zero=family.around_zero)
            parameter.copy_(noise)
        if config.tie_word_embeddings:  # as ``random_checkpoint.weights`` says
            scale = drawn.LOGIT_GAIN / (drawn.EMBEDDING_SCALE * SPEC.hidden_size**0.5)
            model.model.norm.weight.normal_(std=scale, generator=draw)
        model.get_output_embeddings().weight[: len(drawn.SPECIAL_TOKENS)] = 0
    model.save_pretrained(path)


def sizes() -> dict[str, Any]:
    """Return what the configuration of each family says of sizes and special tokens."""
    return {
        "hidden_size": SPEC.hidden_size,
        "intermediate_size": SPEC.intermediate_size,
        "num_hidden_layers": SPEC.layers,
        "num_attention_heads": SPEC.heads,
        "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_dim,
        "vocab_size": SPEC.vocab_size,
        "max_position_embeddings": SPEC.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def drawn_like(
    name: str, like: torch.Tensor, draw: torch.Generator, *, around_zero: bool = False
) -> torch.Tensor:
    """Return weights for a parameter of this name and shape.

    Args:
        name: tells what the parameter is.
        like: has its shape.
        draw: the source of all randomness.
        around_zero: whether the weights of norms are added to 1.
    """
    noise = torch.randn(like.shape, generator=draw)
    if name.endswith("sinks"):
        return noise * SINK_SCALE
    if name.endswith("bias"):
        return noise * (drawn.NORM_NOISE if "norm" in name else drawn.BIAS_SCALE)
    if like.dim() == 1 or "norm" in name:
        scale = drawn.QK_NORM_SCALE if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        return scale * (1 + drawn.NORM_NOISE * noise) - (1.0 if around_zero else 0.0)
    if any(part in name for part in EMBEDDINGS):
        return noise * drawn.EMBEDDING_SCALE
    return noise * _gain(name) / _inputs(name, like) ** 0.5


def _gain(name: str) -> float:
    gains = {
        "lm_head": drawn.LOGIT_GAIN,
        "router": drawn.ROUTER_GAIN,
        "mlp.gate.": drawn.ROUTER_GAIN,
        "q_proj": drawn.ATTENTION_GAIN,
        "k_proj": drawn.ATTENTION_GAIN,
    }
    return next((gain for part, gain in gains.items() if part in name), drawn.PROJECTION_GAIN)


def _inputs(name: str, like: torch.Tensor) -> int:
    """Return the size of a projection's input; it comes first in GPT-OSS's tensors of experts."""
    return like.shape[1] if name.endswith(INPUTS_FIRST) else like.shape[-1]
