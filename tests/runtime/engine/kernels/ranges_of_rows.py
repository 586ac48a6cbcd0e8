"""A layer in 16 bits or more over three ranges of rows."""

import torch
from torch import nn

DEPTH = 32
RANGES = (slice(16, 56), slice(100, 120), slice(170, 190))


def parts(*, bias: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return its weights, and its biases if it has any."""
    draw = torch.Generator().manual_seed(1)
    weight, added = torch.randn(200, DEPTH, generator=draw), torch.randn(200, generator=draw)
    return [weight[rows] for rows in RANGES], [added[rows] for rows in RANGES] if bias else []


def linear_reference(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    """Return what it computes."""
    return nn.functional.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
