"""How much of the KV cache one block holds in each layout: the same bytes, divided differently.

All layouts of an engine share one KV buffer, and a block is the same bytes of it in each of them
(the KV cache adaptor of Flying Serving, 4.2). A member that holds fewer heads, or fewer layers,
therefore has room for more tokens in a block.
"""

from typing import NamedTuple

import msgspec

from shoal.policies.values.layouts import Layout


class KvBlock(NamedTuple):
    """What one block of one member holds."""

    layers: int
    heads: int
    """KV heads of each layer."""
    tokens: int


class KvGeometry(msgspec.Struct, frozen=True):
    """The blocks of one KV group of a model, that is, of layers that share their block tables."""

    layers: int
    """All layers of the group, in every stage."""
    heads: int
    """KV heads of each layer, in all members together."""
    tokens: int
    """Tokens of a block in DP."""

    def block(self, layout: Layout) -> KvBlock:
        """Return what a block holds in a layout.

        Where there are more members than KV heads, some members hold the same head as others, so
        their blocks hold no more tokens than with one member for each head. Where the stages do not
        divide the layers evenly, the blocks are those of the stage with the most layers; other
        stages leave some of a block's bytes unused.
        """
        layers = -(-self.layers // layout.pp)
        parts = min(layout.tp, self.heads)
        return KvBlock(layers, self.heads // parts, self.tokens * parts * (self.layers // layers))
