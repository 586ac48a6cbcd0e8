"""The book of units: which engines work together now."""

from collections.abc import Mapping

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition, singles


class UnitBook:
    """The partition of one node's engines, and the epochs in which it changes.

    Args:
        engines: number of engines; each begins alone.
    """

    def __init__(self, engines: int) -> None:
        self._partition = singles(engines)
        self._bound: dict[Unit, int] = {}
        self._starting: Unit | None = None
        self._epoch = 0
        self.bound: Mapping[Unit, int] = self._bound
        """The groups of the partition, each with the epoch of its bind."""

    @property
    def partition(self) -> Partition:
        """All current units."""
        return self._partition

    @property
    def starting(self) -> Unit | None:
        """The group that is being formed again whose members are in its collectives already."""
        return self._starting

    def next_epoch(self) -> int:
        """Return an epoch higher than any before."""
        self._epoch += 1
        return self._epoch

    def unit_of(self, engine: int) -> Unit:
        """Return the unit that an engine is in."""
        return next(unit for unit in self._partition if engine in unit.engines)

    def has(self, unit: Unit) -> bool:
        """Return whether a unit is there now: it is bound, or is a tier, which always is."""
        return unit.tier or unit in self._partition

    # --- changes ------------------------------------------------------------------------------

    def bind(self, unit: Unit, epoch: int) -> None:
        """Make a unit of engines that were alone."""
        rest = [u for u in self._partition if not set(u.engines) & set(unit.engines)]
        self._partition = tuple(sorted([*rest, unit]))
        self._bound[unit] = epoch

    def release(self, unit: Unit) -> None:
        """Make each engine of a unit a unit of its own."""
        rest = [u for u in self._partition if u != unit]
        self._partition = tuple(sorted([*rest, *(alone(engine) for engine in unit.engines)]))
        self._bound.pop(unit, None)

    def start(self, unit: Unit | None) -> None:
        """Note the group whose members start its core now; None: no group does."""
        self._starting = unit

    def check_integrity(self, engines: int) -> list[str]:
        """Return one line per broken invariant.

        Args:
            engines: number of engines.
        """
        problems = []
        covered = sorted(engine for unit in self._partition for engine in unit.engines)
        if covered != list(range(engines)):
            problems.append(f"controller: partition {self._partition} is not one")
        if set(self._bound) != {unit for unit in self._partition if unit.is_group}:
            problems.append(f"controller: bound groups {sorted(self._bound)} are not the units")
        return problems
