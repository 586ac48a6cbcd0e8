"""The Triton kernel that reads KV from peers' memory into an engine's own: one launch for a group.

Every argument but the width of a row is a number that the kernel is not compiled for, addresses
included. So a model has one form of it for each width, which is compiled when an engine starts and
never while it serves.

Importing this module imports Triton, which only CUDA (or Triton's interpreter) has a use for.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from shoal.runtime.engine.kernels.words_in_memory import one_form, words

WORD_BYTES = 8
"""What is copied: eight bytes at a time, whatever the type of the KV cache is."""
ALIGNMENT = 16
"""Rows begin at multiples of so many bytes, so that a thread may read two words at once."""
PROGRAMS = 32
"""The most programs of a launch. On two H200s, 32 read 340 GB/s from a peer, and 16 read 315; with
few, steps of another stream keep their processors."""
_TILE_WORDS = 2048
_WARPS = 8


class Strides(NamedTuple):
    """Bytes between rows, in the source's pages and in the target's."""

    source_head: int
    source_token: int
    target_head: int
    target_token: int


@one_form
def _copy_kernel(  # type: ignore[no-untyped-def]
    table,
    runs,
    layers,
    heads,
    source_head,
    source_token,
    target_head,
    target_token,
    row_words: tl.constexpr,
    tile_words: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Copy each run of each layer; a program takes every ``num_programs(0)``-th of these.

    ``table`` has the addresses of the runs in the source, in the target, the numbers of their rows
    (a row is what a head has of a token), and what has to be added for each layer to addresses in
    the source and in the target.
    """
    of_source = words(table)
    of_target = of_source + runs
    of_rows = of_target + runs
    of_source_layer = of_rows + runs
    of_target_layer = of_source_layer + layers
    word = tl.arange(0, tile_words)
    item = tl.program_id(0)
    while item < runs * layers:
        run = item // layers
        layer = item % layers
        source = words(tl.load(of_source + run) + tl.load(of_source_layer + layer))
        target = words(tl.load(of_target + run) + tl.load(of_target_layer + layer))
        rows = tl.load(of_rows + run).to(tl.int32)
        for begin in range(0, rows, tile_rows):
            row = begin + tl.arange(0, tile_rows)
            head, token = row % heads, row // heads
            read = (head * source_head + token * source_token) // 8
            written = (head * target_head + token * target_token) // 8
            mask = (row < rows)[:, None]
            if tile_words != row_words:
                mask = mask & (word < row_words)[None, :]
            read_from = tl.multiple_of(source + (read[:, None] + word[None, :]), [16, 16])
            write_to = tl.multiple_of(target + (written[:, None] + word[None, :]), [16, 16])
            tl.store(write_to, tl.load(read_from, mask=mask), mask=mask)
        item += tl.num_programs(0)


def copy(
    table: int,
    runs: int,
    layers: int,
    heads: int,
    strides: Strides,
    row_bytes: int,
    programs: int = PROGRAMS,
) -> None:
    """Launch the kernel on the current stream.

    Args:
        table: address of the numbers that ``_copy_kernel`` describes, int64 on this device.
        runs: number of runs.
        layers: number of layers.
        heads: heads of a run.
        strides: between rows.
        row_bytes: size of a row.
        programs: most programs.
    """
    row_words = row_bytes // WORD_BYTES
    tile_words = triton.next_power_of_2(row_words)
    _copy_kernel[(max(1, min(programs, runs * layers)),)](
        table,
        runs,
        layers,
        heads,
        *strides,
        row_words=row_words,
        tile_words=tile_words,
        tile_rows=max(1, _TILE_WORDS // tile_words),
        num_warps=_WARPS,
    )
