"""Small random checkpoints in Hugging Face format, to compare tokens on.

Their text means nothing. What matters is that each is a complete model of a stock architecture and
that its greedy output varies: a model that falls into a loop would hide a damaged KV cache, because
the looped tokens come out either way. Hence wide embeddings, sharp attention and noisy norms.
"""

import enum
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Tensor = NDArray[np.float32]
Names = tuple[str, str, str]
"""What a family calls the gate, up and down projections of an MLP."""

BOS, EOS, PAD = SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
"""Special tokens, in the order of their ids from 0."""

CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-6

LATENT, LATENT_ROPE = 512, 64
"""Elements that latent attention caches of a token: what all heads share, and its position's."""

# Standard deviation of a projection's outputs, given inputs of unit variance.
ATTENTION_GAIN = 1.9
"""Of queries and keys: attention picks few tokens instead of averaging over all."""
LOGIT_GAIN = 1.6
ROUTER_GAIN = 1.6
"""Of routers: a token's experts differ in weight, and few tokens have two that are equally good."""
CORRECTION_SCALE = 0.3
"""Of what is added to scores between 0 and 1 before the best experts are chosen."""
PROJECTION_GAIN = 1.4
EMBEDDING_SCALE = 0.3
BIAS_SCALE = 0.5
NORM_NOISE = 0.2
QK_NORM_SCALE = ATTENTION_GAIN
"""Mean of the query and key norms' weights, which undo the gain of the projections before them."""


class Architecture(enum.StrEnum):
    """Model families a checkpoint can be made for, by their name in ``config.json``."""

    LLAMA = "llama"
    """Grouped-query attention without biases."""
    QWEN2 = "qwen2"
    """Biases on the query, key and value projections."""
    QWEN3 = "qwen3"
    """Norms on each head's queries and keys."""
    QWEN3_MOE = "qwen3_moe"
    """Qwen3 with routed experts in all layers but the first."""
    MIXTRAL = "mixtral"
    """Llama with routed experts."""
    GLM4_MOE = "glm4_moe"
    """GLM 4.5: biases on queries, keys and values, a shared expert beside routed ones in all layers
    but the first, and a router that corrects its scores."""

    LLAMA4 = "llama4_text"
    """The text part of Llama 4: a shared expert beside routed ones in all layers, one routed expert
    for a token, whose weight multiplies the input, and layers without rotary positions. Attention
    has no chunks, without which Transformers does not run it."""

    DEEPSEEK_V2 = "deepseek_v2"
    """DeepSeek-V2-Lite: attention with a latent cache (MLA), queries of full rank, positions by
    YaRN, and shared experts beside routed ones, which are in groups as the large DeepSeek-V2's are,
    in all layers but the first. ``head_dim`` is a head's part without positions, and the size of
    its values; the sizes of the latent are the only ones that vLLM's kernel for CPUs has."""

    @property
    def class_name(self) -> str:
        """The name of its class in Transformers and vLLM."""
        if self is Architecture.LLAMA4:
            return "Llama4ForCausalLM"
        return f"{''.join(part.capitalize() for part in self.split('_'))}ForCausalLM"


DENSE_FIRST = (Architecture.QWEN3_MOE, Architecture.GLM4_MOE, Architecture.DEEPSEEK_V2)
"""Families with a plain MLP in the first layer and routed experts in the others."""


@dataclass(frozen=True)
class CheckpointSpec:
    """Shape and seed of a random checkpoint. Sizes are in elements, ``max_positions`` in tokens."""

    architecture: Architecture = Architecture.LLAMA
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab_size: int = 2048
    max_positions: int = 4096
    experts: int = 8
    """Routed experts of a layer, in families that have some."""
    experts_per_token: int = 2
    expert_size: int = 128
    """What ``intermediate_size`` is for one expert."""
    tied_embeddings: bool = False
    seed: int = 11

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        own_head_dim = self.heads * self.head_dim != self.hidden_size
        if self.architecture is Architecture.DEEPSEEK_V2 and self.heads != self.kv_heads:
            raise ValueError("DeepSeek-V2 has no fewer KV heads than heads: all read one latent")
        if own_head_dim and self.architecture is Architecture.QWEN2:
            raise ValueError("Qwen2 has no head_dim of its own: heads * head_dim is hidden_size")


def write_checkpoint(path: Path, spec: CheckpointSpec) -> None:
    """Write the configuration, tokenizer and random fp32 weights of ``spec`` to directory ``path``.

    The same spec gives the same weights everywhere, and the same tokenizer on the same version of
    Python.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: ``path`` cannot be written.
    """
    path.mkdir(parents=True)
    _write_json(path / "config.json", model_config(spec))
    _write_json(path / "generation_config.json", _token_ids())
    _write_json(path / "tokenizer_config.json", _tokenizer_config(spec))
    (path / "tokenizer.json").write_text(_train_tokenizer(spec.vocab_size), encoding="utf-8")
    save_file(dict(weights(spec)), path / "model.safetensors", metadata={"format": "pt"})


