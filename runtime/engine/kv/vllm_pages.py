"""The pages of an engine's KV buffer, as vLLM has made them."""

from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import KVCacheLayout, MLAAttentionSpec
from vllm.v1.worker.utils import select_common_block_size

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.cpu_pages import page_order
from shoal.runtime.engine.kv.host_copy import plain_order
from shoal.runtime.engine.kv.kv_pages import KvPages, Page
from shoal.runtime.served_kv import KV_TYPES

_HEAD_MAJOR = {
    KVCacheLayout.LBHNC: True,
    KVCacheLayout.BLHNC: True,
    KVCacheLayout.LBNHC: False,
    KVCacheLayout.BLNHC: False,
}
"""Orders in which a block of a layer is contiguous, by whether its heads are outermost."""


def pages_of(model_runner: Any) -> list[KvPages]:
    """Return the pages of each KV group of a model.

    Args:
        model_runner: vLLM's, of DP.

    Raises:
        NotSharedError: other engines cannot tell where a token's KV is.
    """
    config, cache = model_runner.kv_cache_config, model_runner.cache_config
    if cache.cache_dtype not in KV_TYPES:
        raise NotSharedError(f"KV of type {cache.cache_dtype} cannot be divided otherwise")
    layout = cache.get_resolved_kv_cache_layout()
    if layout not in _HEAD_MAJOR:
        raise NotSharedError(f"KV in the order {layout.name} cannot be divided otherwise")
    return [
        _pages(model_runner, config, index, head_major=_HEAD_MAJOR[layout])
        for index in range(len(config.kv_cache_groups))
    ]


def _pages(model_runner: Any, config: Any, index: int, *, head_major: bool) -> KvPages:
    group = config.kv_cache_groups[index]
    spec, names = group.kv_cache_spec, set(group.layer_names)
    tensors = [t for t in config.kv_cache_tensors if not names.isdisjoint(t.layers)]
    strides = {tensor.block_stride for tensor in tensors}
    if len(strides) != 1 or spec.get_num_kernel_states(spec.block_size) != spec.block_size:
        raise NotSharedError(f"KV of {type(spec).__name__} cannot be divided otherwise")
    layers = tuple(
        tensor.offset + nth * tensor.layer_stride
        for tensor in tensors
        for nth in range(len(tensor.layers))
    )
    attention = model_runner.attn_groups[index]
    # vLLM divides no blocks that other layers' pages lie between (``prepare_kernel_block_sizes``).
    divided = not any(tensor.block_stride > tensor.layer_stride for tensor in tensors)
    return KvPages(
        KvGeometry(len(layers), spec.num_heads, spec.block_size),
        layers,
        strides.pop(),
        spec.state_content_size_bytes,
        head_major,
        partial(_kernel_tokens, attention if divided else []),
    )


def _kernel_tokens(attention: list[Any], tokens: int) -> int:
    """Return the tokens of the blocks into which attention divides one of so many tokens."""
    return int(select_common_block_size(tokens, [group.backend for group in attention]))


def element_order(model_runner: Any, group: int, page: Page) -> torch.Tensor:
    """Return where the elements of each token of a head are, on CPUs.

    Args:
        model_runner: vLLM's, of DP.
        group: the KV group.
        page: a page of the group in any layout.

    Returns:
        ``[tokens, elements of a token]``, in elements from where the head's part of a page begins.
    """
    spec = model_runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec
    if isinstance(spec, MLAAttentionSpec):  # vLLM packs no latents
        return plain_order(page, spec.state_content_size_bytes, spec.dtype.itemsize)
    kind, cache = model_runner.model_config.dtype, model_runner.cache_config.cache_dtype
    isa = _get_attn_isa(kind, page.tokens, spec.head_size, cache)
    return page_order(page.tokens, spec.head_size, kind, cache, isa)
