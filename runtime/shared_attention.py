"""Whether engines that share weights also share those of attention's projections."""


def is_attention_shared(kv_heads: int, share: int, widest: int, max_sp: int) -> bool:
    """Return whether each engine keeps only its heads of attention, and not all.

    The KV heads have to be divided, not held several times. And the heads of an engine in a wider
    layout have to be among those that it keeps. The order of heads (``head_order.head_shard``) is
    that of SP. It is nested as the parts of MLPs are where each base of SP has two members.

    Args:
        kv_heads: of a layer of the whole model.
        share: how many engines share weights; 1: none.
        widest: TP members of the widest layout.
        max_sp: largest SP degree.
    """
    return share > 1 and kv_heads % share == 0 and (share >= widest or max_sp == 2)
