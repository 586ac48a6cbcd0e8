"""FP8 layers over ranges of rows, their inputs, and what they compute."""

from typing import NamedTuple

import torch

from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_tiles import BLOCK

DEPTH = 64
RANGES = (slice(16, 64), slice(96, 112), slice(176, 192))


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


class Given(NamedTuple):
    """A layer and its input."""

    x: torch.Tensor
    x_scale: torch.Tensor
    ranges: Ranges


def layer(
    tokens: int = 5,
    *,
    by_token: bool = True,
    by_row: bool = True,
    bias: bool = False,
    packed: bool = True,
) -> Given:
    """Three ranges, with scales by tensor, or by token and row."""
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw) + 0.5

    weight = (random(192, 2 * DEPTH) - 1).to(torch.float8_e4m3fn)[:, DEPTH:]
    scale, added = random(192, 1), random(192).to(torch.bfloat16)
    x = (random(tokens, DEPTH) * 4 - 4).to(torch.float8_e4m3fn)
    x_scale = random(tokens, 1) if by_token else random(1)
    ranges = Ranges(
        [(weight.contiguous() if packed else weight)[rows] for rows in RANGES],
        [added[rows] for rows in RANGES] if bias else [],
        [scale[rows] if by_row else scale[0] for rows in RANGES],
        torch.bfloat16,
    )
    return Given(x, x_scale, ranges)


def reference(given: Given) -> torch.Tensor:
    """Return what a layer computes, in float32 until its end."""
    x, x_scale, (weights, biases, scales, dtype, _) = given
    parts = [weight.float() * scale for weight, scale in zip(weights, scales, strict=True)]
    output = (x.float() * x_scale) @ torch.cat(parts).T
    return (output + torch.cat(list(biases)).float() if biases else output).to(dtype)


def block_wise(tokens: int = 5, *, bias: bool = False) -> Given:
    """Two ranges, with scales of blocks."""
    draw = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw) + 0.5

    weight = (random(5 * BLOCK, 3 * BLOCK) - 1).to(torch.float8_e4m3fn)[:, BLOCK:]
    scale, added = random(5, 3)[:, 1:], random(5 * BLOCK).to(torch.bfloat16)
    rows = [slice(0, 2 * BLOCK), slice(3 * BLOCK, 4 * BLOCK)]
    x = (random(tokens, 2 * BLOCK) * 4 - 4).to(torch.float8_e4m3fn)
    x_scale = random(tokens, 2)
    ranges = Ranges(
        [weight[of] for of in rows],
        [added[of] for of in rows] if bias else [],
        [scale[of.start // BLOCK : of.stop // BLOCK] for of in rows],
        torch.bfloat16,
        BLOCK,
    )
    return Given(x, x_scale, ranges)


def input_range(tokens: int, blocks: int, rows: int = 2 * BLOCK) -> Given:
    """A row-parallel layer's: one range, of inputs."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw) + 0.5

    depth = blocks * BLOCK
    weight = (random(rows, 2 * depth) - 1).to(torch.float8_e4m3fn)[:, depth:]
    x = (random(tokens, depth) * 4 - 4).to(torch.float8_e4m3fn)
    scale = random(rows // BLOCK, blocks)
    return Given(x, random(tokens, blocks), Ranges([weight], [], [scale], torch.bfloat16, BLOCK))


def block_reference(given: Given) -> torch.Tensor:
    """The same as ``reference``, with scales of single elements."""
    x, x_scale, (weights, biases, scales, dtype, _) = given

    def spread(scale: torch.Tensor) -> torch.Tensor:
        return torch.kron(scale.contiguous(), torch.ones(BLOCK, BLOCK))

    parts = [w.float() * spread(scale) for w, scale in zip(weights, scales, strict=True)]
    values = x.float() * torch.kron(x_scale.contiguous(), torch.ones(1, BLOCK))
    output = values @ torch.cat(parts).T
    return (output + torch.cat(list(biases)).float() if biases else output).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that two outputs are one but for rounding."""
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
