"""What a loader finds before it loads, what it reserves, and that a worker that is dropped goes."""

import gc
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.config import CUDAGraphMode

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import LayoutConfigs, NodeConfig
from shoal.runtime.engine.runner import loading
from shoal.runtime.engine.runner.loading import (
    CONNECTED_LAYOUT_BYTES,
    LAYOUT_BYTES,
    LayoutLoader,
    collect_frozen,
)
from shoal.runtime.engine.sequence.sequence_plan import LARGER_CAPTURES_BYTES
from shoal.runtime.engine.sequence.sp_settings import SettingError

CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=3000),
    compilation_config=SimpleNamespace(
        cudagraph_capture_sizes=[1, 512], cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    ),
)

FULL = "steps with prompts"


def loader(max_sp: int, *, sizes_are_chosen: bool = False) -> LayoutLoader:
    configs = LayoutConfigs({}, sizes_are_chosen=sizes_are_chosen)
    node = NodeConfig(8, 4, "manual", "unused", configs, max_sp=max_sp)
    made = LayoutLoader(node, 0)
    model: Any = SimpleNamespace(supports_multimodal_inputs=False)
    made._dp = SimpleNamespace(model_config=model)
    return made


def test_memory_is_kept_for_the_layouts_beyond_dp() -> None:
    connected = 2 * CONNECTED_LAYOUT_BYTES
    assert loader(1)._reserved() == 2 * LAYOUT_BYTES
    assert loader(4)._reserved() == connected
    assert loader(2)._reserved() == connected + LARGER_CAPTURES_BYTES
    assert loader(2, sizes_are_chosen=True)._reserved() == connected


def test_memory_is_kept_for_what_encoders_of_layouts_beyond_dp_make() -> None:
    with patch.object(loading, "encoder_cache_bytes", lambda _: 1000):
        assert loader(1)._reserved() == 2 * (LAYOUT_BYTES + 1000)


@pytest.mark.parametrize(
    ("shared", "layout", "v2", "expected"),
    [
        (False, DP, True, FULL),
        (False, Layout(tp=2), True, FULL),
        (True, Layout(tp=2), True, FULL),
        (True, DP, True, "pieces"),
        (True, DP, False, None),
    ],
)
def test_dp_has_other_graphs_where_engines_share_weights(
    *, shared: bool, layout: Layout, v2: bool, expected: str | None
) -> None:
    node, found = loader(1), list[str]()
    node.shared = SimpleNamespace(slots=None) if shared else None  # type: ignore[assignment]
    worker: Any = SimpleNamespace(layout=layout, config=None, model_runner=None)
    with (
        patch.object(loading, "add_full_graphs", lambda *_, **__: found.append(FULL)),
        patch.object(loading, "capture_streamed", lambda *_: found.append("pieces")),
        patch.object(loading, "can_have_graphs", lambda _: v2),
    ):
        node._add_graphs(worker)
    assert found == ([] if expected is None else [expected])


class Loaded:
    """A layout's worker that has loaded layers for itself."""

    def __init__(self, layout: Layout, elements: int) -> None:
        self.layout = layout
        self.owned_bytes = 4 * elements


@pytest.mark.parametrize("elements", [0, 500_000])
def test_weights_that_layouts_loaded_for_themselves_are_said(
    elements: int, caplog: pytest.LogCaptureFixture
) -> None:
    node = loader(1)
    pair, four = Layout(tp=2), Layout(tp=4)
    sizes = {DP: 2 * elements, pair: elements, four: elements // 2}
    workers = {layout: Loaded(layout, size) for layout, size in sizes.items()}
    node.workers = workers  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, "shoal.engine"):
        node._say_what_is_owned()
    ours = [record for record in caplog.records if record.name == "shoal.engine"]
    said = [record.getMessage() for record in ours]
    line = (
        "engine 0 keeps weights of its own for layouts beyond DP, which are no views of DP's: "
        "tp2 2.0 MB, tp4 1.0 MB; there is so much less memory for KV"
    )
    assert said == ([line] if elements else [])


def test_a_wrong_word_is_found_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "yes")
    with pytest.raises(SettingError, match=r"^SHOAL_SP_EXCHANGE=yes: "):
        loader(2)
    loader(1)


NOBODY: Any = None
"""No rendezvous: nobody asks it."""


def test_an_exchange_that_cannot_be_is_found_before_members_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "peer")
    node = loader(2)
    node._dp = CONFIG
    monkeypatch.setattr(loading, "engine_config", lambda *_: CONFIG)
    with pytest.raises(SettingError, match="there are no GPUs"):
        node._meet(Layout(tp=2), NOBODY)
    assert node.workers == {}


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
