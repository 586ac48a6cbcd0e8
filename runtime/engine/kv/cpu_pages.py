"""How vLLM's attention on CPUs orders the inside of a head's page.

A page begins with the head's keys, packed in an order that depends on the processor, the type and
the number of tokens. vLLM does not say which, so its own operator is asked.
"""

import functools

import torch
from vllm import _custom_ops as ops

_DIGITS = 8
"""Numbers below this are exact in every type that a page may have."""


@functools.cache
def page_order(
    tokens: int, size: int, dtype: torch.dtype, cache_dtype: str, isa: str
) -> torch.Tensor:
    """Return which elements of a head's page each token has: its key, then its value.

    Args:
        tokens: tokens of a page.
        size: elements of a key, and of a value.
        dtype: of keys and values.
        cache_dtype: vLLM's name for the type of a page's elements; ``auto`` for ``dtype``.
        isa: vLLM's name for the instructions that attention uses.

    Returns:
        ``[tokens, 2 * size]``, int64.

    Raises:
        RuntimeError: a page does not consist of the elements of its tokens.
    """
    count = 2 * tokens * size
    numbers = torch.arange(count).view(2, tokens, 1, size)
    found, place = torch.zeros(count, dtype=torch.int64), 1
    while place < count:
        key, value = ((numbers // place) % _DIGITS).to(dtype)
        found += _page(key, value, cache_dtype, isa) * place
        place *= _DIGITS
    order = torch.empty_like(found)
    order[found] = torch.arange(count)
    if not found[order].equal(torch.arange(count)):
        raise RuntimeError("a page of the CPU's KV cache is not what was expected")
    return torch.cat(list(order.view(2, tokens, size)), dim=1)


def _page(key: torch.Tensor, value: torch.Tensor, cache_dtype: str, isa: str) -> torch.Tensor:
    """Return the page of one head that vLLM makes of keys and values, as whole numbers."""
    tokens, _, size = key.shape
    quantised = _FP8.get(cache_dtype)
    page = torch.zeros(1, 1, 2 * tokens, size, dtype=torch.uint8 if quantised else key.dtype)
    keys, values = page.chunk(2, dim=2)
    slots = torch.arange(tokens)
    ops.cpu_attn_reshape_and_cache(
        key.contiguous(), value.contiguous(), keys, values, slots, isa, kv_cache_dtype=cache_dtype
    )
    read = page.view(quantised) if quantised else page
    return read.view(-1).to(torch.float32).to(torch.int64)


_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
