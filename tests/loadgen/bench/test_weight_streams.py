"""The benchmark of weights that stream, with a CPU's memory and threads in place of GPUs."""

from pathlib import Path

import pytest
import torch

from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.weight_streams import (
    GONE,
    TP,
    Member,
    Part,
    Sizes,
    products,
    summary,
    timings,
)
from shoal.runtime.engine.weights.sharing.devices import memory_and_copier

HOST = torch.device("cpu")
SIZES = Sizes(hidden=16, inner=32, qkv=24, heads=16)


def member(directory: Path, place: int, part: Part) -> Member:
    return Member(place, part, directory, HOST, *memory_and_copier("test", HOST))


def members(directory: Path, share: int) -> list[Member]:
    part = Part(SIZES, 3, share, torch.float32)
    made = [member(directory, place, part) for place in range(share)]
    for one in made:
        one.fill()
    for one in made:
        one.meet()
    return made


@pytest.mark.parametrize("share", [2, 4])
def test_all_members_get_all_weights(tmp_path: Path, share: int) -> None:
    for one in members(tmp_path, share):
        assert one.wrong() == 0


def test_a_weight_that_was_not_copied_is_wrong(tmp_path: Path) -> None:
    one = members(tmp_path, 2)[0]
    one.slots.copies[TP][1].pop()
    assert one.wrong() == 16 * 32 // 2, "a half of down"


def test_a_part_comes_back_from_another_member(tmp_path: Path) -> None:
    made = members(tmp_path, 2)
    again = member(tmp_path, GONE, made[0].part)
    again.open(GONE, holder=0)
    assert again.wrong_own() == 0
    assert set(products(again)) == {"plain", "kept by others"}
    other = member(tmp_path, 0, made[0].part)
    other.kept[0] = again.kept[GONE]
    assert other.wrong_own() > 0


def test_what_a_member_finds_is_summed_up(tmp_path: Path) -> None:
    waits: list[None] = []
    one = members(tmp_path, 2)[0]
    found = dict(timings(one, [5], lambda: waits.append(None)))
    assert list(found) == ["from the others", "weights", "5 tokens"]
    assert len(waits) == 3, "all members begin each action at once"
    kept = sum(weight.part_bytes for weight in one.weights)
    assert found["from the others"]["bytes"] == kept, "as much as it keeps itself"
    assert summary("weights", [found["weights"]]) == {"case": "weights", "wrong": 0}


def test_both_steps_compute_the_same(tmp_path: Path) -> None:
    one = members(tmp_path, 2)[1]
    for number, weight in enumerate(one.weights):
        if weight.layer == 0:
            whole = one.slot(weight).clone()
            one.use(0)
            one.slots.copier.wait(one.slots.copier.start(one.slots.copies[TP][0]))
            part = weight.within(one.slot(weight), weight.own, 2)
            assert torch.equal(part, weight.within(whole, weight.own, 2)), "nothing came here"
            x = torch.randn(3, weight.shape[1])
            split = one._split(weight, x)
            part.copy_(one._written(number, 1))
            torch.testing.assert_close(split, one._whole(weight, x))


def test_the_slowest_member_counts() -> None:
    fetched = [{"bytes": 4e9, "seconds": 0.01}, {"bytes": 4e9, "seconds": 0.02}]
    assert summary("a", fetched) == {"case": "a", "GB/s": 200.0}
    steps = [{"plain": 1e-3, "streamed": 2e-3}, {"plain": 1.5e-3, "streamed": 1e-3}]
    assert summary("b", steps) == {"case": "b", "plain us": 1500.0, "streamed us": 2000.0}


def test_sizes_are_those_of_a_shape() -> None:
    assert Sizes.of(read_shape("llama-3-8b")) == Sizes(4096, 14336, 6144, 4096)
