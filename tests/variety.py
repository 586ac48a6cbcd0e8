"""Whether a model's greedy output varies enough for a damaged KV cache to show in it."""

from collections.abc import Sequence

MIN_DISTINCT = 20
LONGEST_LOOP = 4
LOOP_TOKENS = 12


def distinct(tokens: Sequence[int]) -> int:
    """Return how many different tokens there are."""
    return len(set(tokens))


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return whether the last 12 tokens only repeat the first one to four of them."""
    tail = list(tokens[-LOOP_TOKENS:])
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_LOOP + 1))


def is_varied(outputs: Sequence[Sequence[int]]) -> bool:
    """Return whether outputs of 32 tokens have 20 distinct ones on average and none loops."""
    mean = sum(map(distinct, outputs)) / len(outputs)
    return mean >= MIN_DISTINCT and not any(map(ends_in_loop, outputs))
