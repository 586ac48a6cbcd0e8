"""How many KV blocks a request takes, where layers keep different tokens.

vLLM puts layers that attend to all tokens, and layers that attend to a sliding window, into *KV
groups* of their own. A block belongs to one group at a time, and a request takes blocks of every
group: of a window's group only so many as the window spans (vLLM's ``KVCacheCoordinator``, and
``SlidingWindowSpec.max_admission_blocks_per_request``).
"""

from collections.abc import Sequence

ONE_GROUP = (0,)
"""The limits of a model whose layers all keep the same tokens."""


def blocks_for(tokens: int, block_tokens: int, limits: Sequence[int] = ONE_GROUP) -> int:
    """Return how many blocks a request of so many tokens takes.

    Args:
        tokens: the tokens.
        block_tokens: tokens of one block.
        limits: for each KV group the most blocks that a request takes of it; 0: no limit.
    """
    rows = -(-tokens // block_tokens)
    return sum(min(rows, limit) if limit else rows for limit in limits)


def tokens_in(blocks: int, block_tokens: int, limits: Sequence[int] = ONE_GROUP) -> int:
    """Return how many tokens the longest request has that takes no more than so many blocks.

    Args:
        blocks: the blocks.
        block_tokens: tokens of one block.
        limits: see ``blocks_for``; one of them at least is 0.
    """
    rows, growing, left = 0, len(limits), blocks
    for limit in sorted(limit for limit in limits if limit):
        added = min(limit - rows, left // growing)
        rows, left = rows + added, left - added * growing
        if rows < limit:
            return rows * block_tokens
        growing -= 1
    return (rows + left // growing) * block_tokens
