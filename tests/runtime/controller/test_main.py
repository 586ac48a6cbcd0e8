"""The controller's process."""

import gc
from pathlib import Path

import pytest

from shoal.runtime.config import NodeConfig
from shoal.runtime.controller import main
from shoal.runtime.controller.loop import Controller


def test_garbage_is_not_looked_for_in_what_was_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frozen = list[int]()

    def run(controller: Controller) -> None:
        frozen.append(gc.get_freeze_count())
        controller._transport.close()

    monkeypatch.setattr(Controller, "run", run)
    gc.unfreeze()
    try:
        config = NodeConfig(engines=2, max_group=2, policy="manual", runtime_dir=str(tmp_path))
        main.run_controller(config)
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
