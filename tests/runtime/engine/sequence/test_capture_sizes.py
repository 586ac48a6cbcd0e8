"""Graphs for larger shares: which sizes, captured by vLLM, and never found by its own steps."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as v2_graphs
from vllm.compilation import breakable_cudagraph
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from shoal.runtime.engine.sequence.capture_sizes import (
    capture_also,
    wanted_sizes,
)

OWN_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""What vLLM captures by default."""
LARGER = [*range(576, 1025, 64), *range(1152, 2049, 128)]
LORA = LoRAConfig(max_loras=3)
SPECIALISED = LoRAConfig(max_loras=3, specialize_active_lora=True)
MODES = [
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL,
    CUDAGraphMode.NONE,
]


def graph_config(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    sizes: list[int] = OWN_SIZES,
    lora: LoRAConfig | None = None,
) -> VllmConfig:
    """Return a configuration as on a GPU: vLLM's for CPUs has no graphs."""
    config = VllmConfig()
    config.lora_config = lora
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(CompilationConfig._attention_ops)
    compilation.cudagraph_mode = mode
    compilation.cudagraph_capture_sizes = list(sizes)
    compilation.max_cudagraph_capture_size = max(sizes, default=0)
    return config


# --- sizes ---


@pytest.mark.parametrize("mode", MODES)
def test_they_are_wanted_where_steps_of_mixed_requests_have_piecewise_graphs(
    mode: CUDAGraphMode,
) -> None:
    wanted = wanted_sizes(graph_config(mode), 4096)
    piecewise = mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE)
    assert wanted == (LARGER if piecewise else [])


def test_eager_models_have_none() -> None:
    assert wanted_sizes(graph_config(sizes=[]), 4096) == []


def test_graphs_that_hang_on_the_runner_are_not_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert breakable_cudagraph.is_breakable_cudagraph_enabled()
    assert wanted_sizes(graph_config(), 4096) == []


# --- V1 ---


class V1Runner:
    """What captures and dispatches of vLLM's V1 model runner, which runs nothing."""

    _capture_cudagraphs = GPUModelRunner._capture_cudagraphs
    _warmup_and_capture = GPUModelRunner._warmup_and_capture
    _determine_batch_execution_and_padding = GPUModelRunner._determine_batch_execution_and_padding
    _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config
        self.compilation_config = config.compilation_config
        self.parallel_config = config.parallel_config
        self.load_config = config.load_config
        self.lora_config = config.lora_config
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        self.uniform_decode_query_len = 1
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.ran: list[tuple[CUDAGraphMode, BatchDescriptor]] = []

    def initialize_kv_cache(self) -> None:
        """As ``_check_and_update_cudagraph_mode`` does in it."""
        mode = self.compilation_config.cudagraph_mode
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1)

    def profile_cudagraph_memory(self) -> int:
        self.initialize_kv_cache()
        descriptors = self.cudagraph_dispatcher.get_capture_descs()
        for mode, descs in descriptors:
            for desc in descs[:2]:
                self._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
        for keys in self.cudagraph_dispatcher.cudagraph_keys.values():
            keys.clear()
        self.cudagraph_dispatcher.keys_initialized = False
        return sum(len(descs) for _, descs in descriptors)

    def capture_model(self) -> int:
        for mode, descs in self.cudagraph_dispatcher.get_capture_descs():
            self._capture_cudagraphs(descs, mode)
        return len(self.ran)

    def _dummy_run(
        self,
        num_tokens: int,
        cudagraph_runtime_mode: CUDAGraphMode,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        **_: Any,
    ) -> None:
        """As vLLM's finds the mode and the descriptor, and checks that it is the asked one."""
        mode, descriptor, *_rest = self._determine_batch_execution_and_padding(
            num_tokens=num_tokens,
            num_reqs=num_tokens,
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=1 if uniform_decode else num_tokens,
            force_eager=cudagraph_runtime_mode == CUDAGraphMode.NONE,
            force_uniform_decode=uniform_decode,
            force_has_lora=num_active_loras > 0,
            force_num_active_loras=num_active_loras,
        )
        assert mode == cudagraph_runtime_mode
        self.ran.append((mode, descriptor))

    def maybe_remove_all_loras(self, _config: LoRAConfig | None) -> None:
        pass

    def captured(self, mode: CUDAGraphMode) -> list[int]:
        """Return the tokens of what was captured, in order."""
        return [descriptor.num_tokens for found, descriptor in self.ran if found is mode]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.is_global_first_rank", lambda: False)
    monkeypatch.setattr(v2_graphs, "is_global_first_rank", lambda: False)


