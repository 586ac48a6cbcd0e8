"""The controller's process."""

import gc
from pathlib import Path

import pytest

from shoal.runtime.config import NodeConfig
from shoal.runtime.controller import main
from shoal.runtime.controller.loop import Controller
from shoal.runtime.protocol.loopback import LoopbackNetwork


def test_garbage_is_not_looked_for_in_what_was_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frozen = list[int]()
    monkeypatch.setattr(main, "ZmqControllerTransport", lambda *_: LoopbackNetwork().controller)
    monkeypatch.setattr(main, "heartbeat_path", lambda _: tmp_path / "turns")
    monkeypatch.setattr(Controller, "run", lambda _: frozen.append(gc.get_freeze_count()))
    gc.unfreeze()
    try:
        main.run_controller(
            NodeConfig(engines=2, max_group=2, policy="manual", runtime_dir=str(tmp_path))
        )
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
