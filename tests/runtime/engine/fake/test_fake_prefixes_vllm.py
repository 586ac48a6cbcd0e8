"""The fake engine's prefix cache finds as many tokens as vLLM's, whatever comes and goes."""

import random
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from shoal.policies.values.layouts import DP
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits
from tests.runtime.loopback_node import request_payload

BLOCK, BLOCKS, LONGEST = 4, 40, 400
RUNNING = 5


class Stock:
    """vLLM's own manager of KV blocks, and the requests that it serves."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config, LONGEST, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: dict[str, Request] = {}

    def start(self, name: str, prompt: list[int]) -> int:
        """Serve a request's first step; return how many of its tokens were cached."""
        sampling = SamplingParams(max_tokens=99)
        request = Request(name, prompt, sampling, None, block_hasher=self.hasher)
        found, cached, _ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - cached
        assert self.manager.allocate_slots(request, new, cached, found) is not None
        request.num_computed_tokens = request.num_tokens
        self.requests[name] = request
        return int(cached)

    def decode(self, tokens: dict[str, int]) -> None:
        """Take in the last step's tokens, and compute them in the next one."""
        for name, token in tokens.items():
            request = self.requests[name]
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1

    def end(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))

    @property
    def free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())


class Fake:
    """The fake engine's scheduler, used in the same way."""

    def __init__(self) -> None:
        limits = LayoutLimits(DP, BLOCK, RUNNING, LONGEST)
        self.blocks = FakeBlocks(range(BLOCKS))
        self.scheduler = FakeScheduler(limits, FakeSettings(), self.blocks, ManualClock())
        self.requests: dict[str, FakeRequest] = {}

    def start(self, name: str, prompt: list[int]) -> int:
        """Serve a request's first step, in which the others compute a token, too."""
        view = wire.decode_request(request_payload(name, prompt, 99))
        self.requests[name] = request = FakeRequest(view, prompt, 99)
        self.scheduler.add(request)
        self.step()
        assert request.hits is not None
        return request.hits

    def step(self) -> None:
        for request, share in self.scheduler.schedule()[0]:
            request.computed += share

    def tokens(self) -> dict[str, int]:
        """Generate the last step's tokens."""
        return {name: request.generate() for name, request in self.requests.items()}

    def end(self, name: str) -> None:
        self.scheduler.remove([name])
        del self.requests[name]


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_vllms_finds(seed: int) -> None:
    rng, stock, fake = random.Random(seed), Stock(), Fake()
    told: list[list[int]] = [[]]
    hits = 0
    for number in range(120):
        if fake.requests and (len(fake.requests) == RUNNING or rng.random() < 0.5):
            name = rng.choice(list(fake.requests))
            ended = fake.requests[name]
            told = [*told[-6:], ended.first(ended.tokens)]
            for engine in (stock, fake):
                engine.end(name)
        tokens = fake.tokens()
        stock.decode(tokens)
        start = rng.choice(told)
        begin = start[: rng.randint(0, min(len(start), 20))]
        prompt = [*begin, *(rng.randrange(3) for _ in range(rng.randint(1, 8)))]
        name = str(number)
        found: Any = [engine.start(name, prompt) for engine in (stock, fake)]
        assert found[0] == found[1], number
        assert stock.free == len(fake.blocks)
        hits += found[0] > 0
    assert hits > 20
