"""Which copies begin when, and what waits for them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.backends import split_graph

from shoal.policies.values.layouts import DP
from shoal.runtime.engine.weights.sharing.slots import (
    OPERATOR,
    Copier,
    Copy,
    HostCopier,
    WeightSlots,
    stream_by,
    streamed,
)


class Recorder:
    """Copies nothing, and notes what it is asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self, copies: Sequence[Copy]) -> str:
        name = str(copies[0].source.item())
        self.seen.append(f"start {name}")
        return name

    def wait(self, started: str) -> None:
        self.seen.append(f"wait {started}")

    def finish(self, started: str) -> None:
        raise AssertionError("nobody waits here")

    def take(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


def slots(recorder: Recorder, layers: int) -> WeightSlots:
    """Return slots for layers 10, 11 and so on of DP, and 20, 21 and so on of TP2."""
    made = WeightSlots(recorder)
    for tp in (1, 2):
        made.copies[tp] = {
            layer: [Copy(torch.zeros(1), torch.tensor(10 * tp + layer))] for layer in range(layers)
        }
    return made


def test_the_next_layer_is_copied_while_one_is_computed_also_the_next_steps_first() -> None:
    recorder = Recorder()
    made = slots(recorder, 4)
    made.use(1, 0)
    assert recorder.take() == ["start 10", "wait 10", "start 11"]
    made.use(1, 1)
    assert recorder.take() == ["wait 11", "start 12"]
    made.use(1, 2)
    made.use(1, 3)
    assert recorder.take() == ["wait 12", "start 13", "wait 13", "start 10"]
    made.use(1, 0)
    assert recorder.take() == ["wait 10", "start 11"]


def test_the_last_layer_keeps_its_slot_until_it_is_computed() -> None:
    recorder = Recorder()
    made = slots(recorder, 3)
    for layer in range(3):
        made.use(1, layer)
    assert recorder.take()[-2:] == ["start 12", "wait 12"], "layer 0 has the same slot"
    made.use(1, 0)
    assert recorder.take() == ["start 10", "wait 10"], "layer 1 is still in the other slot"


def test_a_stage_copies_its_own_layers_only() -> None:
    recorder = Recorder()
    made = slots(recorder, 4)
    made.stages[1, 2] = [2, 3]
    made.use(1, 2, 2)
    assert recorder.take() == ["start 12", "wait 12", "start 13"]
    made.use(1, 3, 2)
    assert recorder.take() == ["wait 13"], "the next step's first layer has its slot still"
    made.use(1, 2)
    assert recorder.take() == ["wait 12"], "DP finds what the pipeline has streamed"
    made.use(1, 3)
    assert recorder.take() == ["wait 13", "start 10"]


def test_a_stage_of_an_odd_number_of_layers_waits_for_its_first() -> None:
    recorder = Recorder()
    made = slots(recorder, 6)
    made.stages[1, 2] = [3, 4, 5]
    for layer in (3, 4, 5):
        made.use(1, layer, 2)
    assert recorder.take()[-2:] == ["start 15", "wait 15"]
    made.use(1, 3, 2)
    assert recorder.take() == ["start 13", "wait 13"], "layer 4 is still in the other slot"


def test_layers_that_are_whole_are_left_out_and_both_slots_are_filled_beside_them() -> None:
    recorder = Recorder()
    made = slots(recorder, 8)
    made.leave_out([2, 3, 4])
    made.use(1, 1)
    assert recorder.take() == ["start 11", "wait 11"], "layer 5 has the same slot"
    made.use(1, 2)
    assert recorder.take() == ["start 15", "start 16"]
    made.use(1, 3)
    made.use(1, 4)
    assert recorder.take() == [], "they wait for nothing"
    made.use(1, 5)
    assert recorder.take() == ["wait 15"], "layer 6 is in its slot already"
    made.use(1, 6)
    assert recorder.take() == ["wait 16", "start 17"]
    made.leave_out([])
    made.use(1, 2)
    assert recorder.take() == ["start 12", "wait 12", "start 13"]


def test_a_stage_whose_layers_are_whole_copies_nothing_and_dp_the_others() -> None:
    recorder = Recorder()
    made = slots(recorder, 6)
    made.stages[1, 2], made.stages[1, 3] = [3, 4, 5], [2, 3]
    made.leave_out(made.stages[1, 2])
    for layer in (3, 4, 5) * 2:
        made.use(1, layer, 2)
    assert recorder.take() == []
    for layer in (*range(6), *range(6)):
        made.use(1, layer)
    started = [int(name.split()[1]) for name in recorder.take() if "start" in name]
    assert started == [10, 11, 12, 10, 12, 10], "layer 1 stays in its slot"
    made.use(1, 3, 3)
    assert recorder.take() == ["start 12"]
    made.use(1, 2, 3)
    assert recorder.take() == ["wait 12"], "there is no other layer to be copied"


def test_another_layout_fills_the_slots_anew() -> None:
    recorder = Recorder()
    made = slots(recorder, 2)
    made.use(1, 0)
    recorder.take()
    made.use(2, 0)
    assert recorder.take() == ["start 20", "wait 20", "start 21"]
    made.use(1, 0)
    assert recorder.take() == ["start 10", "wait 10", "start 11"]


def test_slots_that_hold_all_layers_are_filled_once() -> None:
    recorder = Recorder()
    made = slots(recorder, 2)
    for layer in (0, 1, 0, 1):
        made.use(1, layer)
    assert [seen for seen in recorder.take() if "start" in seen] == ["start 10", "start 11"]


class Keeping:
    """Copies each layer out of its slot once: layer 3 is ``start 33`` here."""

    def __init__(self) -> None:
        self.left = set(range(4))

    def stream(self, layer: int, copier: Copier) -> str | None:
        if layer not in self.left:
            return None
        self.left.remove(layer)
        return str(copier.start([Copy(torch.zeros(1), torch.tensor(30 + layer))]))


def test_layers_are_copied_out_of_their_slots_when_they_are_there_and_before_others_are() -> None:
    recorder = Recorder()
    made = slots(recorder, 4)
    made.keep(Keeping())
    made.use(1, 0)
    assert recorder.take() == ["start 10", "wait 10", "start 30", "start 11"]
    made.use(1, 1)
    # Layer 2 goes to the slot that layer 0 is copied from.
    assert recorder.take() == ["wait 11", "start 31", "wait 30", "start 12"]
    made.use(1, 2)
    made.use(1, 3)
    made.use(1, 0)
    recorder.take()
    made.use(1, 1)
    assert recorder.take() == ["wait 11", "start 12"], "all copies have begun"


def test_only_what_dp_streams_is_copied_out_of_slots() -> None:
    recorder, keeping = Recorder(), Keeping()
    made = slots(recorder, 4)
    made.keep(keeping)
    made.use(2, 0)
    assert recorder.take() == ["start 20", "wait 20", "start 21"]
    assert len(keeping.left) == 4


def test_another_layout_waits_for_what_is_copied_out_of_slots_that_stay_filled() -> None:
    recorder = Recorder()
    made = slots(recorder, 2)
    made.keep(Keeping())
    for layer in (0, 1, 0, 1):
        made.use(1, layer)
    recorder.take()
    made.use(2, 0)
    assert recorder.take() == ["wait 30", "start 20", "wait 20", "wait 31", "start 21"]


def test_when_layers_are_kept_no_more_the_copies_come_first() -> None:
    recorder = Recorder()
    made = slots(recorder, 4)
    made.keep(Keeping())
    for layer in range(3):
        made.use(1, layer)
    recorder.take()
    made.keep(None)
    assert recorder.take() == ["wait 32"], "layer 1 gave its slot to layer 3"
    made.use(1, 3)
    assert recorder.take() == ["wait 13", "start 10"]


def test_the_thread_copies_in_order_and_tells_of_errors() -> None:
    copier, target = HostCopier(), torch.zeros(2)
    first = copier.start([Copy(target, torch.ones(2)), Copy(target[1:], torch.tensor([5.0]))])
    second = copier.start([Copy(target[:1], torch.tensor([7.0]))])
    copier.wait(second)
    copier.wait(first)
    assert target.tolist() == [7.0, 5.0]
    with pytest.raises(RuntimeError, match="must match"):
        copier.wait(copier.start([Copy(target, torch.ones(3))]))


def test_slots_that_are_left_alone_are_neither_filled_nor_waited_for() -> None:
    recorder, watched = Recorder(), list[int]()
    made = slots(recorder, 3)
    with made.left_alone(watched.append):
        for layer in range(3):
            made.use(1, layer)
    assert (recorder.take(), watched) == ([], [0, 1, 2])
    made.use(1, 0)
    assert (recorder.take(), watched) == (["start 10", "wait 10", "start 11"], [0, 1, 2])


def test_a_layout_streams_as_long_as_one_of_its_layers_is_not_whole() -> None:
    made = slots(Recorder(), 3)
    assert made.streams(1)
    made.leave_out({0, 2})
    assert made.streams(1)
    made.leave_out({0, 1, 2})
    assert not made.streams(1)
    made.leave_out(())
    assert made.streams(1)


class Experts(nn.Module):
    """Is called as vLLM's models call theirs."""

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return hidden_states * 2 + router_logits


class ModelOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(hidden_states=x, router_logits=self.gate(x))
        return x


def test_a_compiled_model_is_divided_where_it_waits() -> None:
    """Each wait is a piece of its own, so no CUDA graph of the others has one in it."""
    whole, model = ModelOfExperts(), ModelOfExperts()
    model.load_state_dict(whole.state_dict())
    made = WeightSlots(HostCopier())
    made.copies = {DP.tp: {0: [], 1: []}}
    stream_by(made)
    for number, layer in enumerate(model.layers):
        layer.forward = streamed(layer.forward, DP.tp, number, DP.pp)
    divided: list[tuple[bool, bool]] = []

    def compile_pieces(graph: torch.fx.GraphModule, _: Any) -> Any:
        pieces, found = split_graph(graph, [OPERATOR])
        for each in found:
            waits = ["use_weights" in str(node.target) for node in each.graph.graph.nodes]
            divided.append((each.is_splitting_graph, any(waits)))
        return pieces

    x = torch.randn(3, 4)
    y = torch.compile(model, backend=compile_pieces, fullgraph=True)(x)
    assert torch.equal(y, whole(x))
    assert divided == [(False, False), (True, True), (False, False), (True, True), (False, False)]
