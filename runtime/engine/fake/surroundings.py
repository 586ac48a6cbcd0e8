"""What the cores of a fake engine have in common."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.fake.faults import Faults
from shoal.runtime.engine.fake.step_times import Devices, HopTimes, StepTimes

OnStart = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the cores of a fake engine have in common."""

    settings: FakeSettings
    step_times: Callable[[Unit], StepTimes]
    """How long the steps of a unit take now."""
    hop_times: HopTimes
    """How long what they compute takes from stage to stage."""
    devices: Devices
    """The node's devices, as far as this process knows them."""
    clock: Clock
    """Seconds; steps take their time on it."""
    faults: Faults
    on_start: OnStart | None
    """Called with each request in its first step, and with the clock time at which that step
    starts."""
