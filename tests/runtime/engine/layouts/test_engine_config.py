"""What engines change in vLLM's configuration of a layout."""

from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.layouts import engine_config as module
from shoal.runtime.engine.layouts.engine_config import engine_config
from shoal.runtime.engine.link.executor import UnitExecutor
from shoal.runtime.layout_configs import take
from tests.runtime.engine.real_node import configs_of

GRAPHS = (CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2], 2)


@pytest.mark.parametrize(
    ("share", "layout", "captures"),
    [
        *[(1, DP, True), (2, DP, False), (4, DP, False)],
        *[(2, Layout(tp=2), True), (4, Layout(tp=2), False), (4, Layout(tp=4), True)],
    ],
)
def test_layouts_that_stream_weights_have_no_graphs(
    llama: object, monkeypatch: pytest.MonkeyPatch, share: int, layout: Layout, captures: bool
) -> None:
    def with_graphs(*args: Any) -> Any:
        config = take(*args)
        of = config.compilation_config
        of.cudagraph_mode, of.cudagraph_capture_sizes, of.max_cudagraph_capture_size = GRAPHS
        return config

    monkeypatch.setattr(module, "take", with_graphs)
    configs = configs_of(str(llama), 4)
    node = NodeConfig(4, 4, "manual", "unused", configs, share_weights=share)
    made = engine_config(node, layout, UnitExecutor).compilation_config
    found = made.cudagraph_mode, made.cudagraph_capture_sizes, made.max_cudagraph_capture_size
    assert found == (GRAPHS if captures else (CUDAGraphMode.NONE, [], 0))
