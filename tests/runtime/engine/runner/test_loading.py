"""Which layouts' graphs steps by sequence replay, on all shapes of node, and what that reserves.

And that a layout which is dropped goes.
"""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from shoal.runtime.config import LayoutConfigs, NodeConfig
from shoal.runtime.engine.layouts.vllm_layout import (
    CONNECTED_LAYOUT_BYTES,
    LARGER_CAPTURES_BYTES,
    LAYOUT_BYTES,
)
from shoal.runtime.engine.runner.loading import LayoutLoader, collect_frozen
from shoal.runtime.engine.sequence.sp_settings import SettingError

MAX_TOKENS = 3000
OWN_SIZES = [1, 256, 512]
SHARE_OF_TWO = [576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1408, 1500]
SHARE_OF_FOUR = [576, 640, 704, 750]

CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
    compilation_config=SimpleNamespace(
        cudagraph_capture_sizes=OWN_SIZES, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    ),
)


def loader(max_sp: int, *, sizes_are_chosen: bool = False) -> LayoutLoader:
    configs = LayoutConfigs({}, sizes_are_chosen=sizes_are_chosen)
    node = NodeConfig(8, 4, "manual", "unused", configs, max_sp=max_sp)
    return LayoutLoader(node, 0)


def captures(of: LayoutLoader) -> dict[int, tuple[bool, list[int]]]:
    """Return by degree whether steps by sequence replay graphs of the layout, and which larger."""
    found = {degree: of._captures(degree, CONFIG) for degree in (1, 2, 4)}
    return {degree: (each.wanted, list(each.larger)) for degree, each in found.items()}


NONE = (False, list[int]())


@pytest.mark.parametrize(
    ("max_sp", "wanted"),
    [
        pytest.param(1, {1: NONE, 2: NONE, 4: NONE}, id="no steps by sequence"),
        pytest.param(4, {1: (True, SHARE_OF_TWO), 2: NONE, 4: NONE}, id="the base is DP"),
        pytest.param(
            2,
            {1: (True, SHARE_OF_TWO), 2: (True, SHARE_OF_TWO), 4: NONE},
            id="the base of a group of four is TP2",
        ),
    ],
)
def test_graphs_of_bases_are_replayed(
    max_sp: int, wanted: dict[int, tuple[bool, list[int]]]
) -> None:
    assert captures(loader(max_sp)) == wanted


def test_sizes_go_as_far_as_the_largest_share_of_any_group() -> None:
    """With groups of four alone, shares were no larger than these."""
    groups = loader(4)
    groups._node = SimpleNamespace(max_sp=4, degrees=(1, 4))  # type: ignore[assignment]
    assert captures(groups)[1] == (True, SHARE_OF_FOUR)


def test_who_chooses_sizes_gets_those_alone() -> None:
    chosen = loader(4, sizes_are_chosen=True)
    assert captures(chosen) == {1: (True, []), 2: NONE, 4: NONE}


def test_memory_is_kept_for_the_larger_graphs_that_vllm_does_not_measure() -> None:
    """It measures those of DP."""
    connected = 2 * CONNECTED_LAYOUT_BYTES
    assert loader(1)._reserved() == 2 * LAYOUT_BYTES
    assert loader(4)._reserved() == connected
    assert loader(2)._reserved() == connected + LARGER_CAPTURES_BYTES
    assert loader(2, sizes_are_chosen=True)._reserved() == connected


def test_a_wrong_word_is_found_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "yes")
    with pytest.raises(SettingError, match=r"^SHOAL_SP_EXCHANGE=yes: "):
        loader(2)
    loader(1)


def test_an_exchange_that_cannot_be_is_found_before_members_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "peer")
    node = loader(2)
    node._dp = CONFIG
    monkeypatch.setattr("shoal.runtime.engine.runner.loading.layout_config", lambda *_: CONFIG)
    with pytest.raises(SettingError, match="there are no GPUs"):
        node._meet(2, 0, 0.0)


class Cycle:
    """As a model and its runner are."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("freeze", [True, False])
def test_what_a_warm_up_froze_goes_too(freeze: bool) -> None:
    layout = weakref.ref(Cycle())
    gc.freeze()
    try:
        gc.collect()
        assert layout() is not None, "frozen, it stays: else this test says nothing"
        collect_frozen(freeze=freeze)
        assert layout() is None
        assert (gc.get_freeze_count() > 0) == freeze
    finally:
        gc.unfreeze()
