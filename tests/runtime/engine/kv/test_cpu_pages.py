"""The inside of a page of the CPU's KV cache, and that KV is right in a page of another size."""

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from shoal.runtime.engine.kv.cpu_pages import page_order


def isa_of(dtype: torch.dtype, tokens: int, size: int, cache_dtype: str) -> str:
    try:
        return _get_attn_isa(dtype, tokens, size, cache_dtype)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def written(
    key: torch.Tensor, value: torch.Tensor, tokens: int, isa: str, cache_dtype: str
) -> torch.Tensor:
    """Return the page of one head into which vLLM writes keys and values."""
    quantised = cache_dtype != "auto"
    kind = torch.uint8 if quantised else key.dtype
    page = torch.zeros(1, 1, 2 * tokens, key.shape[2], dtype=kind)
    keys, values = page.chunk(2, dim=2)
    slots = torch.arange(len(key))
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa, 0.5, 0.25, cache_dtype)
    return page.view(-1)


@pytest.mark.parametrize("size", [32, 80, 128])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, "auto"),
        (torch.bfloat16, "auto"),
        (torch.float16, "auto"),
        (torch.bfloat16, "fp8"),
        (torch.bfloat16, "fp8_e5m2"),
    ],
)
@pytest.mark.parametrize(("source", "target"), [(32, 128), (128, 32), (64, 64)])
def test_tokens_of_a_page_are_right_in_a_page_of_another_size(
    source: int, target: int, dtype: torch.dtype, cache_dtype: str, size: int
) -> None:
    isas = [isa_of(dtype, tokens, size, cache_dtype) for tokens in (source, target)]
    count = min(source, target)
    key, value = (torch.randn(count, 1, size).to(dtype) for _ in range(2))
    page = written(key, value, source, isas[0], cache_dtype)
    expected = written(key, value, target, isas[1], cache_dtype)
    read, order = (
        page_order(tokens, size, dtype, cache_dtype, isa)[:count]
        for tokens, isa in zip((source, target), isas, strict=True)
    )
    found = torch.zeros_like(expected)
    found[order] = page[read]
    assert found.equal(expected)
    assert expected.any()


def test_bytes_as_they_lie_would_be_wrong() -> None:
    """Keys are packed: this is what the order is for."""
    isa = isa_of(torch.float32, 32, 32, "auto")
    order = page_order(32, 32, torch.float32, "auto", isa)
    assert not order[:, :32].reshape(-1).equal(torch.arange(32 * 32))
    assert order.reshape(-1).sort().values.equal(torch.arange(2 * 32 * 32))
