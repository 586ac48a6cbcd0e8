"""The Triton kernel of SwiGLU on rows whose gate and up features are in groups.

vLLM's own kernel has a program for each row of one group. If an expert's features are in many
groups, these rows are short, and its programs have too little to do.

Importing this module imports Triton, which only CUDA (or Triton's interpreter) has a use for.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_TILE = 2048
"""Elements that a program writes."""


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _silu_and_mul(  # type: ignore[no-untyped-def]
    output,
    grouped,
    rows,
    groups: tl.constexpr,
    size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    on_gpu: tl.constexpr,
):
    """Compute ``size`` features of one group for some rows; ``grouped`` has gate and up of each.

    Every result has the bits of vLLM's kernel (``silu_kernel`` in ``activation_kernels.cu``): it
    takes CUDA's own ``expf`` and division, and rounds the gate before it is multiplied.
    """
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
    group = tl.program_id(1)
    for begin in range(0, size, tile_columns):
        column = begin + tl.arange(0, tile_columns)[None, :]
        mask = (row < rows) & (column < size)
        gates = grouped + row * (2 * groups * size) + group * (2 * size) + column
        gate = tl.load(gates, mask=mask, other=0.0)
        up = tl.load(gates + size, mask=mask, other=0.0)
        wide = gate.to(tl.float32)
        # Triton's interpreter does not know CUDA's library.
        power = libdevice.exp(-wide) if on_gpu else tl.exp(-wide)
        silu = tl.div_rn(wide, 1.0 + power).to(gate.dtype).to(tl.float32)
        written = output + row * (groups * size) + group * size + column
        tl.store(written, (silu * up.to(tl.float32)).to(gate.dtype), mask=mask)


def silu_and_mul(output: torch.Tensor, grouped: torch.Tensor, groups: int) -> None:
    """Write SwiGLU of each row, in stock order; all tensors are contiguous.

    Args:
        output: ``[rows, features]``.
        grouped: ``[rows, groups * (gate|up)]``.
        groups: groups of gate and up features.
    """
    rows, features = output.shape
    if rows == 0:
        return
    size = features // groups
    tile_columns = min(triton.next_power_of_2(size), _TILE)
    tile_rows = max(1, _TILE // tile_columns)
    _silu_and_mul[(triton.cdiv(rows, tile_rows), groups)](
        output, grouped, rows, groups, size, tile_rows, tile_columns, output.is_cuda
    )
