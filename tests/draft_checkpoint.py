"""Small random draft models in the formats of EAGLE and EAGLE 3, for a checkpoint of the tests.

A draft model has one layer, which attends to all tokens, and says the words that its model says. So
what it proposes depends on the KV of that layer, and is right now and then.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.random_checkpoint import CheckpointSpec, Tensor, model_config, weights

READS = (1, 2)
"""Layers of the model whose hidden states EAGLE 3 reads, by how many layers came before. A small
model lacks some of those that it reads by default."""
LAYER = "model.layers.0."


def write_draft(model: Path, directory: Path, spec: CheckpointSpec, method: str) -> Path:
    """Write a draft model; return ``directory``.

    Args:
        model: the checkpoint for which it proposes tokens, which has an output layer of its own.
        directory: where it goes.
        spec: of that checkpoint.
        method: vLLM's name of its format.
    """
    directory.mkdir(parents=True)
    one = dataclasses.replace(spec, layers=1, seed=spec.seed + 100)
    config = model_config(one)
    if method == "eagle3":
        config |= {"eagle_aux_hidden_state_layer_ids": READS, "num_aux_hidden_states": len(READS)}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = dict(_tensors(one, method))
    if method == "eagle3":
        tensors["lm_head.weight"] = load_file(model / "model.safetensors")["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(spec: CheckpointSpec, method: str) -> Iterator[tuple[str, Tensor]]:
    random, size = np.random.default_rng(spec.seed), spec.hidden_size

    def drawn(out: int, into: int) -> Tensor:
        return random.standard_normal((out, into), dtype=np.float32) / np.float32(into**0.5)

    third = method == "eagle3"
    # The first EAGLE puts the embedding of the next token beside one hidden state.
    yield "fc.weight", drawn(size, size * (len(READS) if third else 2))
    for name, tensor in weights(spec):
        part = name.removeprefix(LAYER)
        if part == name or (part.startswith("input_layernorm") and not third):
            continue
        if third and part.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
            # Here it is the layer that reads both.
            tensor = 2 * drawn(tensor.shape[0], 2 * size)
        yield f"{'midlayer' if third else 'layers.0'}.{part}", tensor
    if third:
        yield "midlayer.hidden_norm.weight", np.ones(size, dtype=np.float32)
        yield "norm.weight", np.ones(size, dtype=np.float32)
