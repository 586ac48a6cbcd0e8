"""One KV buffer for every layout of an engine, and the way from virtual to physical block ids.

A block has the same bytes in every layout (``kv_geometry.py``). So one raw buffer, one block count
and one set of physical ids serve all layouts (the KV cache adaptor of Flying Serving, 4.2).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import vllm.v1.worker.gpu.attn_utils as v2_attention
import vllm.v1.worker.gpu_model_runner as v1_runner
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, create_kv_cache_views

from shoal.runtime.engine.kv.carry_plan import NULL_BLOCK
from shoal.runtime.engine.kv.kv_lender import KvLender
from shoal.runtime.engine.kv.kv_memory import KvMemory, kv_memory


class SharedKVBuffer:
    """The one allocation behind the KV caches of every layout of this engine.

    Args:
        name: of the node's KV memory; see ``kv_memory``.
        lender: makes memory that weights can have, too; None: they cannot.
    """

    def __init__(self, name: str, lender: KvLender | None = None) -> None:
        self._name, self._lender = name, lender
        self._memory: KvMemory | None = None
        self._raw: torch.Tensor | None = None

    @property
    def raw(self) -> torch.Tensor:
        """All of it, int8.

        Raises:
            RuntimeError: the first layout has not allocated it yet.
        """
        if self._raw is None:
            raise RuntimeError("the KV buffer is allocated by the first layout's start")
        return self._raw

    @property
    def memory(self) -> KvMemory:
        """By which other engines can map it; errors are those of ``raw``."""
        assert self.raw is not None
        assert self._memory is not None
        return self._memory

    @property
    def num_bytes(self) -> int:
        """Size of the buffer; errors are those of ``raw``."""
        return int(self.raw.numel())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While active, vLLM's runners take their KV views from this buffer.

        Stands in for ``vllm.v1.worker.utils.allocate_kv_cache`` under the names by which the V1
        and V2 model runners call it.
        """
        modules: tuple[Any, ...] = (v1_runner, v2_attention)
        saved = [module.allocate_kv_cache for module in modules]
        for module in modules:
            module.allocate_kv_cache = self._views
        try:
            yield
        finally:
            for module, function in zip(modules, saved, strict=True):
                module.allocate_kv_cache = function

    def _views(
        self,
        config: KVCacheConfig,
        device: torch.device,
        layout: Any,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        (size,) = {tensor.size for tensor in config.kv_cache_tensors}
        if self._raw is None:
            lender = self._lender
            self._memory = (
                kv_memory(self._name, device)
                if lender is None
                else lender.memory(self._name, device, config)
            )
            self._raw = self._memory.allocate(size)
        if size != self._raw.numel():
            raise RuntimeError(
                f"a layout needs {size} bytes of KV cache, the shared buffer has {self.num_bytes}"
            )
        caches: dict[str, torch.Tensor] = {}
        for tensor in config.kv_cache_tensors:
            group_id, group = next(
                (index, group)
                for index, group in enumerate(config.kv_cache_groups)
                if tensor.layers[0] in group.layer_names
            )
            views = create_kv_cache_views(
                self._raw,
                group.kv_cache_spec,
                config.num_blocks_of(tensor),
                layout,
                tensor,
                kernel_block_size=kernel_block_sizes[group_id] if kernel_block_sizes else None,
            )
            caches.update(zip(tensor.layers, views, strict=True))
        return caches


class BlockMap:
    """A member's table from a group's virtual block ids to its own physical ids."""

    def __init__(self) -> None:
        self._physical: dict[int, int] = {NULL_BLOCK: NULL_BLOCK}

    def extend(self, virtual: Sequence[int], physical: Sequence[int]) -> None:
        """Add or replace entries; closed blocks keep a stale entry that no step names."""
        self._physical.update(zip(virtual, physical, strict=True))

    def of_groups(self, ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Return the physical ids of blocks of each KV group."""
        return _mapped(self._physical, ids)

    def apply(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step with every block id physical; the leader's own copy stays virtual."""
        table = self._physical
        cached = output.scheduled_cached_reqs
        zeroed = output.new_block_ids_to_zero
        copies = output.kv_cache_block_copies
        if not (output.scheduled_new_reqs or any(cached.new_block_ids) or zeroed or copies):
            return output  # as the first step of requests that have come to their rows
        return dataclasses.replace(
            output,
            scheduled_new_reqs=[
                dataclasses.replace(request, block_ids=_mapped(table, request.block_ids))
                for request in output.scheduled_new_reqs
            ],
            scheduled_cached_reqs=dataclasses.replace(
                cached,
                new_block_ids=[
                    None if ids is None else _mapped(table, ids) for ids in cached.new_block_ids
                ],
            ),
            new_block_ids_to_zero=zeroed and [table[block] for block in zeroed],
            kv_cache_block_copies=copies
            and [KVCacheBlockCopy(table[copy[0]], table[copy[1]]) for copy in copies],
        )


def _mapped(table: Mapping[int, int], ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
    return tuple([table[block] for block in group] for group in ids)
