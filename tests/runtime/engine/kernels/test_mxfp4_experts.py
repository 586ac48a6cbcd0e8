"""Experts in MXFP4: parts of what vLLM packs for DP, and the proof at start that they are parts.

vLLM packs nothing on CPUs, so a stand-in packs as its Triton kernel on Hopper wants it: in another
order, without the tensors of the checkpoint, inside values of ``triton_kernels``.
"""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels.expert_kernels import of_mxfp4
from shoal.runtime.engine.kernels.mxfp4_experts import range_of
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights, view_weights
from tests.runtime.engine.expert_layers import (
    EXPERTS,
    LARGEST,
    ExpertsLayer,
    expert_output,
    make_experts,
    without_groups,
)
from tests.runtime.engine.kernels import hopper_order
from tests.runtime.engine.kernels.stand_in_packing import (
    SCALES,
    Choose,
    Hopper,
    Pack,
    Storage,
    Tensor,
    chooser,
    packed,
)
from tests.runtime.engine.one_rank import ranks
from tests.runtime.engine.owned_bytes import owned_bytes

HIDDEN, INTERMEDIATE = 64, 128
GPT_OSS: dict[str, Any] = {"activation": "swigluoai", "has_bias": True}
TRITON = Mxfp4MoeBackend.TRITON


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    without_groups(monkeypatch)


def make(
    rank: int, degree: int, *, views: bool, by_expert: bool = True, inner: int = INTERMEDIATE
) -> ExpertsLayer:
    config = SharedWeights(views=views, inner=GptOssMxfp4Config())
    return make_experts(config, rank, degree, HIDDEN, inner, by_expert=by_expert, **GPT_OSS)


def loaded(inner: int = INTERMEDIATE) -> ExpertsLayer:
    """Return the DP layer with a random checkpoint, which vLLM has not processed yet."""
    layer = make(0, 1, views=False, inner=inner)
    draw = torch.Generator().manual_seed(8)
    layer.gate.weight.data = torch.randn(EXPERTS, HIDDEN, generator=draw)
    for key, parameter in layer.routed.named_parameters():
        if "bias" in key:
            parameter.data = torch.randn(parameter.shape, generator=draw).bfloat16()
            continue
        least, most = (122, 126) if key in SCALES else (0, 256)
        drawn = torch.randint(least, most, parameter.shape, generator=draw)
        parameter.data = drawn.to(torch.uint8)
    return layer


def full(inner: int = INTERMEDIATE) -> ExpertsLayer:
    layer = loaded(inner)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    arrange_weights(ResidentWeights(layer), LARGEST)
    return layer


def view(
    dp: ExpertsLayer,
    rank: int,
    degree: int,
    *,
    by_expert: bool = True,
    inner: int = INTERMEDIATE,
) -> ExpertsLayer:
    layer = make(rank, degree, views=True, by_expert=by_expert, inner=inner)
    view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


def output(layer: ExpertsLayer) -> torch.Tensor:
    """Return what a member computes of some tokens, before the members add up."""
    return expert_output(layer, HIDDEN, tokens=9)


# --- on CPUs, as a checkpoint has them ------------------------------------------------------------


