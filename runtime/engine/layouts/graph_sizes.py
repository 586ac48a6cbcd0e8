"""For how many tokens CUDA graphs are captured beyond vLLM's own sizes."""

from collections.abc import Sequence

SMALLEST_STEP = 8
"""The fewest tokens from one size to the next, as between most of vLLM's own sizes."""
SPACING = 16
"""Sizes of vLLM's own that are no multiple of this are left out: it has twice as many."""
LARGER_SPACING = 64
"""Tokens from one size to the next above the largest of vLLM's own."""
EVENLY_SPACED = 1024
"""Tokens above which sizes are an eighth apart (``larger_sizes``). With a size for every 64 tokens
there would be 112 graphs more up to 8,192 tokens, instead of 24."""


def larger_sizes(largest: int, most: int) -> list[int]:
    """Return sizes above ``largest`` for up to ``most`` tokens, which is the last of them.

    Each is at most an eighth, or ``SMALLEST_STEP`` tokens, larger than the one before: as much of a
    step may be padding. Above 512 tokens that is every 64, above 1,024 every 128.

    Args:
        largest: tokens of the largest graph that there is.
        most: tokens of the largest graph that there should be.
    """
    sizes: list[int] = []
    size = largest
    while size < most:
        eighth = (1 << size.bit_length() - 1) // 8  # of the power of two below
        step = max(SMALLEST_STEP, eighth)
        size = min((size // step + 1) * step, most)
        sizes.append(size)
    return sizes


def full_sizes(own: Sequence[int], most: int, *, chosen: bool = False) -> list[int]:
    """Return for how many tokens full graphs of steps with prompts are captured.

    Args:
        own: sizes for which vLLM captures piecewise graphs.
        most: tokens of the largest step that is to have one.
        chosen: whether somebody chose those sizes, and so wants no others.
    """
    fitting = sorted(size for size in own if size <= most)
    if chosen:
        return fitting
    first = (max(own) // LARGER_SPACING + 1) * LARGER_SPACING
    larger = range(first, min(most, EVENLY_SPACED) + 1, LARGER_SPACING)
    largest = larger_sizes(max(*own, EVENLY_SPACED), most)
    return [*(size for size in fitting if size % SPACING == 0), *larger, *largest]
