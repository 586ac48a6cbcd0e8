"""Small random LoRA adapters in PEFT's format, for checkpoints of ``random_checkpoint``."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.random_checkpoint import CheckpointSpec

RANK = 8
ALPHA = 16
"""PEFT multiplies what an adapter adds by ``ALPHA / RANK``."""
SCALE = 0.35
"""Standard deviation of what an adapter adds to a projection's outputs, about."""
EMBEDDINGS = "model.embed_tokens"
PREFIX = "base_model.model."
"""PEFT's, before names of the model."""
WEIGHTS = "model.safetensors"


Shapes = dict[str, tuple[int, int]]
"""Names of adapted projections, each with its numbers of outputs and of inputs."""


def attention_shapes(spec: CheckpointSpec) -> Shapes:
    """Return the projections of attention in all layers."""
    hidden, query, kv = (
        spec.hidden_size,
        spec.heads * spec.head_dim,
        spec.kv_heads * spec.head_dim,
    )
    sizes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
    return {
        f"model.layers.{layer}.self_attn.{name}_proj": shape
        for layer in range(spec.layers)
        for name, shape in sizes.items()
    }


def mlp_shapes(path: str, hidden: int, inner: int) -> Shapes:
    """Return the projections of one feed-forward network."""
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{path}.{name}_proj": shape for name, shape in sizes.items()}


def llama_shapes(spec: CheckpointSpec) -> Shapes:
    """Return the projections of a Llama's layers."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    found = attention_shapes(spec)
    for layer in range(spec.layers):
        found |= mlp_shapes(f"model.layers.{layer}.mlp", hidden, inner)
    return found


def write_adapter(
    path: Path, spec: CheckpointSpec, seed: int, *, ends: bool = False, shapes: Shapes | None = None
) -> None:
    """Write an adapter to directory ``path``.

    Args:
        path: the directory.
        spec: of the model.
        seed: what the adapter is drawn from.
        ends: adapt the embeddings and the LM head, too.
        shapes: what is adapted; by default all projections of a Llama's layers.

    Raises:
        FileExistsError: ``path`` exists.
    """
    path.mkdir(parents=True)
    hidden, keys = spec.hidden_size, dict(llama_shapes(spec) if shapes is None else shapes)
    if ends:
        keys |= {"lm_head": (spec.vocab_size, hidden), EMBEDDINGS: (hidden, spec.vocab_size)}
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, (out, into) in keys.items():
        # A token has one row of the embeddings, and the sum of a projection's.
        terms = 1 if name == EMBEDDINGS else into
        down = draw.standard_normal((RANK, into), dtype=np.float32) / terms**0.5
        up = draw.standard_normal((out, RANK), dtype=np.float32) / RANK**0.5
        kind = ("embedding_A", "embedding_B") if name == EMBEDDINGS else ("A.weight", "B.weight")
        key = f"{PREFIX}{name}.lora_"
        tensors |= {key + kind[0]: np.float32(SCALE) * down, key + kind[1]: up}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in keys}),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")


def merge_adapter(path: Path, model: Path, adapter: Path) -> None:
    """Write to directory ``path`` the model whose weights have an adapter in them.

    Args:
        path: the directory.
        model: a checkpoint of ``write_checkpoint``.
        adapter: one of ``write_adapter``, without the embeddings.

    Raises:
        FileExistsError: ``path`` exists.
    """
    shutil.copytree(model, path)
    weights, added = load_file(path / WEIGHTS), load_file(adapter / "adapter_model.safetensors")
    for name, down in added.items():
        if name.endswith(".lora_A.weight"):
            up = added[name.replace("lora_A", "lora_B")]
            key = name.removeprefix(PREFIX).replace("lora_A.", "")
            weights[key] += np.float32(ALPHA / RANK) * (up @ down)
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
