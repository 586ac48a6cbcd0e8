"""How long the fake engine's steps take, and when its devices are free for them."""

from collections.abc import Callable, Iterable

from policies.cost_model import Batch
from policies.partition import Group

StepTimes = Callable[[int, Batch], float]
"""From a group's degree and the work of a step to its seconds."""


def constant(seconds: float) -> StepTimes:
    """Return step times that depend on nothing."""
    return lambda _degree, _batch: seconds


class Devices:
    """When each engine's device has done all that is queued for it.

    A device computes its steps in the order they come, whichever core sends them: the first step of
    a group waits for the members' steps in flight. Cores that share devices share one instance.
    """

    def __init__(self) -> None:
        self._free_at: dict[int, float] = {}

    def free_at(self, engines: Iterable[int]) -> float:
        """Return the clock time from which all of these are free; in the past if they are now."""
        return max(self._free_at.get(engine, 0.0) for engine in engines)

    def occupy(self, group: Group, until: float) -> None:
        """Note when the last step queued for a group's devices ends."""
        self._free_at.update(dict.fromkeys(group, until))
