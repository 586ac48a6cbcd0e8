"""Which of a layout's CUDA graphs a step by sequence may replay."""

from collections.abc import Iterable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

from shoal.runtime.engine.sequence.piecewise_graphs import CapturedSteps, largest_share


class Model(nn.Module):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids + positions


def run(
    model: nn.Module,
    buffers: torch.Tensor,
    tokens: int,
    mode: CUDAGraphMode = CUDAGraphMode.NONE,
    loras: int = 0,
) -> None:
    """Run the model on the first tokens of what lies in the buffers, as vLLM does to capture it."""
    context = ForwardContext({}, {}, {}, cudagraph_runtime_mode=mode)
    context.batch_descriptor = captured_as(tokens, loras)
    with override_forward_context(context):
        model(input_ids=buffers[0, :tokens], positions=buffers[1, :tokens], inputs_embeds=None)


def captured_as(tokens: int, loras: int = 0) -> BatchDescriptor:
    return BatchDescriptor(tokens, has_lora=loras > 0, num_active_loras=loras)


def capture(
    buffers: torch.Tensor, sizes: Iterable[int], loras: Sequence[int] = (0,)
) -> CapturedSteps:
    """Return what is known of a model after captures of these numbers of tokens and adapters."""
    captured, model = CapturedSteps(), Model()
    with captured.recorded(model):
        for tokens, active in product(sizes, loras):
            run(model, buffers, tokens)
            run(model, buffers, tokens, CUDAGraphMode.PIECEWISE, active)
    return captured


@pytest.mark.parametrize(("tokens", "size"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_the_smallest_that_holds_a_share_is_taken(tokens: int, size: int) -> None:
    buffers = torch.zeros(2, 8, dtype=torch.int64)
    step = capture(buffers, sizes=(8, 4)).fitting(tokens)
    assert step is not None
    assert step.descriptor == BatchDescriptor(size)
    for read, buffer in zip((step.input_ids, step.positions), buffers, strict=True):
        assert (read.data_ptr(), read.shape) == (buffer.data_ptr(), (size,))


@pytest.mark.parametrize(
    ("loras", "kinds", "found"),
    [
        pytest.param((5, 0), 0, 0, id="without adapters"),
        pytest.param((5, 0), 2, 5, id="with some"),
        pytest.param((5,), 0, 5, id="only graphs with adapters were captured"),
        pytest.param((5, 4, 2, 1, 0), 2, 2, id="as many as a graph has"),
        pytest.param((5, 4, 2, 1, 0), 3, 4, id="fewer than a graph has"),
    ],
)
def test_graphs_have_adapters_where_the_step_has_some(
    loras: tuple[int, ...], kinds: int, found: int
) -> None:
    """A graph's kernels are launched for so many adapters, the tokens without one counted too."""
    buffers = torch.zeros(2, 8, dtype=torch.int64)
    captured = capture(buffers, (8, 4), loras)
    for tokens, size in ((3, 4), (5, 8)):
        step = captured.fitting(tokens, kinds)
        assert step is not None
        assert step.descriptor == captured_as(size, found)
    assert captured.fitting(9, kinds) is None


def test_there_may_be_none() -> None:
    buffers = torch.zeros(2, 8, dtype=torch.int64)
    assert capture(buffers, sizes=(8, 4)).fitting(9) is None
    assert capture(buffers, sizes=()).fitting(1) is None
    assert capture(buffers, sizes=(8, 4)).fitting(1, kinds=2) is None


def test_warm_up_runs_and_whole_graphs_are_not_taken() -> None:
    """Graphs of whole steps compute their layout's own attention."""
    buffers = torch.zeros(2, 8, dtype=torch.int64)
    captured, model = CapturedSteps(), Model()
    with captured.recorded(model):
        run(model, buffers, 8)
        run(model, buffers, 4, CUDAGraphMode.FULL)
    assert captured.fitting(1) is None


def test_nothing_is_looked_at_afterwards() -> None:
    """A serving model would pay for it with every step; and what it is given moves."""
    buffers = torch.zeros(2, 8, dtype=torch.int64)
    captured, model = CapturedSteps(), Model()
    with captured.recorded(model):
        pass
    run(model, buffers, 8, CUDAGraphMode.PIECEWISE)
    assert captured.fitting(1) is None
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("members", "captured", "larger", "share"),
    [
        pytest.param(1, [1, 256, 512], [], 1000, id="too large for any"),
        pytest.param(2, [1, 256, 512], [], 512, id="padded"),
        pytest.param(4, [1, 256, 512], [], 256, id="padded to a smaller one"),
        pytest.param(3, [], [], 334, id="without graphs, not divided evenly"),
        pytest.param(2, [1, 256], [384, 512], 512, id="padded to one for such steps alone"),
        pytest.param(1, [1, 256], [384, 512], 1000, id="too large for these as well"),
    ],
)
def test_the_largest_share_has_its_padding(
    members: int, captured: list[int], larger: list[int], share: int
) -> None:
    base: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1000),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
    )
    assert largest_share(base, members, larger) == share
