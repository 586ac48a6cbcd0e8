"""Which parts of a KV buffer have memory, where layers or blocks are outermost."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheTensor

from shoal.runtime.engine.kv.backing import KvBacking
from shoal.runtime.engine.kv.kv_memory import HostMemory
from shoal.runtime.engine.weights.sharing.pages import HostPages

PAGE = HostPages.page
LAYERS, BLOCKS = 3, 10
BLOCK = PAGE  # of one layer


def config_of(*, blocks_outermost: bool = False, block: int = BLOCK) -> Any:
    size = LAYERS * BLOCKS * block
    strides = (block, LAYERS * block) if blocks_outermost else (BLOCKS * block, block)
    tensor = KVCacheTensor(size, [f"layer{n}" for n in range(LAYERS)], *strides)
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[tensor])


@pytest.fixture
def buffer() -> Iterator[tuple[torch.Tensor, int]]:
    memory = HostMemory("test")
    raw = memory.allocate(LAYERS * BLOCKS * BLOCK)
    yield raw, memory.handle(raw)["file"]
    memory.release(raw)


def resident(file: int) -> int:
    return os.fstat(file).st_blocks * 512


@pytest.mark.parametrize("blocks_outermost", [False, True])
def test_blocks_lose_their_memory_and_get_it_again(
    buffer: tuple[torch.Tensor, int], blocks_outermost: bool
) -> None:
    raw, file = buffer
    raw.fill_(7)
    backing = KvBacking(raw, file, config_of(blocks_outermost=blocks_outermost), HostPages())
    backing.keep(6)
    assert resident(file) == LAYERS * 6 * BLOCK
    shape = (BLOCKS, LAYERS, BLOCK) if blocks_outermost else (LAYERS, BLOCKS, BLOCK)
    blocks = raw.view(shape)
    kept = blocks[:6] if blocks_outermost else blocks[:, :6]
    assert (kept == 7).all()
    kept.fill_(8)
    backing.keep_all()
    assert (kept == 8).all()
    rest = blocks[6:] if blocks_outermost else blocks[:, 6:]
    assert (rest == 0).all()
    rest.fill_(1)
    assert resident(file) == raw.nbytes


def test_keeping_fewer_or_more_than_before_is_one_step(buffer: tuple[torch.Tensor, int]) -> None:
    raw, file = buffer
    raw.fill_(7)
    backing = KvBacking(raw, file, config_of(), HostPages())
    for blocks in (4, 6, 2):
        backing.keep(blocks)
        raw.view(LAYERS, BLOCKS, BLOCK)[:, :blocks].fill_(7)
        assert resident(file) == LAYERS * blocks * BLOCK


@pytest.mark.parametrize(
    ("size", "kept"),
    [(0, 10), (1, 9), (LAYERS * BLOCK, 9), (LAYERS * BLOCK + 1, 8), (30 * BLOCK, 0)],
)
def test_as_many_blocks_are_kept_as_can_be(
    buffer: tuple[torch.Tensor, int], size: int, kept: int
) -> None:
    backing = KvBacking(*buffer, config_of(), HostPages())
    assert backing.blocks_without(size) == kept
    assert backing.blocks_without(30 * BLOCK + 1) == -1


def test_pages_that_hold_parts_of_blocks_that_stay_keep_their_memory(
    buffer: tuple[torch.Tensor, int],
) -> None:
    raw, file = buffer[0][: LAYERS * BLOCKS * (BLOCK - 512)], buffer[1]
    raw.fill_(7)
    config = config_of(block=BLOCK - 512)
    backing = KvBacking(raw, file, config, HostPages())
    first = backing.blocks_without(LAYERS * BLOCK)
    assert first == 8, "of one block in each layer no whole page could be given up"
    backing.keep(first)
    for layer in range(LAYERS):
        begin = layer * BLOCKS * (BLOCK - 512)
        assert (raw[begin : begin + first * (BLOCK - 512)] == 7).all()


def test_groups_of_layers_that_share_bytes_lose_none_that_a_kept_block_has(
    buffer: tuple[torch.Tensor, int],
) -> None:
    raw, file = buffer
    raw.fill_(7)
    config = config_of()
    (whole,) = config.kv_cache_tensors
    two = KVCacheTensor(whole.size, ["window0"], whole.layer_stride, BLOCK, offset=BLOCKS * BLOCK)
    config.kv_cache_tensors.append(two)
    backing = KvBacking(raw, file, config, HostPages())
    backing.keep(5)
    assert resident(file) == LAYERS * 5 * BLOCK
