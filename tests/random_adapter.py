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


def write_adapter(path: Path, spec: CheckpointSpec, seed: int) -> None:
    """Write an adapter of all projections of a Llama to directory ``path``.

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
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(spec.layers):
        for name, (out, into) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            down = draw.standard_normal((RANK, into), dtype=np.float32) / into**0.5
            up = draw.standard_normal((out, RANK), dtype=np.float32) / RANK**0.5
            tensors[f"{key}.lora_A.weight"] = np.float32(SCALE) * down
            tensors[f"{key}.lora_B.weight"] = up
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [name.rpartition(".")[2] for name in sizes],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
