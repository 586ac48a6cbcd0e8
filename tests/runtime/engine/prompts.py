"""Prompts for token comparisons, and the model variants they run on."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.random_checkpoint import Architecture, CheckpointSpec, write_checkpoint

LENGTHS = (5, 17, 31, 32, 33, 64, 130, 300)
"""Tokens of the prompts: below, at and above a block, and far above a step's budget."""
VOCABULARY = 2048

MODELS = {
    "llama": CheckpointSpec(layers=2),
    "llama-2-kv-heads": CheckpointSpec(layers=4, kv_heads=2, seed=2),
    "qwen2": CheckpointSpec(Architecture.QWEN2, layers=4),
    "qwen3-1-kv-head": CheckpointSpec(
        Architecture.QWEN3, layers=2, kv_heads=1, tied_embeddings=True, seed=1
    ),
}

# 130 is even: two members share every expert, but four have two experts each.
MODELS_WITH_EXPERTS = {
    "qwen3-moe": CheckpointSpec(Architecture.QWEN3_MOE, layers=3, expert_size=130),
    "mixtral": CheckpointSpec(Architecture.MIXTRAL, layers=2),
    "glm4-moe": CheckpointSpec(Architecture.GLM4_MOE, layers=2),
    "llama4": CheckpointSpec(Architecture.LLAMA4, layers=2),
}

Stock = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Given prompts and a number of tokens, what stock vLLM generates greedily (see ``conftest``)."""


def make_model(name: str, directory: Path) -> Path:
    """Write one of these models into ``directory``, once, and return where."""
    path = directory / name
    if not path.exists():
        write_checkpoint(path, (MODELS | MODELS_WITH_EXPERTS)[name])
    return path


def random_prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """Return prompts of random tokens, special ones left out."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


PROMPTS = random_prompts(LENGTHS, seed=7)

SHARED = [
    PROMPTS[-1][:shared] + tail
    for shared, tail in zip((200, 200, 128), random_prompts((20, 70, 33), seed=8), strict=True)
]
"""Prompts that begin like the longest one: prefix cache hits, whole and in part."""

MANY = random_prompts((5, 17, 31, 33, 64, 65, 5, 17, 31, 33, 64, 65, 5, 17, 31, 33), seed=11)
"""As many as a node of the tests runs at once."""
