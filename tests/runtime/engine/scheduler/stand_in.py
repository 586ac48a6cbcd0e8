"""vLLM's ``EngineCore`` without a model: what Shoal's cores use of it, on a real block pool."""

from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from shoal.runtime.engine.link.instructions import LARGEST_FULL_GRAPH

BLOCKS = 16
"""Blocks of the pool, the null block not counted."""
TOKENS = 4
"""Of a block."""
STEP_TOKENS = 16
"""Most tokens of a step."""


def _pool(*, caching: bool) -> BlockPool:
    return BlockPool(BLOCKS + 1, enable_caching=caching, hash_block_size=TOKENS)


class StandIn:
    """Scheduler, executor and channel at once; notes what is sent to runners.

    Args:
        specs: what each group of KV blocks keeps, where it matters how many groups there are.
    """

    def __init__(self, *specs: KVCacheSpec) -> None:
        groups = [KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate(specs)]
        self.scheduler = self.model_executor = self.channel = self
        self.structured_output_manager = SimpleNamespace(backend=None, clear_backend=lambda: None)
        managers = [SimpleNamespace(max_admission_blocks_per_request=None)]
        self.kv_cache_manager = SimpleNamespace(
            block_pool=_pool(caching=False),
            coordinator=SimpleNamespace(single_type_managers=managers),
            estimate_cached_tokens=lambda _: 0,
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                max_cudagraph_capture_size=None, cudagraph_mode=CUDAGraphMode.NONE
            ),
            cache_config=SimpleNamespace(block_size=TOKENS),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP_TOKENS),
            model_config=SimpleNamespace(max_model_len=100),
        )
        self.batch_queue_size = 2
        self.num_spec_tokens = self.num_lookahead_tokens = 0
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.kv_holding_waiting: list[Any] = []
        self.deferred_waiting: list[Any] = []
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.sent: list[Any] = []

    def turn_caching_on(self) -> None:
        self.kv_cache_manager.block_pool = _pool(caching=True)

    def cache(self, blocks: int) -> None:
        """Let so many free blocks cache something: ``b"0"``, ``b"1"`` and so on."""
        pool = self.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(blocks)
        hashes = [b"%d" % index for index in range(blocks)]
        request = SimpleNamespace(block_hashes=hashes)
        pool.cache_full_blocks(request, taken, 0, blocks, TOKENS, kv_cache_group_id=0)
        pool.free_blocks(reversed(taken))

    def __call__(self, *_: Any) -> "StandIn":
        return self

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def collective_rpc(self, method: str) -> list[int]:
        assert method == LARGEST_FULL_GRAPH
        return [0]

    def execute_dummy_batch(self) -> None:
        pass

    def has_requests(self) -> bool:
        return False

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def send(self, instruction: Any) -> None:
        self.sent.append(instruction)

    def run(self, name: str, prompt: int, max_tokens: int) -> None:
        """Add a running request that has computed its prompt."""
        blocks = self.kv_cache_manager.block_pool.get_new_blocks(-(-prompt // TOKENS))
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=prompt,
            num_tokens=prompt + 1,
            num_computed_tokens=prompt,
            max_tokens=max_tokens,
            blocks=blocks,
        )
        self.requests[name] = request
        self.running.append(request)

    def _preempt_request(self, request: Any, *_: Any, **__: Any) -> None:
        self.kv_cache_manager.block_pool.free_blocks(request.blocks)
        self.waiting.insert(0, request)
