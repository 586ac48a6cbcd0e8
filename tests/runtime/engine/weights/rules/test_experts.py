"""Views of routed experts, held against vLLM's own sharding of the same checkpoint."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights, view_weights
from tests.runtime.engine.expert_layers import (
    EXPERTS,
    LARGEST,
    ExpertsLayer,
    expert_output,
    load_experts,
    make_experts,
    without_groups,
)
from tests.runtime.engine.one_rank import ranks
from tests.runtime.engine.owned_bytes import owned_bytes

HIDDEN, INTERMEDIATE = 32, 128


def make(rank: int, degree: int, *, views: bool, **options: Any) -> ExpertsLayer:
    return make_experts(SharedWeights(views=views), rank, degree, HIDDEN, INTERMEDIATE, **options)


def loaded(rank: int, degree: int, *, by_expert: bool = False) -> ExpertsLayer:
    """Return the layer with the same random checkpoint, loaded by vLLM's own loader."""
    layer = make(rank, degree, views=False, by_expert=by_expert)
    load_experts(layer, HIDDEN, INTERMEDIATE)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


def full(groups: int = LARGEST) -> ExpertsLayer:
    """Return the DP layer, loaded and grouped."""
    layer = loaded(0, 1)
    arrange_weights(ResidentWeights(layer), groups)
    return layer


def view(dp: ExpertsLayer, rank: int, degree: int, *, by_expert: bool = False) -> ExpertsLayer:
    """Return a member's layer whose weights are views of ``dp``'s."""
    layer = make(rank, degree, views=True, by_expert=by_expert)
    view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


def output(layer: ExpertsLayer) -> torch.Tensor:
    """Return what a member computes of some tokens, before the members add up."""
    return expert_output(layer, HIDDEN, tokens=7)


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    without_groups(monkeypatch)


