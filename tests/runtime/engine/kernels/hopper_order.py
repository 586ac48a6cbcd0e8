"""The order of bytes that ``triton_kernels`` 3.5.1 gives experts in MXFP4 on Hopper, written out.

vLLM's build for CPUs lacks the package. ``HopperMXValueLayout`` also changes the bits of four
neighbouring bytes, each group by itself, which moves none of them; it is left out here.
"""

import torch
from torch.nn.functional import pad

SCALE_ROWS = 256
"""Rows to which scales are padded, for kernels of eight warps."""
SCALE_COLUMNS = 4
"""Columns to which vLLM pads them (``_swizzle_mxfp4``)."""


def values(packed: torch.Tensor) -> torch.Tensor:
    """Return ``[experts, 4 * bytes, rows / 4]`` of ``[experts, rows, bytes]``."""
    experts, rows, columns = packed.shape
    tiles = pad(packed, (0, -columns % 32, 0, -rows % 16))
    tiles = tiles.reshape(experts, -(-rows // 16), 2, 4, 2, -(-columns // 32), 4, 2, 4)
    # Of rows: tiles, warps, threads, pairs of threads; of columns: tiles, steps, warps, threads.
    ordered = tiles.permute(0, 1, 3, 5, 4, 8, 6, 7, 2).contiguous()
    return ordered.flatten(3).flatten(1, 2).mT


def scales(stored: torch.Tensor) -> torch.Tensor:
    """Return ``[experts, 32 * columns, rows / 32]`` of ``[experts, rows, columns]``, padded."""
    experts, rows, columns = stored.shape
    tiles = pad(stored, (0, -columns % SCALE_COLUMNS, 0, -rows % SCALE_ROWS))
    shape = (experts, -(-rows // SCALE_ROWS), 2, 8, 2, 8, tiles.shape[2] // 2, 2)
    ordered = tiles.reshape(shape).permute(0, 1, 3, 6, 2, 5, 7, 4).contiguous()
    return ordered.flatten(4).flatten(3, 4).flatten(1, 2).mT
