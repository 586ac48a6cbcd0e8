"""Graphs of DP where engines share weights: which steps replay which, and that none has copies.

vLLM's own manager of the V2 model runner captures and dispatches. Only the graphs are simulated.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

import shoal.runtime.engine.layouts.streamed_graphs as module
from shoal.policies.values.layouts import DP
from shoal.runtime.engine.layouts.streamed_graphs import (
    WaitsBetweenPieces,
    can_have_graphs,
    capture_streamed,
)
from shoal.runtime.engine.weights.sharing.slots import HostCopier, WeightSlots
from tests.runtime.engine.layouts.simulated_graphs import (
    Runner,
    dispatched,
    model,
    runner_of,
    simulate,
)

LAYERS = 3
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Copier(HostCopier):
    """Counts the layers that it was to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def start(self, copies: Any) -> Any:
        self.begun += 1
        return super().start(copies)


def streaming(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode) -> tuple[Runner, WeightSlots]:
    """Return a model runner whose model streams, before it captures, and its slots."""
    simulate(monkeypatch)
    slots = WeightSlots(Copier())
    slots.copies = {DP.tp: {layer: [] for layer in range(LAYERS)}}

    def forward(input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        for layer in range(LAYERS):
            slots.use(DP.tp, layer)
        return model(input_ids, **others)

    monkeypatch.setattr("tests.runtime.engine.layouts.simulated_graphs.model", forward)
    runner = runner_of(mode)
    capture_streamed(runner, slots)
    runner.initialize_kv_cache()
    return runner, slots


def modes(runner: Runner) -> list[CUDAGraphMode]:
    """Return the graphs of a step that decodes, of one with a prompt, and of a long one."""
    steps = ((20, 20, 1), (20, 300, None), (20, 2000, None))
    return [dispatched(runner, *step).cg_mode for step in steps]


def test_steps_that_stream_replay_pieces_and_others_full_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, slots = streaming(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE)
    runner.capture_model()
    assert modes(runner) == [PIECEWISE, PIECEWISE, NONE]
    slots.leave_out(range(LAYERS))
    assert modes(runner) == [FULL, PIECEWISE, NONE]
    slots.leave_out(range(LAYERS - 1))  # the layers of one stage are whole: DP streams the others
    assert modes(runner) == [PIECEWISE, PIECEWISE, NONE]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY])
def test_without_pieces_only_steps_with_whole_weights_have_graphs(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    runner, slots = streaming(monkeypatch, mode)
    runner.capture_model()
    assert modes(runner) == [NONE, NONE, NONE]
    slots.leave_out(range(LAYERS))
    assert modes(runner)[0] is FULL


def test_no_graph_has_a_copy_in_it_and_steps_stream_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, slots = streaming(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE)
    copier = slots.copier
    assert isinstance(copier, Copier)
    slots.use(DP.tp, 0)
    before = copier.begun
    assert before > 0
    assert runner.capture_model() > 0
    assert copier.begun == before
    assert slots.streams(DP.tp)
    slots.use(DP.tp, 1)
    assert copier.begun > before


def test_what_vllm_captured_to_measure_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = streaming(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE)
    runner.capture_model()
    runner.initialize_kv_cache()  # after the measurement, with a manager of its own
    runner.capture_model()
    assert modes(runner) == [PIECEWISE, PIECEWISE, NONE]


@pytest.mark.parametrize(
    ("mode", "waited", "refused"),
    [
        pytest.param(PIECEWISE, 4, False, id="it waited before the piece"),
        pytest.param(PIECEWISE, 3, True, id="another layer did"),
        pytest.param(NONE, 3, False, id="a full graph, which steps that stream do not replay"),
    ],
)
def test_a_layer_that_waits_in_a_piece_only_is_refused(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, waited: int, *, refused: bool
) -> None:
    captures = [False, True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures.pop(0))
    watch = WaitsBetweenPieces()
    watch(waited)
    raises = pytest.raises(RuntimeError, match="layer 4 would not") if refused else nullcontext()
    with override_forward_context(ForwardContext({}, {}, {}, cudagraph_runtime_mode=mode)), raises:
        watch(4)


@pytest.mark.parametrize(
    ("v2", "drafts", "breakable", "expected"),
    [
        (True, None, False, True),
        (False, None, False, False),
        (True, object(), False, False),
        (True, None, True, False),
    ],
)
def test_who_can_have_them(
    monkeypatch: pytest.MonkeyPatch, *, v2: bool, drafts: Any, breakable: bool, expected: bool
) -> None:
    monkeypatch.setattr(module, "is_breakable_cudagraph_enabled", lambda: breakable)
    config: Any = SimpleNamespace(use_v2_model_runner=v2, speculative_config=drafts)
    assert can_have_graphs(config) is expected
