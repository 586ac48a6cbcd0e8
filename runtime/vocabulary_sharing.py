"""Whether engines that share weights also share those of the vocabulary, and how they stream them.

The embeddings are not streamed: a step reads the rows of its tokens where engines keep them. The LM
head is streamed in pieces, which follow the layers. So its slots have room for a piece only.
"""

PIECE_BYTES = 64 << 20
"""The most bytes of a piece that are in a slot, where the number of rows allows it. A smaller piece
takes less memory from KV, and more copies and products in each step."""
_ALIGNMENT = 256
"""Where pieces begin in an engine's memory: at multiples of so many bytes, as kernels like it."""


def is_vocabulary_shared(tied: bool, share: int, widest: int) -> bool:
    """Return whether each engine keeps a part of the embeddings and of the LM head only.

    Members have ranges of the vocabulary in the order of their ranks. So in a layout of more
    members than share weights, an engine would not keep its own range. An LM head that is the
    embeddings, too, stays whole: such models are small, or their vocabulary is a small part.

    Args:
        tied: whether the LM head is the embeddings.
        share: how many engines share weights; 1: none.
        widest: TP members of the widest layout.
    """
    return not tied and share > 1 and share >= widest


def held_parts(share: int) -> int:
    """Return how many parts of what is streamed slots have room for.

    Two engines use their own part where they keep it (``WholeWeights``).
    """
    return 1 if share == 2 else share


def head_pieces(rows: int, row_bytes: int, share: int) -> int:
    """Return in how many pieces the LM head is streamed.

    Args:
        rows: of the part that an engine keeps.
        row_bytes: of each.
        share: how many engines share weights.
    """
    pieces = 1
    while held_parts(share) * rows * row_bytes > pieces * PIECE_BYTES:
        if rows % (2 * pieces) or rows // (2 * pieces) * row_bytes % _ALIGNMENT:
            break
        pieces *= 2
    return pieces
