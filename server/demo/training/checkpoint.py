"""The demo checkpoint's shape, and its files in Hugging Face format, except the weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shoal.server.demo.training.chat import CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL_TOKENS

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Shape:
    """A Llama. Sizes are in elements, ``max_positions`` in tokens; the embeddings are tied.

    Head counts, ``intermediate`` and ``vocab_size`` are such that every layout up to TP-8 can
    split them, and ``head_dim`` is one that vLLM's attention knows on CPUs and GPUs.
    """

    vocab_size: int = 4096
    hidden: int = 320
    intermediate: int = 896
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


SHAPE = Shape()
"""The shape of the demo model: eight million parameters."""


def write_configuration(path: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write every file of the checkpoint but the weights to directory ``path``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", encoding="utf-8")
    _write_json(path / "config.json", _model_config(shape))
    _write_json(path / "generation_config.json", _generation_config())
    _write_json(path / "tokenizer_config.json", _tokenizer_config(shape))


def _model_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "vocab_size": shape.vocab_size,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
    }


def _generation_config() -> dict[str, Any]:
    """Return how answers are sampled when a request does not say."""
    return {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "eos_token_id": [SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        # No text is unknown to byte-level tokens, but a class would add its own default unknown
        # token.
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
