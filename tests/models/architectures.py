"""What `config.json` says of a small model of each text architecture that vLLM has.

Where Transformers has the configuration's class, its defaults are taken, except for what real
checkpoints state and the class does not. For the others, this module states what vLLM reads.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.model_executor.models.registry import (
    _TEXT_GENERATION_MODELS,
    _TRANSFORMERS_SUPPORTED_MODELS,
)
from vllm.transformers_utils.config import _CONFIG_REGISTRY

Config = dict[str, Any]

OWN: tuple[str, ...] = tuple(sorted(_TEXT_GENERATION_MODELS, key=str.lower))
"""Every architecture of vLLM's registry that generates text, takes nothing else, and is vLLM's."""

OF_TRANSFORMERS: tuple[str, ...] = tuple(
    sorted(
        name
        for name, (_, model) in _TRANSFORMERS_SUPPORTED_MODELS.items()
        if model in ("TransformersForCausalLM", "TransformersMoEForCausalLM")
    )
)
"""The same for which vLLM runs Transformers' model, with layers of its own."""

LAYERS = 6

_DENSE: Config = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}
_EXPERTS: Config = _DENSE | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_BAILING: Config = _EXPERTS | {
    "num_shared_experts": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "max_window_layers": LAYERS,
}

_WITHOUT_CLASS: dict[str, Config] = {
    "BailingMoeForCausalLM": _BAILING,
    "BailingMoeV2ForCausalLM": _BAILING,
    "ExaoneForCausalLM": _DENSE
    | {"activation_function": "silu", "layer_norm_epsilon": 1e-6, "num_layers": LAYERS},
    "InternLM2ForCausalLM": _DENSE | {"bias": False},
    "InternLM3ForCausalLM": _DENSE,
    "IQuestCoderForCausalLM": _DENSE,
    "LLaMAForCausalLM": _DENSE,
    "MiMoForCausalLM": _DENSE,
    "MiniCPMForCausalLM": _DENSE
    | {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12, "num_experts": 0},
    "OrionForCausalLM": _DENSE,
    "PanguEmbeddedForCausalLM": _DENSE | {"bias": False},
    "PhiMoEForCausalLM": _DENSE
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True},
    "Rnj1ForCausalLM": _DENSE
    | {
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "SarvamMoEForCausalLM": _BAILING,
    "DeepseekForCausalLM": _EXPERTS
    | {"n_routed_experts": 8, "n_shared_experts": 2, "moe_layer_freq": 1},
    "SolarForCausalLM": _DENSE
    | {f"bskcn_{number}": [1] for number in (1, 2, 3, 4)}
    | {"bskcn_tv": [0.9, 0.8]},
    "TeleChat2ForCausalLM": _DENSE | {"n_head": 8, "n_layer": LAYERS},
    "Step1ForCausalLM": _DENSE,
    "TeleChat3ForCausalLM": _DENSE,
    "TeleFLMForCausalLM": _DENSE | {"use_mup": False},
}
"""Architectures whose configuration comes with the checkpoint, as code or as another class."""

_FEW_EXPERTS: Config = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
"""Of models that vLLM traces expert by expert, which takes seconds."""

_STATED: dict[str, Config] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True},
    "DeepseekV2ForCausalLM": {"moe_intermediate_size": 1408},
    "FalconForCausalLM": {
        "new_decoder_architecture": True,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
    },
    "FlexOlmoForCausalLM": _FEW_EXPERTS,
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128} | _FEW_EXPERTS,
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 1536},
    "MellumForCausalLM": _FEW_EXPERTS | {"mlp_layer_types": ["sparse"]},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
}
"""What real checkpoints state although the class does not."""

_ALL_LAYERS = ("deepseek_v4", "gemma3n_text", "gemma4_text", "laguna", "zamba2")
"""Kinds of models whose classes tie other defaults to their number of layers."""

_KINDS = {"GPT2LMHeadModel": "gpt2", "Llama4ForCausalLM": "llama4_text"}
"""Where Transformers lists several kinds of models for an architecture."""


def config_of(architecture: str) -> Config | None:
    """Return the content of a ``config.json``; None if nobody here knows what belongs into it."""
    common = {"architectures": [architecture], "dtype": "bfloat16"}
    if architecture in _WITHOUT_CLASS:
        return common | _WITHOUT_CLASS[architecture] | {"model_type": _own_kind(architecture)}
    kind = _KINDS.get(architecture) or _kinds().get(architecture)
    if kind is None:
        return None
    layers = {} if kind in _ALL_LAYERS else _layers(kind)
    return common | layers | {"model_type": kind} | _STATED.get(architecture, {})


def _kinds() -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, kind)
    return found


def _layers(kind: str) -> Config:
    """Return what makes a model of this kind one of few layers."""
    known = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else CONFIG_MAPPING[kind]
    names = known().to_dict()
    found: Config = {
        name: LAYERS for name in ("num_hidden_layers", "n_layer", "num_layers") if name in names
    }
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(names.get(name), list):
            found[name] = names[name][:LAYERS]
    return found


def _own_kind(architecture: str) -> str:
    """Let Transformers know a kind of model whose configuration has no class, and return it."""
    kind = f"{architecture.removesuffix('ForCausalLM').lower()}_of_tests"
    if kind not in CONFIG_MAPPING:
        own = type(f"{architecture}Config", (PretrainedConfig,), {"model_type": kind})
        AutoConfig.register(kind, own)
    return kind
