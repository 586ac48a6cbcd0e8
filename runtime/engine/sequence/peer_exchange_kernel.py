"""Triton kernels behind ``peer_exchange``: one launch each, straight from and to members' memory.

Every argument is a number, addresses included, and no kernel is compiled for their values. So each
kernel has one form, which is compiled when a group connects and never while it serves, and a
launch inspects no tensor. That matters because a step by sequence launches three kernels for each
layer, and hosts are slower than GPUs there.

Importing this module imports Triton, which only CUDA (or Triton's interpreter) has a use for.
"""

import torch
import triton
import triton.language as tl

from shoal.runtime.engine.groups.peer_memory import WORD
from shoal.runtime.engine.kernels.words_in_memory import one_form, words

_TILE = 512
"""Words that a program copies."""


@one_form
def _give_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    query_stride,
    key_stride,
    value_stride,
    query_words,
    key_words,
    value_words,
    slots,
    place,
    members,
    members_per_head,
    tokens,
    tile: tl.constexpr,
):
    """Write the heads that a member keeps, of token ``program_id(0)``, to that member's slot."""
    token = tl.program_id(0)
    # Each member begins with its next neighbour, so they do not all write to one at once.
    member = (place + 1 + tl.program_id(1)) % members
    word = tl.program_id(2) * tile + tl.arange(0, tile)
    key_word = word - query_words
    value_word = key_word - key_words
    width = query_words + key_words + value_words
    head = member // members_per_head
    row = token.to(tl.int64)
    query_row = words(query) + row * query_stride + member * query_words
    key_row = words(key) + row * key_stride + head * key_words
    value_row = words(value) + row * value_stride + head * value_words
    # Each word belongs to one of the three, and is not read from the other two.
    read = tl.load(query_row + word, mask=word < query_words, other=0)
    read |= tl.load(key_row + key_word, mask=(key_word >= 0) & (key_word < key_words), other=0)
    read |= tl.load(
        value_row + value_word, mask=(value_word >= 0) & (value_word < value_words), other=0
    )
    slot = words(tl.load(words(slots) + member))
    tl.store(slot + (place * tokens + row) * width + word, read, mask=word < width)


@one_form
def _take_kernel(  # type: ignore[no-untyped-def]
    out,
    out_stride,
    member_stride,
    width,
    slots,
    place,
    members,
    first,
    tile: tl.constexpr,
):
    """Read row ``first + program_id(0)`` of a member's slot to where it belongs."""
    row = tl.program_id(0).to(tl.int64)
    member = (place + 1 + tl.program_id(1)) % members
    word = tl.program_id(2) * tile + tl.arange(0, tile)
    slot = words(tl.load(words(slots) + member))
    read = tl.load(slot + (first + row) * width + word, mask=word < width, other=0)
    start = row * out_stride + member.to(tl.int64) * member_stride
    tl.store(words(out) + start + word, read, mask=word < width)


def give(
    tensors: list[torch.Tensor],
    widths: list[int],
    slots: torch.Tensor,
    place: int,
    members_per_head: int,
) -> None:
    """Write each member's heads of queries, keys and values to its slot, in this member's rows.

    Args:
        tensors: queries, keys and values, ``[tokens, heads, size]`` each; a token's heads are
            contiguous and fill whole words.
        widths: words of a token that a member keeps of each tensor.
        slots: address of every member's slot, ``[members * tokens, words]``; int64, ``[members]``.
        place: this member's place.
        members_per_head: how many members, which are neighbours, keep the same keys and values.
    """
    tokens, members = tensors[0].shape[0], slots.shape[0]
    _give_kernel[(tokens, members, triton.cdiv(sum(widths), _TILE))](
        *(tensor.data_ptr() for tensor in tensors),
        *(tensor.stride(0) * tensor.element_size() // WORD.itemsize for tensor in tensors),
        *widths,
        slots.data_ptr(),
        place,
        members,
        members_per_head,
        tokens,
        tile=_TILE,
    )


def take(
    out: torch.Tensor,
    rows: int,
    strides: tuple[int, int],
    width: int,
    slots: torch.Tensor,
    place: int,
    first: int,
) -> None:
    """Read rows ``[rows, width]`` of every member's slot.

    Args:
        out: contiguous; written to.
        rows: how many to read of each member's slot.
        strides: words of ``out`` from one row to the next, and from one member to the next.
        width: words of a row.
        slots: address of every member's slot, int64, ``[members]``.
        place: this member's place.
        first: first row to read of a slot.
    """
    members = slots.shape[0]
    _take_kernel[(rows, members, triton.cdiv(width, _TILE))](
        out.data_ptr(), *strides, width, slots.data_ptr(), place, members, first, tile=_TILE
    )
