"""vLLM's V2 graph manager as it captures and dispatches. Only the graphs are simulated."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as v2_graphs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from shoal.runtime.engine.agent.full_graph_steps import MOST_REQUESTS
from tests.runtime.engine.sequence.test_capture_sizes import graph_config

HIDDEN = 8


class Runner:
    """What captures of vLLM's V2 model runner, with vLLM's own manager."""

    def __init__(self, config: VllmConfig, builders: list[Any]) -> None:
        self.vllm_config = config
        group = SimpleNamespace(metadata_builders=builders)
        self.attn_groups = [[group]]
        self.cudagraph_manager: Any = None

    def initialize_kv_cache(self) -> None:
        mode = self.vllm_config.compilation_config.cudagraph_mode
        self.cudagraph_manager = ModelCudaGraphManager(
            self.vllm_config, torch.device("cpu"), mode, 1
        )

    def capture_model(self) -> int:
        buffers = SimpleNamespace(
            input_ids=torch.zeros(8192, dtype=torch.int64),
            positions=torch.zeros(8192, dtype=torch.int64),
            is_padding=torch.zeros(8192, dtype=torch.bool),
        )
        state = SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
        cache = SimpleNamespace()
        groups = self.attn_groups
        self.cudagraph_manager.capture(model, state, buffers, None, None, groups, cache)
        return len(self.cudagraph_manager.graphs)


def model(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.zeros(len(input_ids), HIDDEN)


def simulate(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Simulate graphs; return tokens, splits and the largest size of each preparation."""
    found: list[tuple[int, int, int]] = []

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> None:
        assert (common_prefix_len, fast_build) == (0, False)
        tokens = common_attn_metadata.num_actual_tokens
        found.append((tokens, self.max_num_splits, self.max_cudagraph_size))

    def prepare(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> tuple[None, None]:
        groups, length = args[3], kwargs["max_query_len"]
        common = SimpleNamespace(num_actual_tokens=num_tokens, max_query_len=length or num_tokens)
        assert num_reqs <= MOST_REQUESTS or not kwargs["full_cudagraph"]
        for builder in groups[0][0].metadata_builders:
            if kwargs["full_cudagraph"]:
                builder.build_for_cudagraph_capture(common)
            else:
                builder.build(0, common)
        return None, None

    one = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    offloader = SimpleNamespace(sync_prev_onload=list, join_after_forward=list)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    for name, value in {
        "is_global_first_rank": lambda: False,
        "get_pp_group": lambda: one,
        "graph_capture": lambda **_: nullcontext(),
        "capture_pool": lambda *_: nullcontext(),
        "get_offloader": lambda: offloader,
        "current_platform": platform,
        "current_stream": lambda: None,
        "has_compiled_submodule": lambda _: True,
        "set_forward_context": lambda *_, **__: nullcontext(),
        "prepare_inputs_to_capture": prepare,
    }.items():
        monkeypatch.setattr(v2_graphs, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    return found


def flash_attention_3(**changes: Any) -> Any:
    builder = object.__new__(FlashAttentionMetadataBuilder)
    values = {"aot_schedule": True, "dcp_world_size": 1, "max_num_splits": 32}
    vars(builder).update(values, max_cudagraph_size=512, **changes)
    return builder


class Other:
    """Attention of another backend."""

    def build(self, *_: Any) -> None:
        pass

    build_for_cudagraph_capture = build


def runner_of(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, builders: list[Any] | None = None
) -> Runner:
    config = graph_config(mode)
    config.scheduler_config.max_num_seqs = 1024
    config.scheduler_config.max_num_batched_tokens = 8192
    config.model_config = SimpleNamespace(
        supports_multimodal_inputs=False,
        is_encoder_decoder=False,
        enable_prompt_embeds=False,
        get_hidden_size=lambda: HIDDEN,
        dtype=torch.float32,
    )
    return Runner(config, [flash_attention_3()] if builders is None else builders)


def dispatched(runner: Runner, requests: int, tokens: int, uniform: int | None = None) -> Any:
    return runner.cudagraph_manager.dispatch(requests, tokens, uniform, 0)
