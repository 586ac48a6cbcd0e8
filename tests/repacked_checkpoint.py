"""Makes of a random checkpoint one with 4-bit weights, as GPTQ writes them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP_SIZE = 32
"""Inputs of a layer that share a scale."""
NIBBLES = 8
"""4-bit values in an int32."""
CONFIGURATION: Mapping[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}


def write_repacked(model: Path, directory: Path) -> Path:
    """Write a copy of a checkpoint whose decoder layers have 4-bit weights; return ``directory``.

    Args:
        model: a checkpoint that is not quantised.
        directory: where the copy goes; it must not exist.
    """
    directory.mkdir(parents=True)
    tensors = load_file(model / "model.safetensors")
    for name in list(tensors):
        if name.split(".")[-2] in QUANTISED and name.endswith(".weight"):
            weight = tensors.pop(name).float().T.contiguous()
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{key}": tensor for key, tensor in _gptq(weight).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = dict(CONFIGURATION)
    (directory / "config.json").write_text(json.dumps(config))
    for file in model.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return GPTQ's tensors of ``[inputs, outputs]``; a zero is stored less one."""
    grouped = weight.view(-1, GROUP_SIZE, weight.shape[1])
    scales = grouped.abs().amax(1) / 7
    values = (grouped / scales[:, None]).round().clamp(-8, 7).add(8).view(weight.shape)
    return {
        "qweight": _packed(values.T).T.contiguous(),
        "qzeros": _packed(torch.full_like(scales, 7)),
        "scales": scales.half(),
        "g_idx": torch.arange(len(weight), dtype=torch.int32) // GROUP_SIZE,
    }


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, columns / 8]`` of int32 for values below 16, ``[rows, columns]``."""
    groups = values.to(torch.int64).reshape(len(values), -1, NIBBLES)
    shifts = 4 * torch.arange(NIBBLES)
    return (groups << shifts).sum(-1).to(torch.uint32).view(torch.int32)
