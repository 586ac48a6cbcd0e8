"""The groups of KV blocks of a model: which can be served, and how many blocks a request takes."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

SERVED_TOGETHER = {FullAttentionSpec, SlidingWindowSpec}
"""Kinds of groups of KV blocks that a model may have side by side."""


class UnservedKVGroups(ValueError):
    """vLLM keeps groups of KV blocks that Shoal cannot serve together; the message is one line."""


def check_kv_groups(cache: Any, *, stages: int = 1) -> None:
    """Refuse a model whose groups of KV blocks are of kinds that Shoal cannot count or carry.

    Layers of all tokens, and layers of a sliding window, may be in groups of their own. Their
    blocks must have the same tokens, because a layout is one length of blocks to Shoal.

    Args:
        cache: vLLM's ``KVCacheConfig``.
        stages: pipeline stages of the layout. The groups of a stage's layers are other ones than
            DP's, so with several groups its blocks would not be DP's blocks.

    Raises:
        UnservedKVGroups: there are several groups, and not all are of these kinds, or the layout
            has stages.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if stages > 1 and len(specs) > 1:
        raise UnservedKVGroups(
            f"vLLM keeps {len(specs)} groups of KV blocks for this model, and a pipeline can have "
            "one: --max-pp 1 serves it, and --disable-hybrid-kv-cache-manager may make them one"
        )
    kinds, sizes = {type(spec) for spec in specs}, {spec.block_size for spec in specs}
    if len(specs) > 1 and (kinds - SERVED_TOGETHER or len(sizes) > 1):
        names = ", ".join(f"{type(spec).__name__} of {spec.block_size} tokens" for spec in specs)
        raise UnservedKVGroups(
            f"vLLM keeps {len(specs)} groups of KV blocks for this model ({names}), which Shoal "
            "cannot serve together: --disable-hybrid-kv-cache-manager may make them one"
        )


def group_limits(managers: Sequence[Any]) -> tuple[int, ...]:
    """Return for each group of KV blocks how many of them a request takes at most (``kv_need``).

    One group has no limit: so many requests with a sliding window are not counted on.

    Args:
        managers: vLLM's ``SingleTypeKVCacheManager`` of every group.
    """
    limits = [manager.max_admission_blocks_per_request or 0 for manager in managers]
    if 0 not in limits:
        limits[limits.index(max(limits))] = 0
    return tuple(limits)
