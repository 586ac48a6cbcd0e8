"""What one layout of an engine can hold, as engines tell the controller."""

import msgspec

from shoal.policies.values.kv_need import ONE_GROUP, blocks_for, tokens_in
from shoal.policies.values.layouts import Layout


class LayoutLimits(msgspec.Struct, frozen=True):
    """What one layout of an engine can hold."""

    layout: Layout
    block_tokens: int
    """Tokens of one KV block under this layout."""
    max_num_seqs: int
    max_model_len: int
    sp_floor: int | None = None
    """A step in SP batches more tokens than this; None: this layout has no SP."""
    group_limits: tuple[int, ...] = ONE_GROUP
    """For each KV group the most blocks that a request takes of it; 0: no limit."""
    mixed_tokens: int = 0
    """Most prompt tokens of a step in which requests decode; 0: as many as of any step."""
    full_graph_tokens: int = 0
    """Steps with prompts have full CUDA graphs up to so many tokens; 0: they have none."""

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks a request of so many tokens takes."""
        return blocks_for(tokens, self.block_tokens, self.group_limits)

    def tokens(self, blocks: int) -> int:
        """Return how many tokens the longest request has that takes no more than these blocks."""
        return tokens_in(blocks, self.block_tokens, self.group_limits)