def test_a_runner_that_is_dropped_goes_at_once() -> None:
    """Its layout is made anew, and vLLM has frozen what a garbage collection would find."""
    gc.disable()
    try:
        runners = [v1_runner(*LARGER), V2Runner(graph_config())]
        capture_also(runners[1], LARGER)
        dropped = [weakref.ref(runner) for runner in runners]
        runners.clear()
        assert [reference() for reference in dropped] == [None, None]
    finally:
        gc.enable()


def v1_runner(
    *larger: int,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    lora: LoRAConfig | None = None,
) -> Any:
    runner = V1Runner(graph_config(mode, lora=lora))
    if larger:
        capture_also(runner, larger)
    return runner


def dispatched(runner: Any) -> list[Any]:
    """Return what a layout's own steps find, of every number of tokens."""
    dispatch = runner.cudagraph_dispatcher.dispatch
    return [dispatch(n, uniform_decode=decodes) for n in range(1, 2049) for decodes in (0, 1)]


def test_v1_captures_them_largest_first_and_no_more_whole_graphs() -> None:
    stock, runner = v1_runner(), v1_runner(*LARGER)
    for each in (stock, runner):
        each.initialize_kv_cache()
        each.capture_model()
    own = stock.captured(CUDAGraphMode.PIECEWISE)
    assert own == OWN_SIZES[::-1]
    assert runner.captured(CUDAGraphMode.PIECEWISE) == [*LARGER[::-1], *own]
    assert runner.captured(CUDAGraphMode.FULL) == stock.captured(CUDAGraphMode.FULL) != []


def test_v1_runs_each_without_a_graph_first_and_finds_it_by_its_tokens_alone() -> None:
    runner = v1_runner(*LARGER)
    runner.compilation_config.cudagraph_num_of_warmups = 1
    runner.initialize_kv_cache()
    runner.capture_model()
    largest = BatchDescriptor(2048)
    assert runner.ran[:2] == [
        (CUDAGraphMode.NONE, largest),
        (CUDAGraphMode.PIECEWISE, largest),
    ]


@pytest.mark.parametrize(
    ("lora", "cases"), [(LORA, [4, 0]), (SPECIALISED, [4, 2, 1, 0])], ids=["plain", "specialised"]
)
def test_v1_captures_them_with_adapters_and_without(lora: LoRAConfig, cases: list[int]) -> None:
    """As often as its own sizes: for all slots and no adapter, and for fewer if asked to."""
    runner = v1_runner(2048, 576, lora=lora)
    runner.initialize_kv_cache()
    runner.capture_model()
    found = [each for mode, each in runner.ran if mode is CUDAGraphMode.PIECEWISE]
    assert found[: 3 * len(cases)] == [
        BatchDescriptor(size, has_lora=loras > 0, num_active_loras=loras)
        for size in (2048, 576, 512)
        for loras in cases
    ]


def test_v1_measures_them_with_its_own() -> None:
    stock, runner = v1_runner(), v1_runner(*LARGER)
    assert runner.profile_cudagraph_memory() == stock.profile_cudagraph_memory() + len(LARGER)
    assert runner.captured(CUDAGraphMode.PIECEWISE) == [2048, 1920]
    assert stock.captured(CUDAGraphMode.PIECEWISE) == [512, 496]


def test_v1_steps_of_the_layout_itself_find_what_they_found() -> None:
    stock, runner = v1_runner(), v1_runner(*LARGER)
    stock.initialize_kv_cache()
    before = stock.vllm_config.compute_hash()
    runner.profile_cudagraph_memory()
    runner.initialize_kv_cache()
    assert dispatched(runner) == dispatched(stock)
    runner.capture_model()
    assert dispatched(runner) == dispatched(stock)
    assert all(mode is CUDAGraphMode.NONE for mode, _ in dispatched(runner)[2 * 512 :])
    assert runner.vllm_config.compute_hash() == before
    assert runner.compilation_config.cudagraph_capture_sizes == OWN_SIZES


def test_v1_steps_would_find_them_while_it_captures() -> None:
    """The comparison above sees a dispatcher that was not put back."""
    stock, runner = v1_runner(), v1_runner(*LARGER)
    for each in (stock, runner):
        each.initialize_kv_cache()
    with runner.cudagraph_dispatcher.capturing():
        assert dispatched(runner) != dispatched(stock)
        assert dispatched(runner)[2 * 512 : 2 * 575] == dispatched(stock)[2 * 512 : 2 * 575]


