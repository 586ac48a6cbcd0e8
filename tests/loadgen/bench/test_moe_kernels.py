"""The benchmark of experts, on a CPU: everything that it times computes the same layer."""

from collections.abc import Callable

import pytest
import torch

from shoal.loadgen.bench import moe_kernels
from shoal.loadgen.bench.moe_kernels import Shape, Share, Whole, layers_of, prepared, random_step
from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels.expert_kernels import PlainExperts

SHAPE = Shape("small", hidden=256, intermediate=768, experts=8, top_k=2)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Callable[[int], torch.Tensor], layers: int) -> float:
        return float(sum(len(call(layer)) for layer in range(layers)))

    monkeypatch.setattr(moe_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(moe_kernels, "UNCACHED", 0)
    monkeypatch.setattr(moe_kernels, "KERNEL", PlainExperts)
    monkeypatch.setattr(moe_kernels, "measure", timed)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_views_give_the_bits_of_packed_weights_and_stocks_results(tp: int) -> None:
    layers = layers_of(SHAPE, "bf16", Layout(tp=tp))
    case = moe_kernels.run_case(SHAPE, Layout(tp=tp), "bf16", layers, tokens=5)
    assert set(case.micros) == {"experts", "views", "packed", "stock"}
    assert case.same_bits["packed"]
    assert case.error < 0.02
    assert "the bits of packed" in str(case)


def test_other_weights_are_noticed() -> None:
    layers = layers_of(SHAPE, "bf16", Layout(tp=2))
    wrong = layers[1]["packed"]
    case = moe_kernels.run_case(
        SHAPE, Layout(tp=2), "bf16", [{**layers[0], "packed": wrong}, layers[1]], tokens=5
    )
    assert not case.same_bits["packed"]
    assert "OTHER BITS THAN packed" in str(case)


@pytest.mark.parametrize("name", ["views", "experts"])
def test_the_shares_of_all_members_make_the_whole(name: str) -> None:
    whole, step = Whole(SHAPE, "bf16"), random_step(SHAPE, 5)

    def computed(share: Share) -> torch.Tensor:
        return prepared(SHAPE, "bf16", share, step)().float()

    members = [computed(whole.shares(rank, Layout(tp=4))[name]) for rank in range(4)]
    expected = computed(whole.shares(0, Layout())["stock"])
    torch.testing.assert_close(sum(members), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tp", [2, 4])
def test_blocks_of_scales_are_divided_where_they_can_be(tp: int) -> None:
    """Four members would cut through blocks of 768 = 6 * 128 rows: they have whole experts."""
    shares = Whole(SHAPE, "fp8-block").shares(1, Layout(tp=tp))
    assert ("views" in shares) == (tp == 2)
    for share in shares.values():
        assert share.w13_scale is not None
        assert share.w2_scale is not None
        assert share.w13.shape[1] == 128 * share.w13_scale.shape[1]
        assert share.w2.shape[2] == 128 * share.w2_scale.shape[2]


def test_views_are_dps_and_packed_weights_are_not() -> None:
    shares = Whole(SHAPE, "bf16").shares(1, Layout(tp=2))
    storages = {name: share.w13.untyped_storage().data_ptr() for name, share in shares.items()}
    assert storages["views"] == storages["experts"]
    assert len({storages[name] for name in ("views", "packed", "stock")}) == 3
