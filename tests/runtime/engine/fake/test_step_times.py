"""The fake engine's devices: steps in the order they come, and in turn where they interleave."""

import math

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.fake.step_times import Devices, DeviceStep
from tests.units import tp

GROUP, OTHER = tp(0, 1), alone(1)
OWN = alone(0)
RATIO = 2


@pytest.fixture
def devices() -> Devices:
    return Devices(RATIO)


def run(devices: Devices, group: tuple[int, ...], now: float, count: int = 1) -> DeviceStep:
    """Queue a step of one second, or a run of them."""
    step = DeviceStep(seconds=1.0, count=count)
    devices.queue(group, step, now)
    return step


def test_a_group_waits_for_each_of_its_members(devices: Devices) -> None:
    run(devices, OWN, 0.0)
    run(devices, OTHER, 0.5)
    assert run(devices, GROUP, 0.6).start == 1.5


def test_own_steps_get_their_turn_after_so_many_of_the_group(devices: Devices) -> None:
    devices.interleave(0, GROUP, 0.0)
    first = run(devices, GROUP, 0.0)
    own = run(devices, OWN, 0.0)
    assert own.start == math.inf
    second = run(devices, GROUP, first.due)
    assert (second.start, own.start) == (1.0, 2.0)
    third = run(devices, GROUP, second.due)
    assert third.start == 3.0


def test_an_own_step_that_misses_its_turn_waits_for_the_next(devices: Devices) -> None:
    devices.interleave(0, GROUP, 0.0)
    for now in range(RATIO + 1):
        run(devices, GROUP, float(now))
    own = run(devices, OWN, 2.5)
    assert own.start == math.inf
    run(devices, GROUP, 3.0)
    assert own.start == 4.0


def test_own_steps_have_the_device_while_the_group_rests(devices: Devices) -> None:
    devices.interleave(0, GROUP, 0.0)
    assert run(devices, OWN, 0.0).start == 0.0
    run(devices, GROUP, 0.5)
    own = run(devices, OWN, 1.0)
    assert own.start == math.inf
    devices.rest(GROUP, 2.0)
    assert own.start == 2.0


def test_separated_engines_start_what_waits(devices: Devices) -> None:
    devices.interleave(0, GROUP, 0.0)
    run(devices, GROUP, 0.0)
    own = run(devices, OWN, 0.0)
    devices.separate(0, 0.5)
    assert own.start == 1.0
    run(devices, GROUP, 1.5)
    assert run(devices, OWN, 2.0).start == 3.0


def test_runs_are_cut_when_others_want_a_turn() -> None:
    changed: list[int] = []
    devices = Devices(RATIO, changed.append)
    own = run(devices, OWN, 0.0, count=60)
    devices.interleave(0, GROUP, 2.5)
    assert (own.due, changed) == (3.0, [0])
    own = run(devices, OWN, 3.0, count=60)
    group = run(devices, GROUP, 4.5)
    assert (own.due, group.start) == (5.0, 5.0)
    assert devices.is_shared(OWN)
    assert devices.is_shared(GROUP)


def test_who_has_nothing_to_do_shares_with_nobody(devices: Devices) -> None:
    devices.interleave(0, GROUP, 0.0)
    assert not devices.is_shared(OWN)
    devices.rest(OWN, 0.0)
    assert not devices.is_shared(GROUP)
    group = run(devices, GROUP, 0.0, count=60)
    run(devices, OWN, 1.5)
    assert group.due == 2.0
