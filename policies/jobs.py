"""Requests in shadows, and what they cost there: their seconds, and the promises that are broken.

A promise that is missed by little is half broken, and one that is kept by little, too: a shadow is
not the node. So what a layout breaks changes little by little with the load.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from shoal.policies.guessed_outputs import UNLIMITED
from shoal.policies.values.snapshot import NORMAL_PRIORITY, Target

BROKEN = 1.0
"""A broken promise counts as so many times the seconds that a request may take by it."""
TTFT_SHARPNESS, TPOT_SHARPNESS = 8, 16
"""How suddenly a promise counts as broken when the time comes near the target."""
MOST_LATE = 9.0
"""Times as late as promised from which on more makes no difference."""


class Promise(NamedTuple):
    """What a request was promised, in seconds."""

    ttft: float
    """Time to the first token."""
    tpot: float
    """Time per output token."""
    worth: float
    """As many seconds of the request as it counts for if it is broken."""

    def lost(self, ttft: float, tpot: float) -> float:
        """Return the seconds that these times count for, from 0 to ``worth``."""
        late = min(MOST_LATE, ttft / self.ttft) ** TTFT_SHARPNESS
        slow = min(MOST_LATE, tpot / self.tpot) ** TPOT_SHARPNESS
        return self.worth * (1 - 1 / (1 + late) / (1 + slow))


NOTHING = Promise(inf, inf, 0.0)
"""The promise of requests that have none."""


class Kind(NamedTuple):
    """How a request differs from others in the eyes of the node."""

    promise: Promise = NOTHING
    is_urgent: bool = False
    """Whether it goes first, and to the units that are kept for urgent requests."""


USUAL, URGENT = Kind(), Kind(is_urgent=True)
"""The kinds of requests that were promised nothing."""


def kind_of(priority: int, targets: Sequence[Target], output: float) -> Kind:
    """Return what kind of request one of this priority is: urgent if below normal priority.

    It has the promise of the first target that is no more urgent, or else that of the last.

    Args:
        priority: the request's.
        targets: the most urgent one first.
        output: tokens of the mean output.
    """
    is_urgent = priority < NORMAL_PRIORITY
    if not targets:
        return URGENT if is_urgent else USUAL
    target = next((one for one in targets if priority <= one.priority), targets[-1])
    worth = BROKEN * (target.ttft_seconds + output * target.tpot_seconds)
    promise = Promise(target.ttft_seconds, target.tpot_seconds, worth)
    return Kind(promise, is_urgent)


class Job(NamedTuple):
    """A request whose prompt waits in a shadow."""

    start: float
    """When it came, or when the shadow began, seconds."""
    new: int
    """Tokens to compute before its first token."""
    prompt: int
    """Tokens of its prompt."""
    output: int
    """Tokens that it will generate."""
    key: str = ""
    """Its request, while ``output`` is a guess."""
    limit: int = UNLIMITED
    """Most tokens that it may generate."""
    came: float = inf
    """When it came, if that was before ``start``; ``-inf``: its prompt had begun."""
    turn: float = 0.0
    """Prompts are computed in this order."""
    kind: Kind = USUAL

    @property
    def since(self) -> float:
        """When it came, or ``-inf`` if its prompt had begun."""
        return min(self.came, self.start)

    def decoding(self, now: float, steps: int) -> "Decode":
        """Return it when its first token has come, after so many steps of its unit."""
        start, came, output = self.start, self.came, self.output
        ttft = now - (came if -inf < came < start else start)
        end, tokens = steps + output - 1, self.prompt + output
        return Decode(end, start, tokens, output, self.key, self.limit, self.kind, ttft, now)


class Decode(NamedTuple):
    """A request that decodes in a shadow."""

    end: int
    """The number of the step of its unit that generates its last token. Of a request that is in no
    unit (``shadow.Population``): how many tokens it still generates."""
    start: float
    """See ``Job``."""
    tokens: int
    """All its tokens at its end."""
    output: int = 0
    """Tokens that it generates until then."""
    key: str = ""
    """See ``Job``."""
    limit: int = UNLIMITED
    """See ``Job``."""
    kind: Kind = USUAL
    ttft: float = 0.0
    """Seconds until its first token came."""
    first: float = 0.0
    """When that came, seconds."""

    def cost(self, at: float) -> float:
        """Return the seconds that it has cost if it ends then, its broken promise included."""
        if self.kind is USUAL:  # as nearly always, and this is asked for thousands of times
            return at - self.start
        promise = self.kind.promise
        tpot = (at - self.first) / max(1, self.output - 1)
        return at - self.start + promise.lost(self.ttft, tpot)

    def later(self, seconds: float) -> "Decode":
        """Return it as if it had come, and had its first token, so many seconds later."""
        return self._replace(start=self.start + seconds, first=self.first + seconds)


class Guessed(NamedTuple):
    """A request that has ended in a shadow, and not yet on the node."""

    at: float
    """When it ended in the shadow, seconds."""
    decode: Decode
