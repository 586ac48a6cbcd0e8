"""What ``adaptive`` remembers from one plan to the next."""

import math
from dataclasses import dataclass, field, replace

from shoal.policies.excursions import Excursions
from shoal.policies.hindsight import Hindsight, renewed
from shoal.policies.second_chance import Chances
from shoal.policies.surges import Surges
from shoal.policies.terms import TermsOf
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import PoolRequest

GONE_SHARE = 0.1
GONE_SECONDS = 8.0
"""A crowd has gone if for so long at most this share of the usual requests was there. Bursts that
pause for longer are left to what the next one shows."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers from one plan to the next."""

    at: float
    """When the layout was last judged."""
    wider: bool | None = None
    """Whether the last switch went to fewer and wider units; None: there was none."""
    arrived: tuple[PoolRequest, ...] = ()
    """Requests that no shadow has got yet."""
    placed: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    """What no shadow knows yet of requests: what was cached of them, and how long they were."""
    shadows: Hindsight | None = None
    looked: float = -math.inf
    """When a switch was last looked at that seemed to pay."""
    foreseen: tuple[tuple[Partition, float], ...] = ()
    """What the latest look said that a switch to each of these would bring."""
    agreed: Partition | None = None
    """To which partition a switch seemed to pay then. To a wider one it must do so twice, because
    that is never urgent."""
    chances: Chances = field(default_factory=Chances)
    """When the node last had each layout."""
    terms: TermsOf | None = None
    """What the units of shadows can do, by the cost model of ``terms_at``."""
    terms_at: float = 0.0
    age: float = 0.0
    """For how many seconds the node was watched."""
    requests: float = 0.0
    """Requests on the node, smoothed over ``adaptive.USUAL_SECONDS``, or over ``age`` while this is
    less."""
    squares: float = 0.0
    """The squares of their numbers, smoothed alike."""
    quiet_since: float = math.inf
    """Since when at most ``GONE_SHARE`` of the usual requests have been there."""
    surges: Surges = field(default_factory=Surges)
    """The present surge of requests, and what is known of earlier ones."""
    behind: tuple[tuple[Partition, float], ...] = ()
    """By how many seconds of requests the node was slower than each partition would have been, up
    to when that one's shadow last began anew."""
    excursions: Excursions = field(default_factory=Excursions)
    """What it has cost to leave each partition."""

    @property
    def usual(self) -> float:
        """As many requests as one usually finds: between bursts this is about a burst's."""
        return self.squares / self.requests if self.requests else 0.0

    def without_gone_crowd(self, requests: int, terms: TermsOf) -> "Memory":
        """Return the memory without what a crowd has taught, once it has gone.

        What comes next is nothing like that crowd. If it had to make up for what switches have cost
        then, or was compared with what was usual then, the node would stay for long in a layout
        that suits nobody. What is known of step times and of surges is kept.

        Args:
            requests: how many are on the node.
            terms: what its units can do.
        """
        if requests > GONE_SHARE * self.usual:
            return replace(self, quiet_since=math.inf)
        since = min(self.quiet_since, self.at)
        if self.shadows is None or not self.usual or self.at - since < GONE_SECONDS:
            return replace(self, quiet_since=since)
        shadows = renewed(self.shadows, dict(self.shadows.trials), terms)
        forgotten = replace(self, behind=(), excursions=Excursions(), shadows=shadows)
        return replace(forgotten, age=0.0, requests=0.0, squares=0.0)
