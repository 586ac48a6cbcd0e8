"""That pages are where vLLM's own views have them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    create_kv_cache_views,
)

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.vllm_pages import element_order, pages_of

BLOCKS, HEADS, TOKENS, SIZE = 6, 8, 16, 8
LAYERS = 3
ORDERS = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC]


class Backend:
    """An attention backend that divides blocks of more than 32 tokens."""

    sizes: tuple[Any, ...] = (16, 32)

    @classmethod
    def get_supported_kernel_block_sizes(cls, _spec: object = None) -> list[Any]:
        return list(cls.sizes)

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__


class WholeBackend(Backend):
    sizes = (MultipleOf(16),)


def config_of(
    layout: KVCacheLayout, heads: int, tokens: int, dtype: torch.dtype, layers: int = LAYERS
) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=SIZE, dtype=dtype)
    page, names = spec.page_size_bytes, [str(i) for i in range(layers)]
    outermost = layout.is_block_outermost
    tensor = KVCacheTensor(
        size=page * BLOCKS * layers,
        layers=names,
        layer_stride=page if outermost else page * BLOCKS,
        block_stride=page * layers if outermost else page,
    )
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])


def model_runner(
    layout: KVCacheLayout,
    dtype: torch.dtype = torch.bfloat16,
    backend: type = WholeBackend,
    cache_dtype: str = "auto",
    layers: int = LAYERS,
) -> Any:
    return SimpleNamespace(
        kv_cache_config=config_of(layout, HEADS, TOKENS, dtype, layers),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, get_resolved_kv_cache_layout=lambda: layout
        ),
        model_config=SimpleNamespace(dtype=dtype),
        attn_groups=[[SimpleNamespace(backend=backend)]],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("backend", [Backend, WholeBackend])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("layout", ORDERS)
def test_every_token_of_every_head_is_where_vllm_has_it(
    layout: KVCacheLayout, tp: int, backend: type, dtype: torch.dtype
) -> None:
    (pages,) = pages_of(model_runner(layout, dtype, backend))
    inside = pages.page(Layout(tp=tp))
    parts = min(tp, HEADS)
    heads, tokens = HEADS // parts, TOKENS * parts
    assert (inside.heads, inside.tokens * inside.per_block) == (heads, tokens)
    config = config_of(layout, heads, tokens, dtype)
    (tensor,), (group,) = config.kv_cache_tensors, config.kv_cache_groups
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    views = create_kv_cache_views(
        raw, group.kv_cache_spec, BLOCKS, layout, tensor, kernel_block_size=inside.tokens
    )
    assert len(views) == len(pages.layers)
    size = dtype.itemsize
    for view, first in zip(views, pages.layers, strict=True):
        assert (view.data_ptr() - raw.data_ptr()) == first
        assert view.shape[1:3] == (heads, inside.tokens)
        assert view.shape[3] * size == pages.token_bytes
        found = [(n, view.stride(n) * size) for n in range(3) if view.shape[n] > 1]
        strides = (inside.stride, inside.head_stride, inside.token_stride)
        assert found == [(n, strides[n]) for n, _ in found]


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC])
@pytest.mark.parametrize("kind", [Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)])
def test_every_token_of_a_stage_is_where_vllm_has_it(layout: KVCacheLayout, kind: Layout) -> None:
    (pages,) = pages_of(model_runner(layout, layers=8))
    raw, views = views_of_stage(layout, kind)
    for stage in range(kind.pp):
        layers = range(stage * 8 // kind.pp, (stage + 1) * 8 // kind.pp)
        page, begins, _ = pages.side(kind, layers)
        assert begins == tuple(view.data_ptr() - raw.data_ptr() for view in views)
        size = views[0].element_size()
        assert (page.stride, page.head_stride, page.token_stride) == tuple(
            stride * size for stride in views[0].stride()[:3]
        )
        assert views[0].shape[1:3] == (page.heads, page.tokens)


@pytest.mark.parametrize("layout", ORDERS)
def test_a_stages_block_is_the_bytes_of_the_same_block_only_where_blocks_are_outermost(
    layout: KVCacheLayout,
) -> None:
    raw, views = views_of_stage(layout, Layout(pp=2))
    for view in views:
        view[3] = 1
    written = raw.view(torch.int8).nonzero().flatten()
    of_block = raw.numel() // BLOCKS
    alone = set((written // of_block).tolist()) == {3}
    assert alone == layout.is_block_outermost
    if alone:
        return
    raw.zero_()
    _, full = views_of_stage(layout, Layout(), raw)
    for view in views:
        view[3] = 1
    hit = {block for view in full for block in range(BLOCKS) if view[block].any()}
    assert hit != {3}, "the control: DP's other blocks are damaged"


def views_of_stage(
    layout: KVCacheLayout, kind: Layout, raw: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return vLLM's views of the layers of any stage of a model with 8 layers."""
    layers, heads, tokens = 8 // kind.pp, HEADS // kind.tp, TOKENS * kind.tp * kind.pp
    config = config_of(layout, heads, tokens, torch.bfloat16, layers)
    (tensor,), (group,) = config.kv_cache_tensors, config.kv_cache_groups
    raw = torch.zeros(tensor.size, dtype=torch.int8) if raw is None else raw
    return raw, create_kv_cache_views(raw, group.kv_cache_spec, BLOCKS, layout, tensor)


def test_kv_that_other_engines_could_not_divide_is_refused_by_name() -> None:
    with pytest.raises(NotSharedError, match="fp8_per_token_head"):
        pages_of(model_runner(KVCacheLayout.LBHNC, cache_dtype="fp8_per_token_head"))
    with pytest.raises(NotSharedError, match="LHBNC"):
        pages_of(model_runner(KVCacheLayout.LHBNC))


def test_the_order_of_a_page_depends_on_its_tokens() -> None:
    runner = model_runner(KVCacheLayout.LBHNC, torch.float32)
    runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=32, num_kv_heads=HEADS, head_size=32, dtype=torch.float32
    )
    (pages,) = pages_of(runner)
    for tp in (1, 2):
        page = pages.page(Layout(tp=tp))
        assert element_order(runner, 0, page).shape == (32 * tp, 64)


def test_every_member_has_the_whole_latent_of_as_many_tokens_as_an_engine() -> None:
    """MLA: one head, of one vector, whose elements are adjacent on CPUs too."""
    runner = model_runner(KVCacheLayout.LBNHC, torch.float32)
    runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec = MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=SIZE, dtype=torch.float32
    )
    (pages,) = pages_of(runner)
    for tp in (1, 2, 8):
        page = pages.page(Layout(tp=tp))
        assert (page.heads, page.tokens * page.per_block) == (1, TOKENS)
        assert pages.token_bytes == page.token_stride == SIZE * 4
        order = element_order(runner, 0, page)
        assert torch.equal(order.flatten(), torch.arange(TOKENS * SIZE))
