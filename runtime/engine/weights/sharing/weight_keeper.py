"""What the parts of ``SharedLayers`` need of it: who keeps the weights that they find."""

from typing import Protocol

from shoal.runtime.engine.weights.sharing.shared_weight import SharedWeight


class Keeper(Protocol):
    """Has all that an engine keeps (``SharedLayers``)."""

    @property
    def size(self) -> int:
        """Bytes of the memory for all weights that it has so far."""

    def keep(self, name: str, weight: SharedWeight) -> None:
        """Keep a part of one more weight, whose name is for people."""

    def number(self, name: str) -> int:
        """Return the number of what is in a slot at a time, which may be a new one."""

    def number_of(self, name: str) -> int:
        """Return the number of a weight's layer, in which attention, an MLP and experts are one."""

    def allocate(self) -> None:
        """Find or make memory: all weights are known, none is loaded."""