def test_v1_steps_find_none_after_a_capture_that_failed() -> None:
    runner = v1_runner(*LARGER)
    runner.initialize_kv_cache()

    def run_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    runner._dummy_run = run_out
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.capture_model()
    assert runner.cudagraph_dispatcher.dispatch(576)[0] is CUDAGraphMode.NONE


@pytest.mark.parametrize("mode", MODES)
def test_v1_captures_none_where_the_backend_left_no_piecewise_graphs(mode: CUDAGraphMode) -> None:
    """A backend may take another mode than was configured, when its caches are known."""
    runner = v1_runner(*LARGER)
    runner.compilation_config.cudagraph_mode = mode
    runner.initialize_kv_cache()
    runner.capture_model()
    piecewise = mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE)
    assert any(descriptor.num_tokens > 512 for _, descriptor in runner.ran) is piecewise


# --- V2 ---


class V2Runner:
    """What captures of vLLM's V2 model runner, with vLLM's own manager, which runs nothing."""

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config
        self.cudagraph_manager: CudaGraphManager | None = None
        self.captured: list[int] = []
        self.loras: list[int] = []

    def initialize_kv_cache(self) -> None:
        mode = self.vllm_config.compilation_config.cudagraph_mode
        device = torch.device("cpu")
        cases = get_lora_capture_cases(
            self.vllm_config.lora_config, self.vllm_config.compilation_config
        )
        self.cudagraph_manager = CudaGraphManager(
            self.vllm_config, device, mode, 1, lora_capture_cases=cases
        )

    def capture_model(self, *, profile_only: bool = False) -> int:
        assert self.cudagraph_manager is not None
        before = len(self.captured)
        self.cudagraph_manager.capture(self._forward)
        return 0 if profile_only else len(self.captured) - before

    def _forward(self, desc: Any, warmup: bool) -> Any:
        def run(mode: CUDAGraphMode) -> None:
            if mode is CUDAGraphMode.PIECEWISE:
                assert desc.num_reqs is None
                self.captured.append(desc.num_tokens)
                self.loras.append(desc.num_active_loras)

        assert warmup
        return run


@pytest.fixture
def v2(monkeypatch: pytest.MonkeyPatch) -> None:
    first_and_last = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(v2_graphs, "get_pp_group", lambda: first_and_last)
    monkeypatch.setattr(v2_graphs, "graph_capture", lambda **_: nullcontext())
    monkeypatch.setattr(
        v2_graphs, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
    )


def v2_runner(
    *larger: int,
    mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
    lora: LoRAConfig | None = None,
) -> Any:
    runner = V2Runner(graph_config(mode, lora=lora))
    if larger:
        capture_also(runner, larger)
    runner.initialize_kv_cache()
    return runner


def v2_dispatched(runner: Any) -> list[Any]:
    dispatch = runner.cudagraph_manager.dispatch
    return [dispatch(1, tokens, None, 0) for tokens in range(1, 2049)]


@pytest.mark.usefixtures("v2")
@pytest.mark.parametrize("profile_only", [False, True])
def test_v2_captures_them_largest_first(profile_only: bool) -> None:
    """It measures by a capture; and makes another manager for the real one."""
    runner = v2_runner(*LARGER)
    for _ in range(2):
        runner.initialize_kv_cache()
        runner.capture_model(profile_only=profile_only)
    assert runner.captured == 2 * [*LARGER[::-1], *OWN_SIZES[::-1]]


@pytest.mark.usefixtures("v2")
def test_v2_captures_them_with_adapters_and_without() -> None:
    runner = v2_runner(2048, 576, lora=LORA)
    runner.capture_model()
    assert runner.captured[:6] == [2048, 2048, 576, 576, 512, 512]
    assert [set(runner.loras[at : at + 2]) for at in (0, 2, 4)] == [{0, 4}] * 3


@pytest.mark.usefixtures("v2")
def test_v2_steps_of_the_layout_itself_find_what_they_found() -> None:
    stock, runner = v2_runner(), v2_runner(*LARGER)
    for each in (stock, runner):
        each.capture_model()
    assert v2_dispatched(runner) == v2_dispatched(stock)
    assert stock.captured == OWN_SIZES[::-1]
    modes = [found.cg_mode for found in v2_dispatched(runner)]
    assert modes == 512 * [CUDAGraphMode.PIECEWISE] + 1536 * [CUDAGraphMode.NONE]
    assert runner.cudagraph_manager._capture_descs == stock.cudagraph_manager._capture_descs


@pytest.mark.usefixtures("v2")
def test_v2_without_piecewise_graphs_captures_none() -> None:
    runner = v2_runner(*LARGER, mode=CUDAGraphMode.NONE)
    runner.capture_model()
    assert runner.captured == []
