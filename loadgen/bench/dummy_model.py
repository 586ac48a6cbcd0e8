"""Model directories without weights: a shape's ``config.json`` beside a made-up tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.server.errors import UserError

_SHAPES = Path(__file__).parent / "shapes"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
FP8_KINDS = ("tensor", "channel", "block")
"""What a scale of an FP8 weight may be for."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How the families' configurations name the number of experts."""
_SPECIAL_TOKENS = ("<s>", "</s>")
_SPACE = "\u0120"
"""The space, as byte-level tokenizers write it."""


def built_in_shapes() -> list[str]:
    """Return the names of the shapes that are part of the package."""
    return sorted(path.stem for path in _SHAPES.glob("*.json"))


def read_shape(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a built-in shape, or the one at this path.

    Raises:
        UserError: there is none, or it is not JSON.
    """
    built_in = built_in_shapes()
    path = _SHAPES / f"{name}.json" if name in built_in else Path(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--model-shape {name}: {error.strerror}; built in: {', '.join(built_in)}"
        ) from error
    except ValueError as error:
        raise UserError(f"--model-shape {name}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"--model-shape {name}: not a config.json")
    return config


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Write the files that a server with dummy weights needs; every token id decodes to text.

    vLLM's front ends turn tokens into text with ``tokenizers.decoders.DecodeStream``, which decodes
    the prompt and all tokens since then again until there is new text. If a model generated ids
    without text, each token would cost a front end as much as the whole context.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps({**config, **ends}, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(_tokenizer(config["vocab_size"]))
    bos, eos = _SPECIAL_TOKENS
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(names) + "\n")


def in_fp8(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a ``config.json`` of the same model as a checkpoint in FP8.

    Args:
        config: of the model.
        kind: one of ``FP8_KINDS``: what each scale of a weight is for.
    """
    found: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if kind == "block":
        found["weight_block_size"] = [128, 128]
    if kind == "channel":
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**numbers, "strategy": "channel"},
            "input_activations": {**numbers, "strategy": "token", "dynamic": True},
        }
        found = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"all": group},
        }
    return {**config, "quantization_config": found}


def has_experts(config: dict[str, Any]) -> bool:
    """Return whether a router chooses among experts in the model of this ``config.json``."""
    return any(config.get(key, 0) > 1 for key in _EXPERT_COUNTS)


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Return the KV bytes of one token, over all layers and heads."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads", heads)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * _DTYPE_BYTES[dtype])


def _tokenizer(vocab_size: int) -> str:
    """Return a tokenizer that encodes text as bytes, and whose other ids are made-up words."""
    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += (f"{_SPACE}w{index:x}" for index in range(len(tokens), vocab_size))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return str(tokenizer.to_str())
