"""Small random LoRA adapters in PEFT's format, for checkpoints of ``random_checkpoint``."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.random_checkpoint import CheckpointSpec

RANK = 8
ALPHA = 16
"""PEFT multiplies what an adapter adds by ``ALPHA / RANK``."""
SCALE = 0.35
"""Standard deviation of what an adapter adds to a projection's outputs, about."""
EMBEDDINGS = "model.embed_tokens"


def write_adapter(path: Path, spec: CheckpointSpec, seed: int, *, ends: bool = False) -> None:
    """Write an adapter of all projections of a Llama to directory ``path``.

    Args:
        path: the directory.
        spec: of the Llama.
        seed: what the adapter is drawn from.
        ends: adapt the embeddings and the LM head, too.

    Raises:
        FileExistsError: ``path`` exists.
    """
    path.mkdir(parents=True)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    keys = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(spec.layers)
        for name, shape in sizes.items()
    }
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
        key = f"base_model.model.{name}.lora_"
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
