"""Makes of a random checkpoint one whose weights vLLM repacks, as the writers of each form do."""

import enum
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
GROUP_SIZE = 32
"""Inputs of a layer that share a scale."""
NIBBLES = 8
"""4-bit values in an int32."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight values AWQ puts into each place of an int32, from the lowest bits on."""


class Form(enum.StrEnum):
    """How a checkpoint has its weights."""

    GPTQ = "gptq"
    """4 bits, symmetric."""
    AWQ = "awq"
    """4 bits, with zeros that are not in the middle."""
    INTEGERS = "integers"
    """compressed-tensors: 4 bits in attention (W4A16); in MLPs, 8 bits of weights and inputs."""


_GPTQ: Mapping[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}
_AWQ: Mapping[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "zero_point": True,
    "version": "gemm",
}
_INTEGERS: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": [f"re:.*{name}" for name in ATTENTION],
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP_SIZE,
            },
            "input_activations": None,
        },
        "group_1": {
            "targets": [f"re:.*{name}" for name in MLP],
            "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "dynamic": True,
                "strategy": "token",
            },
        },
    },
}
CONFIGURATIONS = {Form.GPTQ: _GPTQ, Form.AWQ: _AWQ, Form.INTEGERS: _INTEGERS}


def write_repacked(model: Path, directory: Path, form: Form) -> Path:
    """Write a copy of a checkpoint whose decoder layers are quantised; return ``directory``.

    Args:
        model: a checkpoint that is not quantised.
        directory: where the copy goes; it must not exist.
        form: how the weights are quantised.
    """
    directory.mkdir(parents=True)
    tensors = load_file(model / "model.safetensors")
    for name in list(tensors):
        layer = name.split(".")[-2]
        if layer in ATTENTION + MLP and name.endswith(".weight"):
            found = _quantised(tensors.pop(name).float(), layer, form)
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{key}": tensor.contiguous() for key, tensor in found.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = dict(CONFIGURATIONS[form])
    (directory / "config.json").write_text(json.dumps(config))
    for file in model.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


def _quantised(weight: torch.Tensor, layer: str, form: Form) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors of a layer, given its weight ``[outputs, inputs]``."""
    if form is Form.GPTQ:
        return _gptq(weight.T.contiguous())
    if form is Form.AWQ:
        return _awq(weight.T.contiguous())
    return _packed_integers(weight) if layer in ATTENTION else _plain_integers(weight)


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return GPTQ's tensors of ``[inputs, outputs]``; a zero is stored less one."""
    values, scales = _nibbles(weight)
    return {
        "qweight": _packed(values.T).T,
        "qzeros": _packed(torch.full_like(scales, 7)),
        "scales": scales.half(),
        "g_idx": torch.arange(len(weight), dtype=torch.int32) // GROUP_SIZE,
    }


def _awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return AWQ's tensors of ``[inputs, outputs]``: its own order of outputs, and zeros."""
    grouped = weight.view(-1, GROUP_SIZE, weight.shape[1])
    least, most = grouped.amin(1), grouped.amax(1)
    scales = (most - least) / 15
    zeros = (-least / scales).round().clamp(0, 15)
    values = (grouped / scales[:, None]).round().add(zeros[:, None]).clamp(0, 15)
    return {
        "qweight": _packed(_awq_order(values.view(weight.shape))),
        "qzeros": _packed(_awq_order(zeros)),
        "scales": scales.half(),
    }


def _awq_order(values: torch.Tensor) -> torch.Tensor:
    return values.view(len(values), -1, NIBBLES)[:, :, AWQ_ORDER].reshape(values.shape)


def _packed_integers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of ``CompressedTensorsWNA16``, given ``[outputs, inputs]``."""
    values, scales = _nibbles(weight.T.contiguous())
    return {
        "weight_packed": _packed(values.T),
        "weight_scale": scales.T.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _plain_integers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of ``CompressedTensorsW8A8Int8``, given ``[outputs, inputs]``."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _nibbles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values from 0 to 15, whose middle is 8, and scales, given ``[inputs, outputs]``."""
    grouped = weight.view(-1, GROUP_SIZE, weight.shape[1])
    scales = grouped.abs().amax(1) / 7
    values = (grouped / scales[:, None]).round().clamp(-8, 7).add(8)
    return values.view(weight.shape), scales


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, columns / 8]`` of int32 for values below 16, ``[rows, columns]``."""
    groups = values.to(torch.int64).reshape(len(values), -1, NIBBLES)
    shifts = 4 * torch.arange(NIBBLES)
    return (groups << shifts).sum(-1).to(torch.uint32).view(torch.int32)
