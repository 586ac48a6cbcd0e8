"""What it has cost to leave a layout and to come back to it.

Between bursts a wide layout may be better, and each burst finds the node in it: by the time that
the node is back in the narrow one, requests have waited. If that costs more than the quiet moments
have brought, the next quiet moment must bring it in before the node leaves again.
"""

from dataclasses import dataclass

from shoal.policies.values.partition import Partition


@dataclass(frozen=True, slots=True)
class Excursions:
    """How much slower the node was than each partition would have been when it first left it.

    Attributes:
        left: seconds of requests, forgotten as fast as regrets are.
    """

    left: tuple[tuple[Partition, float], ...] = ()

    def leaving(self, here: Partition, regret: float) -> "Excursions":
        """Return them when the node leaves a partition.

        Args:
            here: the partition.
            regret: by how many seconds of requests the node was slower than with it all the time.
        """
        known = here in dict(self.left)
        return self if known else Excursions((*self.left, (here, regret)))

    def aged(self, kept: float) -> "Excursions":
        """Return them after some time, of which this share is remembered."""
        return Excursions(tuple((p, kept * seconds) for p, seconds in self.left))

    def cost(self, here: Partition, regret: float) -> float:
        """Return what the excursions from a partition have cost in all; 0 if they have paid.

        Args:
            here: the partition, in which the node is again.
            regret: see ``leaving``.
        """
        return max(0.0, regret - dict(self.left).get(here, regret))
