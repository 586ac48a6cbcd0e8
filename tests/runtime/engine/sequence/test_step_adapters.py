"""Whose adapters a base layout computes for which rows of a member's share."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest

from shoal.runtime.engine.sequence.step_adapters import StepAdapters

POET, CLERK = LoRARequest("poet", 1, "/poet"), LoRARequest("clerk", 2, "/clerk")
TOKENS = (1, 1, 1, 0, 2, 2, 0)


class Manager:
    """A LoRA manager that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[set[LoRARequest], LoRAMapping]] = []

    def set_active_adapters(self, requests: set[LoRARequest], mapping: LoRAMapping) -> None:
        self.told.append((requests, mapping))


def prepared(*tokens: int, requests: set[LoRARequest]) -> tuple[StepAdapters, Manager, Manager]:
    """Return what a model runner has told of a step's tokens, and both layouts' managers."""
    own, base = Manager(), Manager()
    adapters = StepAdapters(own, base)
    adapters.set_active_adapters(requests, LoRAMapping(tokens, (1, 0, 2), is_prefill=True))
    return adapters, own, base


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        pytest.param(range(4), (1, 1, 1, 0), id="the first member's"),
        pytest.param(range(4, 8), (2, 2, 0, 0), id="the last row is padding"),
        pytest.param(range(5, 10), (2, 0, 0, 0, 0), id="padded as for a graph"),
        pytest.param(range(10, 15), (0, 0, 0, 0, 0), id="nothing but padding"),
    ],
)
def test_the_base_has_the_steps_adapters_for_the_share(
    rows: range, numbers: tuple[int, ...]
) -> None:
    adapters, own, base = prepared(*TOKENS, requests={POET, CLERK})
    whole = ({POET, CLERK}, LoRAMapping(TOKENS, (1, 0, 2), is_prefill=True))
    assert (own.told, base.told) == ([whole], [])
    adapters.activate(rows)
    share = ({POET, CLERK}, LoRAMapping(numbers, (1, 0, 2), is_prefill=True))
    assert (own.told, base.told) == ([whole], [share])


def test_a_step_without_adapters_takes_those_of_the_step_before_away() -> None:
    adapters, _, base = prepared(*TOKENS, requests={POET, CLERK})
    adapters.set_active_adapters(set(), LoRAMapping((0, 0), (0,), is_prefill=True))
    adapters.activate(range(1, 2))
    assert base.told == [(set(), LoRAMapping((0,), (0,), is_prefill=True))]


@pytest.mark.parametrize(("requests", "kinds"), [(set(), 0), ({POET}, 2), ({POET, CLERK}, 3)])
def test_padding_is_a_kind_of_its_own_beside_adapters(
    requests: set[LoRARequest], kinds: int
) -> None:
    adapters, _, _ = prepared(*TOKENS, requests=requests)
    assert adapters.kinds == kinds


def test_it_answers_as_the_layouts_own_manager_otherwise() -> None:
    own: Any = SimpleNamespace(list_adapters=lambda: {1, 2})
    assert StepAdapters(own, Manager()).list_adapters() == {1, 2}
