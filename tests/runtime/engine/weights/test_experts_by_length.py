"""Whole experts in some steps of a layout that divides each expert in others."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.weights.experts_by_length import add_whole_experts
from shoal.runtime.engine.weights.rules.shards import Shard
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights, view_weights
from shoal.runtime.whole_experts import WholeExperts
from tests.runtime.engine.expert_layers import (
    EXPERTS,
    LARGEST,
    ExpertsLayer,
    expert_output,
    make_experts,
    without_groups,
)
from tests.runtime.engine.one_rank import ranks
from tests.runtime.engine.owned_bytes import owned_bytes

HIDDEN, INTERMEDIATE = 32, 128
LONG = WholeExperts(fewest=8, most=None, automatic=False)
"""Steps of eight tokens or more."""
KINDS: tuple[dict[str, Any], ...] = ({}, {"activation": "swigluoai", "has_bias": True})


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    without_groups(monkeypatch)


@pytest.fixture(params=KINDS, ids=["silu", "gpt-oss"])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def make(rank: int, degree: int, *, views: bool, **options: Any) -> ExpertsLayer:
    return make_experts(SharedWeights(views=views), rank, degree, HIDDEN, INTERMEDIATE, **options)


def process(layer: ExpertsLayer) -> None:
    """Make the kernels, as vLLM does for all layers of a model that it has loaded."""
    for module in layer.modules():
        if hasattr(module, "quant_method") and hasattr(module, "w13_weight"):
            module.quant_method.process_weights_after_loading(module)


def full(kind: dict[str, Any]) -> ExpertsLayer:
    """Return the DP layer, with random tensors and grouped."""
    layer = make(0, 1, views=False, **kind)
    draw = torch.Generator().manual_seed(8)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    arrange_weights(ResidentWeights(layer), LARGEST)
    process(layer)
    return layer


def member(
    dp: ExpertsLayer,
    rank: int,
    degree: int,
    kind: dict[str, Any],
    *,
    when: WholeExperts | None = None,
    by_expert: bool = False,
) -> ExpertsLayer:
    """Return a member's layer: in all steps alike, or with whole experts in some."""
    layer = make(rank, degree, views=True, by_expert=by_expert, **kind)
    view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    if when is not None:
        with set_current_vllm_config(VllmConfig()):
            add_whole_experts(layer, ResidentWeights(dp), Shard(rank, degree), when)
    process(layer)
    return layer


def output(layer: ExpertsLayer, tokens: int) -> torch.Tensor:
    """Return what a member computes of a step, before the members add up."""
    return expert_output(layer, HIDDEN, tokens, seed=tokens)


@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_short_steps_have_shares_and_long_ones_whole_experts(
    rank: int, degree: int, kind: dict[str, Any]
) -> None:
    dp = full(kind)
    both = member(dp, rank, degree, kind, when=LONG)
    shares = member(dp, rank, degree, kind)
    whole = member(dp, rank, degree, kind, by_expert=True)
    assert torch.equal(output(both, 7), output(shares, 7))
    assert torch.equal(output(both, 8), output(whole, 8))
    assert not torch.allclose(output(shares, 8), output(whole, 8), rtol=0.1, atol=1.0)


@pytest.mark.parametrize("tokens", [7, 8])
@pytest.mark.parametrize("degree", [2, 4])
def test_all_members_add_up_to_dp(degree: int, tokens: int, kind: dict[str, Any]) -> None:
    dp = full(kind)
    members = [member(dp, rank, degree, kind, when=LONG) for rank in range(degree)]
    sums = sum(output(layer, tokens) for layer in members)
    torch.testing.assert_close(sums, output(dp, tokens), rtol=1e-5, atol=1e-3)


def test_both_are_views_of_the_same_bytes(kind: dict[str, Any]) -> None:
    dp = full(kind)
    assert owned_bytes(member(dp, 1, 2, kind, when=LONG), dp) == 0


def test_another_members_experts_change_long_steps_alone() -> None:
    dp = full({})
    right, wrong = (member(dp, 1, 2, {}, when=LONG) for _ in range(2))
    own = wrong.routed.shoal_whole._expert_map
    own.copy_(own.roll(EXPERTS // 2))
    assert torch.equal(output(right, 7), output(wrong, 7))
    assert not torch.allclose(output(right, 8), output(wrong, 8), rtol=0.1, atol=1.0)


def test_who_has_whole_experts_already_gets_no_others() -> None:
    dp = full({})
    layer = member(dp, 1, 2, {}, when=LONG, by_expert=True)
    assert not hasattr(layer.routed, "shoal_whole")


def test_code_that_is_compiled_has_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot ask for the length of a step; on GPUs vLLM's operator hides all this from it."""
    dp = full({})
    both, shares = member(dp, 1, 2, {}, when=LONG), member(dp, 1, 2, {})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(output(both, 8), output(shares, 8))
