"""The rows of ``gate_up_proj`` in groups, and the activation that reads them so."""

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul

from shoal.runtime.engine.weights.rules.fused import GroupedActivation, regroup_rows

HIDDEN, INTERMEDIATE = 32, 64


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_regrouped_rows_are_the_parts_of_gate_and_up_in_turn(groups: int) -> None:
    gate, up = torch.arange(16), torch.arange(100, 116)
    expected = [torch.cat(pair) for pair in zip(gate.chunk(groups), up.chunk(groups), strict=True)]
    assert torch.equal(regroup_rows(torch.cat([gate, up]), groups), torch.cat(expected))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_the_grouped_activation_undoes_the_grouping(groups: int, compiled: bool) -> None:
    activation = SiluAndMul()
    weight, x = torch.randn(2 * INTERMEDIATE, HIDDEN), torch.randn(5, HIDDEN)
    expected = activation.forward_native(x @ weight.T)
    grouped = GroupedActivation(activation, groups)
    if compiled:
        grouped.compile(backend="eager", fullgraph=True, dynamic=True)
    # Vectors of other lengths may round the last bit of an exponential otherwise.
    close = {"rtol": 1e-6, "atol": 1e-6} if compiled else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(grouped(x @ regroup_rows(weight, groups).T), expected, **close)
    # Without the regrouping it must not: else this would say nothing.
    assert not torch.equal(grouped(x @ weight.T), expected)