def test_the_grouped_dp_layer_computes_what_vllms_order_gives() -> None:
    stock, dp = loaded(0, 1), full()
    torch.testing.assert_close(output(dp), output(stock), rtol=1e-5, atol=1e-4)
    assert not torch.equal(dp.routed.w13_weight, stock.routed.w13_weight)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_a_member_computes_what_stocks_computes(rank: int, degree: int, by_expert: bool) -> None:
    stock = loaded(rank, degree, by_expert=by_expert)
    viewed = view(full(), rank, degree, by_expert=by_expert)
    torch.testing.assert_close(output(viewed), output(stock), rtol=1e-5, atol=1e-4)
    assert torch.equal(viewed.routed.w2_weight, stock.routed.w2_weight)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_all_members_add_up_to_dp(degree: int, by_expert: bool) -> None:
    dp = full()
    members = [output(view(dp, rank, degree, by_expert=by_expert)) for rank in range(degree)]
    torch.testing.assert_close(sum(members), output(dp), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_views_own_no_byte(rank: int, degree: int, by_expert: bool) -> None:
    dp = full()
    viewed = view(dp, rank, degree, by_expert=by_expert)
    assert owned_bytes(viewed, dp) == 0
    assert viewed.routed.w13_weight.numel() * degree == dp.routed.w13_weight.numel()


def test_the_share_of_another_member_gives_another_result() -> None:
    """And so does another range of experts than the member's map says."""
    dp = full()
    for by_expert in (False, True):
        right, wrong = (view(dp, 1, 2, by_expert=by_expert) for _ in range(2))
        wrong.routed.w2_weight = view(dp, 0, 2, by_expert=by_expert).routed.w2_weight
        assert not torch.allclose(output(right), output(wrong), rtol=0.1, atol=1.0)


@pytest.mark.parametrize("by_expert", [False, True])
def test_the_router_reads_dps_correction_of_scores(by_expert: bool) -> None:
    """vLLM's router keeps the tensor that it was made with, which is not the one of DP."""
    corrected = {"scoring_func": "sigmoid", "use_grouped_topk": True}
    corrected |= {"num_expert_group": 1, "topk_group": 1}

    def made(rank: int, degree: int, *, views: bool) -> ExpertsLayer:
        bias = nn.Parameter(torch.full((EXPERTS,), float("nan")))
        return make(
            *(rank, degree),
            **{"views": views, "by_expert": by_expert and views},
            **{"e_score_correction_bias": bias, **corrected},
        )

    dp = made(0, 1, views=False)
    dp.routed.e_score_correction_bias.data = torch.arange(EXPERTS).float()
    arrange_weights(ResidentWeights(dp), LARGEST)
    viewed = made(1, 2, views=True)
    view_weights(viewed, ResidentWeights(dp), Layout(tp=2), 1)
    assert viewed.experts.router.e_score_correction_bias is dp.routed.e_score_correction_bias
    assert viewed.routed.e_score_correction_bias is dp.routed.e_score_correction_bias
    del dp.routed.e_score_correction_bias
    with pytest.raises(UnviewableWeights, match="its router's e_score_correction_bias is unknown"):
        view_weights(made(1, 2, views=True), ResidentWeights(dp), Layout(tp=2), 1)


def test_rows_are_grouped_for_as_many_members_as_can_share_an_expert() -> None:
    """Where they cannot, each has whole experts, whose rows are in the same groups."""
    dp = full(groups=512)
    assert dp.routed.shoal_groups == INTERMEDIATE
    torch.testing.assert_close(output(dp), output(loaded(0, 1)), rtol=1e-5, atol=1e-4)


def test_a_share_that_vllm_cuts_in_another_way_is_named() -> None:
    dp = full()
    viewed = make(0, 2, views=True)
    with pytest.raises(UnviewableWeights, match=r"^experts\.routed_experts\.w13_weight is split"):
        view_weights(viewed, ResidentWeights(dp), Layout(tp=4), 0)


@pytest.mark.parametrize(
    ("experts", "named"),
    [
        ({"activation": "gelu"}, "experts with gelu between the GEMMs are not supported"),
        ({"activation": "swiglustep"}, "experts with swiglustep between the GEMMs"),
    ],
)
def test_other_kinds_of_experts_are_refused_by_name(experts: dict[str, Any], named: str) -> None:
    with pytest.raises(UnviewableWeights, match=named):
        make(0, 1, views=False, **experts)


# --- GPT-OSS ---

GPT_OSS = {"activation": "swigluoai", "has_bias": True}


def gpt_oss() -> ExpertsLayer:
    """Return the DP layer, with random tensors."""
    dp = make(0, 1, views=False, **GPT_OSS)
    draw = torch.Generator().manual_seed(6)
    for parameter in dp.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    arrange_weights(ResidentWeights(dp), LARGEST)
    dp.routed.quant_method.process_weights_after_loading(dp.routed)
    return dp


def of_gpt_oss(dp: ExpertsLayer, rank: int, degree: int, *, by_expert: bool) -> ExpertsLayer:
    layer = make(rank, degree, views=True, by_expert=by_expert, **GPT_OSS)
    view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_experts_with_biases_add_up_to_dp(degree: int, by_expert: bool) -> None:
    """Each bias is added once: the one behind ``w2`` by the first member of all."""
    dp = gpt_oss()
    members = [of_gpt_oss(dp, rank, degree, by_expert=by_expert) for rank in range(degree)]
    torch.testing.assert_close(sum(map(output, members)), output(dp), rtol=1e-5, atol=1e-3)
    assert [owned_bytes(member, dp) for member in members] == [0] * degree


def test_gate_and_up_rows_in_turn_are_not_grouped() -> None:
    dp = gpt_oss()
    rows = dp.routed.w13_weight.shape[1] // 2
    second = of_gpt_oss(dp, 1, 2, by_expert=False).routed
    assert torch.equal(second.w13_weight, dp.routed.w13_weight[:, rows:])
    assert torch.equal(second.w13_bias, dp.routed.w13_bias[:, rows:])
    assert second.w2_bias is None


def test_a_bias_that_two_members_add_gives_another_sum() -> None:
    dp = gpt_oss()
    first, second = (of_gpt_oss(dp, rank, 2, by_expert=False) for rank in range(2))
    second.routed.w2_bias = dp.routed.w2_bias
    second.routed.quant_method.process_weights_after_loading(second.routed)
    assert not torch.allclose(output(first) + output(second), output(dp), rtol=0.1, atol=0.5)
