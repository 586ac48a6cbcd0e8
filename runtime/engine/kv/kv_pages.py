"""Where the KV of each layer, head and token lies in an engine's buffer, by layout.

Every engine of a node has the same buffer, so one description is enough for all of them. A page is
what one block holds of one layer. Pages have the same bytes in every layout without stages, and
begin at the same places; only their insides differ (``kv_geometry.py``). A stage has fewer layers,
and a page of it takes the bytes of several pages of DP that follow one another in the same block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import Layout


class Page(NamedTuple):
    """The inside of a page in one layout; strides are in bytes.

    Attention kernels may divide a block into several blocks of their own. Then a page is one of
    these, and ``per_block`` says how many there are.
    """

    heads: int
    tokens: int
    per_block: int
    stride: int
    """From one page of a layer to the next."""
    head_stride: int
    token_stride: int


class Side(NamedTuple):
    """The pages of one side of a copy: of what is read, or of what is written."""

    page: Page
    layers: tuple[int, ...]
    """Where each layer's first page begins, in bytes from the beginning of the memory."""
    packed: bool = False
    """Whether this is memory that no attention kernel reads, in which tokens follow one another."""


@dataclass(frozen=True)
class KvPages:
    """The pages of one KV group: of layers that share their block tables."""

    geometry: KvGeometry
    layers: tuple[int, ...]
    """Where each layer's first page begins, in bytes from the beginning of the buffer."""
    stride: int
    """Bytes from one block of a layer to the next."""
    token_bytes: int
    """Of one token and head: key and value."""
    head_major: bool
    """Whether a head's tokens are adjacent (HND), and not a token's heads (NHD)."""
    kernel_tokens: Callable[[int], int] = lambda tokens: tokens
    """From the tokens of a block to those of the blocks into which attention kernels divide it."""

    def page(self, layout: Layout) -> Page:
        """Return the inside of a page in a layout."""
        _, heads, block_tokens = self.geometry.block(layout)
        tokens = self.kernel_tokens(block_tokens)
        per_block = block_tokens // tokens
        strides = (tokens, 1) if self.head_major else (1, heads)
        head_stride, token_stride = (stride * self.token_bytes for stride in strides)
        stride = self.stride // per_block
        return Page(heads, tokens, per_block, stride, head_stride, token_stride)

    def side(self, layout: Layout, layers: range) -> Side:
        """Return the pages of an engine's buffer in a layout.

        Args:
            layout: the layout. If it has stages, the layers of a block must be adjacent, as
                ``engine_config.blocks_outermost`` has them.
            layers: numbers of layers in the whole model, all of one stage.
        """
        stage = self.geometry.block(layout).layers
        begins = tuple(self.layers[layer % stage * layout.pp] for layer in layers)
        return Side(self.page(layout), begins)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers: the same in every layout."""
        return len(self.layers) * self.geometry.heads * self.geometry.tokens * self.token_bytes
