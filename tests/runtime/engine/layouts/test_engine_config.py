"""What engines change in vLLM's configuration of a layout."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.backends import split_graph
from vllm.config import CUDAGraphMode

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.layouts import engine_config as module
from shoal.runtime.engine.layouts.engine_config import engine_config, shares_vocabulary
from shoal.runtime.engine.link.executor import UnitExecutor
from shoal.runtime.engine.weights.sharing.slots import (
    OPERATOR,
    SLOTS,
    Copy,
    HostCopier,
    WeightSlots,
    stream_by,
    use_weights,
)
from shoal.runtime.layout_configs import take
from tests.runtime.engine.real_node import configs_of

GRAPHS = (CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2], 2)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("share", "layout", "streams"),
    [
        *[(1, DP, False), (2, DP, True), (4, DP, True)],
        *[(2, Layout(tp=2), False), (4, Layout(tp=2), True), (4, Layout(tp=4), False)],
        (2, Layout(pp=2), True),
    ],
)
def test_layouts_that_stream_weights_split_where_they_wait_and_only_dp_has_graphs(
    llama: object,
    monkeypatch: pytest.MonkeyPatch,
    share: int,
    layout: Layout,
    *,
    streams: bool,
    v2: bool,
) -> None:
    def with_graphs(*args: Any) -> Any:
        config = take(*args)
        of = config.compilation_config
        of.cudagraph_mode, of.cudagraph_capture_sizes, of.max_cudagraph_capture_size = GRAPHS
        of.splitting_ops = ["vllm::attention"]
        return config

    monkeypatch.setattr(module, "take", with_graphs)
    monkeypatch.setattr(module, "can_have_graphs", lambda _: v2)
    configs = configs_of(str(llama), 4, max_pp=2)
    node = NodeConfig(4, 4, "manual", "unused", configs, share_weights=share, max_pp=2)
    made = engine_config(node, layout, UnitExecutor).compilation_config
    found = made.cudagraph_mode, made.cudagraph_capture_sizes, made.max_cudagraph_capture_size
    captures = not streams or (layout == DP and v2)
    assert found == (GRAPHS if captures else (CUDAGraphMode.NONE, [], 0))
    assert made.splitting_ops == ["vllm::attention", *([OPERATOR] if streams else [])]


@pytest.mark.parametrize(
    ("share", "changed", "shared"),
    [
        *[(1, {}, False), (2, {}, False), (4, {}, True)],
        *[(4, {"tie_word_embeddings": True}, False), (4, {"head_dtype": "bfloat16"}, False)],
    ],
)
def test_the_vocabulary_is_shared_unless_a_member_would_lack_some_of_it(
    llama: object, share: int, changed: dict[str, Any], shared: bool
) -> None:
    configs = configs_of(str(llama), 4)
    node = NodeConfig(4, 4, "manual", "unused", configs, share_weights=share)
    config = take(configs, DP)
    for key, value in changed.items():
        setattr(config.model_config.hf_text_config, key, value)
    assert shares_vocabulary(node, config) == shared


LAYERS = 4


class Layers(nn.Module):
    """Layers that compute with the slots' weights, as vLLM compiles them."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = [torch.zeros(2) for _ in range(SLOTS)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            x = use_weights(torch.relu(x), 1, layer)
            x = x * self.slots[layer % SLOTS]
        return x


def test_the_pieces_that_are_compiled_are_alike_in_all_layers() -> None:
    graphs: list[torch.fx.GraphModule] = []
    split: list[Any] = []

    def in_pieces(graph: torch.fx.GraphModule, _: Any) -> Any:
        made, parts = split_graph(graph, [OPERATOR])
        graphs.extend(part.graph for part in parts if not part.is_splitting_graph)
        split.append(made)
        return made.forward

    layers, slots = Layers(), WeightSlots(HostCopier())
    slots.copies[1] = {
        layer: [Copy(layers.slots[layer % SLOTS], torch.full((2,), layer + 1.0))]
        for layer in range(LAYERS)
    }
    stream_by(slots)
    computed = torch.compile(layers, backend=in_pieces, fullgraph=True)(torch.ones(2))
    assert computed.tolist() == [24.0, 24.0], "each layer has its own weights"
    assert len(split) == 1
    assert len(graphs) == LAYERS + 1, "one before the first layer waits, and one behind each"
    ops = [[n.target for n in g.graph.nodes if n.op == "call_function"] for g in graphs]
    assert ops[1] == ops[2] == ops[3]
    assert not any(OPERATOR in str(op) for piece in ops for op in piece)
