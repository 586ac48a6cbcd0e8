"""What a layout must save before ``adaptive`` changes to it: a price, and a fine for the past.

Everything is in seconds of requests. The price keeps the node from following noise. The fine is for
layouts that would have been worse than another one so far. Both come from the past: from a burst of
minutes ago, and from what the cost model believed then. So they are bounded by what is at hand. A
layout that saves a tenth of the present requests' time has paid any price and fine within seconds,
however dear the past was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.policies.values.partition import Partition

LEAST_SAVED = 0.5
"""A candidate must have saved so many seconds of requests in any case."""
SURE_SECONDS = 0.2
"""A candidate must have saved so many seconds of each of the usual requests, if they are few. The
noise of many grows as the root of their number: it is a second times that at most."""
NOISE_SECONDS = 0.5
"""The noise is at most so many seconds of each of the requests that are there."""
FINE_SECONDS = 0.5
"""What a candidate is behind the best layout counts as at most so many seconds of each of the
requests that are there, and what excursions have cost as so many of each of the usual ones."""
VAIN_SECONDS = 2.0
"""The same for what switches have cost in vain: that says more of the next switch."""
MOST_AHEAD = 0.75
"""Share of the price that may be paid by what is foreseen."""
SURPLUS_SHARE = 0.25
"""Share of what a candidate has saved beyond its price that counts even if the look ahead says that
a switch would lose time now."""
SURPLUS_SECONDS = 0.5
"""This share is at most so many seconds of each of the requests that are there."""
CROWD_SHARE = 0.5
"""The surplus counts only while this share of the usual requests is there. What was saved in a
crowd that has gone says nothing."""


@dataclass(frozen=True, slots=True)
class Account:
    """What one candidate has saved, and must save, in seconds of requests."""

    saved: float
    """What it has saved beside the present layout; less than 0: what it has lost."""
    price: float
    """See ``price_of``."""
    fine: float
    """See ``fine_of``."""
    has_room: bool
    """Whether the requests that a switch moves can take their KV along."""
    most_surplus: float = 0.0
    """See ``most_surplus_of``."""

    @property
    def lead(self) -> float:
        """What it has saved beyond the fine."""
        return self.saved - self.fine

    @property
    def is_near(self) -> bool:
        """Whether what is foreseen may pay the rest."""
        return self.has_room and self.lead >= max(LEAST_SAVED, (1 - MOST_AHEAD) * self.price)

    @property
    def unpaid(self) -> float:
        """What the look ahead must bring; less than 0: what it may lose, because of the surplus."""
        left = self.price - self.lead
        return left if left > 0.0 else -min(self.most_surplus, -SURPLUS_SHARE * left)


def price_of(noise: float, loss: float) -> float:
    """Return what a candidate must save.

    Args:
        noise: see ``noise_of``.
        loss: what the switch costs (``SwitchCosts.loss``).
    """
    return max(LEAST_SAVED, noise + loss)


def noise_of(usual: float, lately: float) -> float:
    """Return how much a candidate may seem to have saved by chance, in seconds of requests.

    Args:
        usual: as many requests as one usually finds on the node, in bursts rather than between.
        lately: as many as were there lately.
    """
    return min(SURE_SECONDS * usual, math.sqrt(usual), NOISE_SECONDS * lately)


def most_surplus_of(usual: float, lately: float) -> float:
    """Return how much a surplus counts against a look ahead at most, in seconds of requests.

    Args:
        usual: see ``noise_of``.
        lately: see ``noise_of``.
    """
    return SURPLUS_SECONDS * lately if lately >= CROWD_SHARE * usual else 0.0


def fine_of(regrets: Mapping[Partition, float], candidate: Partition, lately: float) -> float:
    """Return what a candidate must save beyond its price.

    It is its distance to the partition that the node would best have had all the time, or nothing
    if the node was faster than that. If the node was slower than each partition would have been,
    its switches have cost that much, and the next one must bring it in.

    Args:
        regrets: by how many seconds of requests the node was slower than each partition would have
            been.
        candidate: one of them.
        lately: see ``noise_of``.
    """
    lost = max(0.0, min(regrets.values()))
    distance = max(0.0, max(regrets.values()) - max(lost, regrets[candidate]))
    return min(lost, VAIN_SECONDS * lately) + min(distance, FINE_SECONDS * lately)
