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

BOS, EOS, PAD = SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
"""Special tokens, in the order of their ids from 0."""

CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-6

# Standard deviation of a projection's outputs, given inputs of unit variance.
ATTENTION_GAIN = 1.9
"""Of queries and keys: attention picks few tokens instead of averaging over all."""
LOGIT_GAIN = 1.6
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
    tied_embeddings: bool = False
    seed: int = 11

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        own_head_dim = self.heads * self.head_dim != self.hidden_size
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
        "architectures": [f"{family.capitalize()}ForCausalLM"],
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
    if family is not Architecture.QWEN2:
        config["head_dim"] = spec.head_dim
    return config


def weights(spec: CheckpointSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its Hugging Face name; a projection has shape ``[out, in]``."""
    draw = _Draw(spec.seed)
    embeddings = draw.normal(spec.vocab_size, spec.hidden_size, scale=EMBEDDING_SCALE)
    if spec.tied_embeddings:
        _silence_special_tokens(embeddings)
    yield "model.embed_tokens.weight", embeddings
    for layer in range(spec.layers):
        for name, tensor in _layer_weights(spec, draw):
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


def _layer_weights(spec: CheckpointSpec, draw: "_Draw") -> Iterator[tuple[str, Tensor]]:
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "input_layernorm.weight", draw.norm(spec.hidden_size)
    for name, size, gain in (
        ("q_proj", query, ATTENTION_GAIN),
        ("k_proj", kv, ATTENTION_GAIN),
        ("v_proj", kv, PROJECTION_GAIN),
    ):
        yield f"self_attn.{name}.weight", draw.projection(size, spec.hidden_size, gain=gain)
        if spec.architecture is Architecture.QWEN2:
            yield f"self_attn.{name}.bias", draw.normal(size, scale=BIAS_SCALE)
    if spec.architecture is Architecture.QWEN3:
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", QK_NORM_SCALE * draw.norm(spec.head_dim)
    yield "self_attn.o_proj.weight", draw.projection(spec.hidden_size, query)
    yield "post_attention_layernorm.weight", draw.norm(spec.hidden_size)
    yield "mlp.gate_proj.weight", draw.projection(spec.intermediate_size, spec.hidden_size)
    yield "mlp.up_proj.weight", draw.projection(spec.intermediate_size, spec.hidden_size)
    yield "mlp.down_proj.weight", draw.projection(spec.hidden_size, spec.intermediate_size)


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