def model_config(spec: CheckpointSpec) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    family = spec.architecture
    config = {
        "architectures": [family.class_name],
        "model_type": str(family),
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
        **_token_ids(),
    }
    if family is Architecture.DEEPSEEK_V2:
        config |= _latent_config(spec)
    elif family is not Architecture.QWEN2:
        config["head_dim"] = spec.head_dim
    return config | _experts_config(spec)


def _latent_config(spec: CheckpointSpec) -> dict[str, Any]:
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": LATENT_ROPE, "q_lora_rank": None}
    heads = {"qk_nope_head_dim": spec.head_dim, "v_head_dim": spec.head_dim}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
    scale = {"mscale": 0.707, "mscale_all_dim": 0.707}
    positions = {"original_max_position_embeddings": spec.max_positions // 4}
    return {
        **sizes,
        **heads,
        "attention_bias": False,
        "rope_scaling": yarn | scale | positions,
    }


def _experts_config(spec: CheckpointSpec) -> dict[str, Any]:
    per_token = {"num_experts_per_tok": spec.experts_per_token}
    if spec.architecture is Architecture.MIXTRAL:
        sizes = {"num_local_experts": spec.experts, "intermediate_size": spec.expert_size}
        return per_token | sizes | {"sliding_window": None}
    if spec.architecture is Architecture.LLAMA4:
        sizes = {"num_local_experts": spec.experts, "intermediate_size": spec.expert_size}
        layers = {
            "no_rope_layers": [layer % 2 for layer in range(spec.layers)],
            "layer_types": ["full_attention"] * spec.layers,
            "attention_chunk_size": None,
            "use_qk_norm": False,
        }
        return {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1} | sizes | layers
    if spec.architecture is Architecture.GLM4_MOE:
        sizes = {"n_routed_experts": spec.experts, "moe_intermediate_size": spec.expert_size}
        one_group = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        layers = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
        factor = {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "attention_bias": True}
        return per_token | sizes | one_group | layers | factor
    if spec.architecture is Architecture.DEEPSEEK_V2:
        sizes = {"n_routed_experts": spec.experts, "moe_intermediate_size": spec.expert_size}
        groups = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
        layers = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_shared_experts": 2}
        factor = {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "scoring_func": "softmax"}
        return per_token | sizes | groups | layers | factor
    if spec.architecture is Architecture.QWEN3_MOE:
        sizes = {"num_experts": spec.experts, "moe_intermediate_size": spec.expert_size}
        return per_token | sizes | {"norm_topk_prob": True, "mlp_only_layers": [0]}
    return {}


def weights(spec: CheckpointSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its Hugging Face name; a projection has shape ``[out, in]``."""
    draw = _Draw(spec.seed)
    embeddings = draw.normal(spec.vocab_size, spec.hidden_size, scale=EMBEDDING_SCALE)
    if spec.tied_embeddings:
        _silence_special_tokens(embeddings)
    yield "model.embed_tokens.weight", embeddings
    for layer in range(spec.layers):
        for name, tensor in (*_attention_weights(spec, draw), *_mlp_weights(spec, draw, layer)):
            yield f"model.layers.{layer}.{name}", tensor
    if spec.tied_embeddings:
        # Weights of either sign: otherwise the last token's own embedding would win, for ever.
        scale = LOGIT_GAIN / (EMBEDDING_SCALE * spec.hidden_size**0.5)
        yield "model.norm.weight", draw.normal(spec.hidden_size, scale=scale)
    else:
        yield "model.norm.weight", draw.norm(spec.hidden_size)
        head = draw.projection(spec.vocab_size, spec.hidden_size, gain=LOGIT_GAIN)
        _silence_special_tokens(head)
        yield "lm_head.weight", head


def _silence_special_tokens(head: Tensor) -> None:
    """Keep their logits at 0, far below the best: an answer ends when its caller says so."""
    head[: len(SPECIAL_TOKENS)] = 0


def _attention_weights(spec: CheckpointSpec, draw: "_Draw") -> Iterator[tuple[str, Tensor]]:
    if spec.architecture is Architecture.DEEPSEEK_V2:
        yield from _latent_attention_weights(spec, draw)
        return
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "input_layernorm.weight", draw.norm(spec.hidden_size)
    for name, size, gain in (
        ("q_proj", query, ATTENTION_GAIN),
        ("k_proj", kv, ATTENTION_GAIN),
        ("v_proj", kv, PROJECTION_GAIN),
    ):
        yield f"self_attn.{name}.weight", draw.projection(size, spec.hidden_size, gain=gain)
        if spec.architecture in (Architecture.QWEN2, Architecture.GLM4_MOE):
            yield f"self_attn.{name}.bias", draw.normal(size, scale=BIAS_SCALE)
    if spec.architecture in (Architecture.QWEN3, Architecture.QWEN3_MOE):
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", QK_NORM_SCALE * draw.norm(spec.head_dim)
    yield "self_attn.o_proj.weight", draw.projection(spec.hidden_size, query)
    yield "post_attention_layernorm.weight", draw.norm(spec.hidden_size)


def _latent_attention_weights(spec: CheckpointSpec, draw: "_Draw") -> Iterator[tuple[str, Tensor]]:
    query, values = (spec.heads * (spec.head_dim + more) for more in (LATENT_ROPE, 0))
    yield "input_layernorm.weight", draw.norm(spec.hidden_size)
    for name, out, into, gain in (
        ("q_proj", query, spec.hidden_size, ATTENTION_GAIN),
        ("kv_a_proj_with_mqa", LATENT + LATENT_ROPE, spec.hidden_size, ATTENTION_GAIN),
        ("kv_b_proj", 2 * values, LATENT, ATTENTION_GAIN),
        ("o_proj", spec.hidden_size, values, PROJECTION_GAIN),
    ):
        yield f"self_attn.{name}.weight", draw.projection(out, into, gain=gain)
    yield "self_attn.kv_a_layernorm.weight", draw.norm(LATENT)
    yield "post_attention_layernorm.weight", draw.norm(spec.hidden_size)


def _mlp_weights(spec: CheckpointSpec, draw: "_Draw", layer: int) -> Iterator[tuple[str, Tensor]]:
    names = ("gate_proj", "up_proj", "down_proj")
    if spec.architecture is Architecture.MIXTRAL:
        yield from _expert_weights(spec, draw, "block_sparse_moe", ("w1", "w3", "w2"))
    elif spec.architecture is Architecture.LLAMA4:
        yield from _stacked_expert_weights(spec, draw)
        yield from _gated_mlp(spec, draw, "feed_forward.shared_expert", names, spec.expert_size)
    elif spec.architecture in DENSE_FIRST and layer > 0:
        yield from _expert_weights(spec, draw, "mlp", names)
        if spec.architecture is Architecture.DEEPSEEK_V2:
            yield from _gated_mlp(spec, draw, "mlp.shared_experts", names, 2 * spec.expert_size)
        if spec.architecture is Architecture.GLM4_MOE:
            correction = draw.normal(spec.experts, scale=CORRECTION_SCALE)
            yield "mlp.gate.e_score_correction_bias", correction
            yield from _gated_mlp(spec, draw, "mlp.shared_experts", names, spec.expert_size)
    else:
        yield from _gated_mlp(spec, draw, "mlp", names, spec.intermediate_size)


def _expert_weights(
    spec: CheckpointSpec, draw: "_Draw", name: str, names: Names
) -> Iterator[tuple[str, Tensor]]:
    router = draw.projection(spec.experts, spec.hidden_size, gain=ROUTER_GAIN)
    yield f"{name}.gate.weight", router
    for expert in range(spec.experts):
        yield from _gated_mlp(spec, draw, f"{name}.experts.{expert}", names, spec.expert_size)


def _stacked_expert_weights(spec: CheckpointSpec, draw: "_Draw") -> Iterator[tuple[str, Tensor]]:
    """Yield those of Llama 4: experts are in one tensor, ``[experts, in, out]``."""
    experts, hidden, size = spec.experts, spec.hidden_size, spec.expert_size
    router = draw.projection(experts, hidden, gain=ROUTER_GAIN)
    yield "feed_forward.router.weight", router
    scale = PROJECTION_GAIN / hidden**0.5
    gate_up = draw.normal(experts, hidden, 2 * size, scale=scale)
    yield "feed_forward.experts.gate_up_proj", gate_up
    down = draw.normal(experts, size, hidden, scale=PROJECTION_GAIN / size**0.5)
    yield "feed_forward.experts.down_proj", down


def _gated_mlp(
    spec: CheckpointSpec, draw: "_Draw", name: str, names: Names, size: int
) -> Iterator[tuple[str, Tensor]]:
    gate, up, down = names
    yield f"{name}.{gate}.weight", draw.projection(size, spec.hidden_size)
    yield f"{name}.{up}.weight", draw.projection(size, spec.hidden_size)
    yield f"{name}.{down}.weight", draw.projection(spec.hidden_size, size)


class _Draw:
    """Random tensors from one seeded stream."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float) -> Tensor:
        return np.float32(scale) * self._random.standard_normal(shape, dtype=np.float32)

    def projection(self, out: int, into: int, *, gain: float = PROJECTION_GAIN) -> Tensor:
        return self.normal(out, into, scale=gain / into**0.5)

    def norm(self, size: int) -> Tensor:
        return 1 + self.normal(size, scale=NORM_NOISE)


@functools.cache
def _train_tokenizer(vocab_size: int) -> str:
    """Return the JSON of a byte-level BPE tokenizer trained on Python's own help texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return str(tokenizer.to_str())


def _tokenizer_config(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        # Bytes leave nothing unknown, but a class with a default of its own would add it.
        "unk_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_positions,
    }


def _token_ids() -> dict[str, int]:
    return {
        f"{role}_token_id": SPECIAL_TOKENS.index(token)
        for role, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
