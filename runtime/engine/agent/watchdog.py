"""When a step in flight counts as hung: its runner has stopped, or waits for a member for ever.

A step says nothing while it runs, so only its time tells. Nobody knows beforehand how long a step
may take: a long prompt takes seconds, and the first step of a new shape may compile much longer.
But earlier steps like it do tell, and most steps are like many earlier ones. A step like these may
still be the first that needs some kernel, so runners note when they compile (``compilations.py``).
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.results import EndedSteps
from shoal.runtime.protocol.messages import Mode, Work

SHORTEST_SECONDS = 1.5
"""No step counts as hung earlier: a busy machine delays any process for a while."""
FACTOR = 10.0
"""A step hangs if it takes more than so many times as long as the longest step like it."""
STEPS = 8
"""After so many steps of a kind, they tell how long one takes."""
LIKENESS = 2.0
"""A step is like earlier ones if it is at most so many times as large as their largest."""


Kind = tuple[Unit, Mode, bool]
"""The unit, the mode, and whether prompts are computed. A step by sequence and one in TP take
different kernels and collectives: what one of them takes says nothing of the other."""


class HungStepError(RuntimeError):
    """A step takes too long; the message is one line."""


class _Seen(msgspec.Struct):
    """The steps of one kind that a unit has taken."""

    steps: int = 0
    seconds: float = 0.0
    """Duration of the longest step."""
    tokens: int = 0
    """Tokens of the largest step."""
    pairs: int = 0
    """Most pairs of tokens that a step attended to."""

    def add(self, work: Work, seconds: float) -> None:
        self.steps += work.steps
        self.seconds = max(self.seconds, seconds)
        self.tokens = max(self.tokens, _tokens(work))
        self.pairs = max(self.pairs, _pairs(work))

    def tells(self, work: Work) -> bool:
        return (
            self.steps >= STEPS
            and _tokens(work) <= LIKENESS * self.tokens
            and _pairs(work) <= LIKENESS * self.pairs
        )


class StepWatch:
    """Judges the steps in flight of one engine's cores.

    Args:
        timeout: seconds after which any step counts as hung; None: no step ever does.
        compiles: whether any runner of a unit compiles a kernel, or did so in so many last seconds.
    """

    def __init__(
        self,
        timeout: float | None,
        compiles: Callable[[Unit, float], bool] = lambda *_: False,
    ) -> None:
        self._compiles = compiles
        self._timeout = math.inf if timeout is None else timeout
        self.judges = timeout is not None
        """Whether it judges steps at all, and so has to be told of them."""
        self._seen: dict[Kind, _Seen] = {}
        self._delayed: set[Unit] = set()
        self._turned_at: float | None = None
        self.awake_since = 0.0
        """When the latest long break of the loop ended. During such a break, for instance while the
        machine was suspended, the runners did not run either."""

    def turn(self, now: float) -> None:
        """Note a turn of the engine's loop."""
        if self._turned_at is not None and now - self._turned_at > SHORTEST_SECONDS:
            self.awake_since = now
        self._turned_at = now

    def see(self, unit: Unit, steps: Sequence[EndedSteps], seconds: float) -> None:
        """Learn from steps of a core that have ended together.

        Args:
            unit: the core's.
            steps: what they computed, and in which mode.
            seconds: what each of them took, on average.
        """
        if not steps:
            return
        delayed = unit in self._delayed
        self._delayed.discard(unit)
        for step in steps if not delayed else ():
            seen = self._seen.setdefault(_kind(unit, step.mode, step.work), _Seen())
            seen.add(step.work, seconds / step.work.steps)

    def expect_delay(self, unit: Unit) -> None:
        """Note that the runners may do other things before the core's next step."""
        self._delayed.add(unit)

    def limit(self, unit: Unit, mode: Mode, work: Work) -> float:
        """Return how many seconds a step of a core may take."""
        seen = self._seen.get(_kind(unit, mode, work), _Seen())
        if unit in self._delayed or not seen.tells(work):
            return self._timeout
        return min(self._timeout, max(SHORTEST_SECONDS, FACTOR * seen.seconds))

    def check(self, unit: Unit, mode: Mode, work: Work, seconds: float) -> None:
        """Judge the oldest step in flight of a core.

        Args:
            unit: the core's.
            mode: how the step runs.
            work: what it computes.
            seconds: time since it could begin.

        Raises:
            HungStepError: it hangs.
        """
        limit = self.limit(unit, mode, work)
        if seconds > limit and (seconds > self._timeout or not self._compiles(unit, limit)):
            raise HungStepError(
                f"a step of unit {list(unit.engines)} hangs: {limit:.1f} s and no result"
            )


def _kind(unit: Unit, mode: Mode, work: Work) -> Kind:
    return unit, mode, work.prefill_tokens > 0


def _tokens(work: Work) -> int:
    return (work.prefill_tokens + work.decodes) // max(1, work.steps)


def _pairs(work: Work) -> int:
    return (work.prefill_pairs + work.context_tokens) // max(1, work.steps)
