"""Makes of a GPT-OSS checkpoint one in MXFP4, as OpenAI's are, and one of the same values in fp32.

Transformers says what values the packed experts have, so it is no code of Shoal's that does.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

BLOCK = 32
"""Values that share a scale."""
LARGEST_EXPONENT = 2
"""That of the largest value that four bits can have, which is 6."""
BIAS = 127
"""What is added to a scale's exponent."""
QUANTISATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Checkpoints(NamedTuple):
    """Where the two are."""

    packed: Path
    plain: Path


def write_mxfp4(model: Path, directory: Path) -> Checkpoints:
    """Write both into ``directory``.

    Args:
        model: a GPT-OSS checkpoint that is not quantised.
        directory: where they go; it must not have them yet.
    """
    plain = load_file(model / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if ".experts." in name]:
        if name.endswith("_bias"):
            packed[name] = plain[name].to(torch.bfloat16)
            plain[name] = packed[name].float()
            continue
        blocks, scales = quantised(packed.pop(name).transpose(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    written = Checkpoints(directory / "packed", directory / "plain")
    config = json.loads((model / "config.json").read_text())
    for path, tensors in zip(written, (packed, plain), strict=True):
        shutil.copytree(model, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = QUANTISATION
    (written.packed / "config.json").write_text(json.dumps(config))
    return written


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights in MXFP4: the nearest values that the largest of 32 leaves room for.

    Args:
        weight: ``[experts, rows, inputs]``.

    Returns:
        ``[experts, rows, inputs / 32, 16]``, two values in a byte, the first in its low half; and
        the scales' exponents, ``[experts, rows, inputs / 32]``.
    """
    values = weight.unflatten(-1, (-1, BLOCK))
    exponents = values.abs().amax(-1).log2().floor() - LARGEST_EXPONENT
    scaled = torch.ldexp(values, -exponents[..., None])
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + BIAS).to(torch.uint8)
