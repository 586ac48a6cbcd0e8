"""What each phase of a start takes of a device, told by readings that are made up."""

from types import SimpleNamespace

import pytest
import torch

from shoal.runtime.engine.runner import device_memory
from shoal.runtime.engine.runner.device_memory import (
    CONTEXT,
    MemoryPhases,
    leave_in_use,
    used_bytes,
)


def test_each_phase_takes_what_is_in_use_after_it_and_was_not_before() -> None:
    readings = iter([500, 500, 900, 950, 940])
    memory = MemoryPhases(lambda: next(readings))
    memory.begin()
    with memory.phase("weights"):
        pass
    with memory.phase("tp2 core"):
        pass
    assert memory.taken == {CONTEXT: 500, "weights": 400, "tp2 core": -10}


def test_a_phase_that_fails_took_nothing_that_can_be_told() -> None:
    readings = iter([500, 900])
    memory = MemoryPhases(lambda: next(readings))
    with pytest.raises(ValueError, match="of the phase"), memory.phase("weights"):
        raise ValueError("of the phase")
    assert memory.taken == {}


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    assert used_bytes() is None
    memory = MemoryPhases()
    memory.begin()
    with memory.phase("weights"):
        pass
    assert memory.taken == {}


def test_a_share_of_the_device_is_asked_for_without_what_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(gpu_memory_utilization=0.9)
    leave_in_use(config)
    assert config.gpu_memory_utilization == 0.9, "there is no GPU"
    gpu = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(device_memory, "current_platform", gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    leave_in_use(config)
    assert config.gpu_memory_utilization == pytest.approx(0.65)
