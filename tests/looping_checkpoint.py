"""Makes of a random checkpoint one whose output repeats itself in part, as text does.

It says few words, and which comes next depends mostly on the last ones. So what followed a word
once often follows it again, though not always: of the tokens that n-grams propose, some are right.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

WORDS = 12
"""Tokens that the model can say."""
ATTENTION = 0.15
"""What attention adds, beside what it adds in the other checkpoint."""


def write_looping(model: Path, directory: Path) -> Path:
    """Write a copy of a checkpoint without tied embeddings; return ``directory``."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor *= ATTENTION
    heads = tensors["lm_head.weight"]
    heads[: len(heads) - WORDS] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
