"""The fake engine's devices: steps in the order they come."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.fake.step_times import Devices, DeviceStep
from tests.units import tp

GROUP, OTHER = tp(0, 1), alone(1)
OWN = alone(0)


@pytest.fixture
def devices() -> Devices:
    return Devices()


def run(devices: Devices, group: tuple[int, ...], now: float, count: int = 1) -> DeviceStep:
    """Queue a step of one second, or a run of them."""
    step = DeviceStep(seconds=1.0, count=count)
    devices.queue(group, step, now)
    return step


def test_a_group_waits_for_each_of_its_members(devices: Devices) -> None:
    run(devices, OWN, 0.0)
    run(devices, OTHER, 0.5)
    assert run(devices, GROUP, 0.6).start == 1.5


def test_a_run_that_is_cut_ends_with_the_step_that_is_computed(devices: Devices) -> None:
    own = run(devices, OWN, 0.0, count=60)
    devices.cut(OWN, 2.5)
    assert own.due == 3.0
    assert run(devices, GROUP, 2.5).start == 3.0
    devices.cut(OWN, 3.5)
    assert own.due == 3.0, "it has ended"