def test_dp_computes_what_the_same_values_give() -> None:
    dp = full()
    plain = make_experts(SharedWeights(views=False), 0, 1, HIDDEN, INTERMEDIATE, **GPT_OSS)
    plain.gate.weight.data = dp.gate.weight.data
    for key, parameter in plain.routed.named_parameters():
        packed = getattr(dp.routed, key)
        if "bias" in key:
            parameter.data = packed.float()
            continue
        scales = getattr(dp.routed, f"{key}_scale")
        parameter.data = torch.stack(list(map(of_mxfp4, packed, scales)))
    plain.routed.quant_method.process_weights_after_loading(plain.routed)
    torch.testing.assert_close(output(dp), output(plain), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("degree", [2, 4])
def test_members_with_ranges_of_experts_add_up_to_dp(degree: int) -> None:
    dp = full()
    members = [view(dp, rank, degree) for rank in range(degree)]
    torch.testing.assert_close(sum(map(output, members)), output(dp), rtol=1e-5, atol=1e-3)
    assert [owned_bytes(member, dp) for member in members] == [0] * degree


@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_a_member_has_its_experts_with_scales_and_biases(rank: int, degree: int) -> None:
    dp = full().routed
    member = view(full(), rank, degree).routed
    assert dict(member.named_parameters()).keys() == dict(dp.named_parameters()).keys()
    for key, tensor in member.named_parameters():
        assert torch.equal(tensor, getattr(dp, key).chunk(degree)[rank]), key


def test_the_experts_of_another_member_give_another_result() -> None:
    dp = full()
    right, wrong = view(dp, 1, 2), view(dp, 1, 2)
    wrong.routed.w2_weight = view(dp, 0, 2).routed.w2_weight
    assert not torch.allclose(output(right), output(wrong), rtol=0.1, atol=1.0)


UNEVEN = 192
"""Six times the inner features that share a scale: two of four members have one part, two have two.
"""


@pytest.mark.parametrize("degree", [2, 4])
def test_members_with_shares_of_each_expert_add_up_to_dp(degree: int) -> None:
    dp = full(UNEVEN)
    members = [view(dp, rank, degree, by_expert=False, inner=UNEVEN) for rank in range(degree)]
    torch.testing.assert_close(sum(map(output, members)), output(dp), rtol=1e-5, atol=1e-3)
    assert [owned_bytes(member, dp) for member in members] == [0] * degree
    sizes = [2 * member.routed.w2_weight.shape[2] for member in members]
    assert sizes == ([96, 96] if degree == 2 else [32, 64, 32, 64])


def test_the_share_of_another_member_gives_another_result() -> None:
    dp = full()
    right, wrong = (view(dp, 1, 2, by_expert=False) for _ in range(2))
    wrong.routed.w2_weight = view(dp, 0, 2, by_expert=False).routed.w2_weight
    assert not torch.allclose(output(right), output(wrong), rtol=0.1, atol=1.0)


def test_a_bias_that_two_members_add_gives_another_sum() -> None:
    dp = full()
    first, second = (view(dp, rank, 2, by_expert=False) for rank in range(2))
    assert second.routed.w2_bias is None
    second.routed.w2_bias = dp.routed.w2_bias
    second.routed.quant_method.process_weights_after_loading(second.routed)
    assert not torch.allclose(output(first) + output(second), output(dp), rtol=0.1, atol=0.5)


# --- as GPUs have them ----------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Return what lets vLLM choose a kernel, as on a GPU, and pack each tensor for it in a way."""
    return chooser(monkeypatch)


def on_hopper(tensor: torch.Tensor) -> Tensor:
    """Pack values as on Hopper, where two are in a byte."""
    experts, rows, size = tensor.shape
    shape = [experts, 2 * size, rows]
    return Tensor(Storage(hopper_order.values(tensor), Hopper()), "fp4", shape, list(shape))


def scales_on_hopper(tensor: torch.Tensor) -> Tensor:
    """Pack scales as on Hopper, where vLLM pads their columns."""
    experts, rows, columns = tensor.shape
    shape = [experts, columns + -columns % hopper_order.SCALE_COLUMNS, rows]
    return Tensor(Storage(hopper_order.scales(tensor), Hopper()), "uint8", shape, list(shape))


@pytest.fixture
def hopper(choose: Choose) -> None:
    choose(TRITON, packed)


def packed_of(layer: ExpertsLayer) -> dict[str, torch.Tensor]:
    """Return the tensors inside of what a layer's kernel gets."""
    routed, config = layer.routed, layer.routed.quant_method.moe_quant_config
    return {
        "w13_weight": routed.w13_weight.storage.data,
        "w2_weight": routed.w2_weight.storage.data,
        "w13_weight_scale": config._w1.scale.weight_scale.storage.data,
        "w2_weight_scale": config._w2.scale.weight_scale.storage.data,
        "w13_bias": routed.w13_bias,
        "w2_bias": routed.w2_bias,
    }


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_a_member_reads_a_range_of_what_is_packed_for_dp(rank: int, degree: int) -> None:
    dp = full()
    member = view(dp, rank, degree)
    whole, found = packed_of(dp), packed_of(member)
    for key, tensor in found.items():
        expected = whole[key].chunk(degree)[rank]
        assert tensor.data_ptr() == expected.data_ptr()
        assert (tensor.shape, tensor.stride()) == (expected.shape, expected.stride())
    for key in ("w13_weight", "w2_weight"):
        of_all, of_member = getattr(dp.routed, key), getattr(member.routed, key)
        share = [EXPERTS // degree, *of_all.shape[1:]]
        assert (of_member.shape, of_member.shape_max) == (share, share)
        assert of_all.shape[0] == of_all.shape_max[0] == EXPERTS


@pytest.mark.usefixtures("hopper")
def test_packed_bytes_are_counted_once() -> None:
    """Though none of them is in a parameter."""
    dp = full()
    expected = sum(tensor.nbytes for tensor in packed_of(dp).values())
    assert ResidentWeights(dp.routed).resident_bytes == expected
    member = view(dp, 1, 2)
    storages = {tensor.untyped_storage().data_ptr() for tensor in dp.routed.buffers()}
    inside = [buffer for key, buffer in member.routed.named_buffers() if "packed" in key]
    assert len(inside) == len(storages) == 4
    assert all(tensor.untyped_storage().data_ptr() in storages for tensor in inside)


INNER = 576
"""Four and a half times the inner features that are packed together on Hopper; 2,880 of GPT-OSS are
22 and a half times."""


def stored_share(layer: ExpertsLayer, features: range) -> dict[str, torch.Tensor]:
    """Return some inner features of a checkpoint's experts: of ``w13`` two rows each."""
    rows = slice(2 * features.start, 2 * features.stop)
    routed = layer.routed
    return {
        "w13_weight": routed.w13_weight[:, rows],
        "w13_weight_scale": routed.w13_weight_scale[:, rows],
        "w13_bias": routed.w13_bias[:, rows].float(),
        "w2_weight": routed.w2_weight[:, :, features.start // 2 : features.stop // 2],
        "w2_weight_scale": routed.w2_weight_scale[:, :, features.start // 32 : features.stop // 32],
    }


@pytest.mark.parametrize(
    ("degree", "shares"),
    [
        (2, (range(256), range(256, 576))),
        (4, (range(128), range(128, 256), range(256, 384), range(384, 576))),
    ],
)
def test_a_share_is_what_hopper_packs_of_a_members_features(
    choose: Choose, degree: int, shares: tuple[range, ...]
) -> None:
    choose(TRITON, on_hopper, scales_on_hopper, hopper=True)
    stored, dp = loaded(INNER), full(INNER)
    whole = packed_of(dp)
    for rank, features in enumerate(shares):
        member = view(dp, rank, degree, by_expert=False, inner=INNER)
        found, alone = packed_of(member), stored_share(stored, features)
        for key, tensor in alone.items():
            pack = scales_on_hopper if key in SCALES else on_hopper
            expected = tensor if key == "w13_bias" else pack(tensor).storage.data
            assert torch.equal(found[key], expected), key
            storages = [of[key].untyped_storage().data_ptr() for of in (found, whole)]
            assert storages[0] == storages[1]
        assert member.routed.w13_weight.shape == [EXPERTS, HIDDEN, 2 * len(features)]
        assert member.routed.w2_weight.shape == [EXPERTS, len(features), HIDDEN]
        assert (member.routed.w2_bias is None) == (rank > 0)


def mixing(tensor: torch.Tensor) -> Tensor:
    """Pack each expert by itself, but rows of all its features together."""
    return on_hopper(tensor.roll(16, dims=1))


def longer(tensor: torch.Tensor) -> Tensor:
    """Pack scales as on Hopper, and show another shape."""
    found = scales_on_hopper(tensor)
    found.shape[2] += 1
    return found


@pytest.mark.parametrize(
    ("pack", "scales", "why"),
    [
        (mixing, scales_on_hopper, "packs the w13_weight of a share unlike the share of that of"),
        (on_hopper, on_hopper, "packs the w13_weight_scale of a share unlike"),
        (on_hopper, longer, "packs the w13_weight_scale of a share unlike"),
    ],
)
def test_shares_that_are_no_parts_of_what_is_packed_end_the_start(
    choose: Choose, pack: Pack, scales: Pack, why: str
) -> None:
    choose(TRITON, pack, scales, hopper=True)
    with pytest.raises(NotImplementedError, match=why):
        full(INNER)


def test_shares_are_refused_where_nobody_knows_how_they_are_packed(choose: Choose) -> None:
    choose(TRITON, packed)
    dp = full()
    with pytest.raises(
        UnviewableWeights,
        match=r"^experts\.routed_experts: vLLM divides each exp.*; --whole-experts 0 divides",
    ):
        view(dp, 1, 2, by_expert=False)


def of_others(tensor: torch.Tensor) -> Tensor:
    """Pack each expert so that its bytes depend on the first."""
    return packed(tensor ^ tensor[:1])


def backwards(tensor: torch.Tensor) -> Tensor:
    """Pack the experts from the last to the first."""
    return packed(tensor.flip(0))


def inside_out(tensor: torch.Tensor) -> Tensor:
    """Pack the experts' rows in turn."""
    found = packed(tensor)
    found.storage.data = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return found


def flat(tensor: torch.Tensor) -> Tensor:
    """Pack all experts into one dimension, as for Blackwell."""
    found = packed(tensor)
    found.storage.data = found.storage.data.flatten(0, 1)[None]
    return found


@pytest.mark.parametrize(
    ("pack", "why"),
    [
        (of_others, "TRITON, vLLM's kernel for these experts, packs the w13_weight of two experts"),
        (backwards, "packs the w13_weight of two experts unlike their range in that of all"),
        (inside_out, r"packed to \(8, 256, 32\) with strides \(32, 256, 1\), which has no ranges"),
        (flat, r"packed to \(1, 2048, 32\) .* no ranges of experts, .*; --moe-backend can name"),
    ],
)
def test_experts_that_are_packed_together_end_the_start(
    choose: Choose, pack: Pack, why: str
) -> None:
    choose(TRITON, pack)
    with pytest.raises(NotImplementedError, match=why):
        full()


def test_a_range_begins_where_kernels_can_read() -> None:
    tensor = torch.zeros(8, 3, 4, dtype=torch.uint8)
    assert len(range_of(tensor, slice(4, 6), 8)) == 2
    with pytest.raises(NotImplementedError, match="an expert of 12 bytes, as it is packed, is no"):
        range_of(tensor, slice(2, 4), 8)


def test_kernels_that_may_pack_experts_together_are_refused_by_name(choose: Choose) -> None:
    choose(Mxfp4MoeBackend.HUMMING, packed)
    with pytest.raises(UnviewableWeights, match=r"^experts: HUMMING, .* name another: triton, mar"):
        make(0, 1, views=False)


def test_another_kernel_than_dps_is_refused(choose: Choose) -> None:
    choose(TRITON, packed)
    dp = full()
    choose(Mxfp4MoeBackend.MARLIN, packed)
    with pytest.raises(UnviewableWeights, match=r"is MARLIN in this layout, and TRITON in DP$"):
        view(dp, 0, 2)
