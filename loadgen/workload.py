"""Workloads: requests, when they arrive, and what their prompts have in common."""

import enum
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

WINDOW_SECONDS = 10.0
"""Length of the windows in which a trace's bursts are detected."""
BURST_RATIO = 1.5
"""A window is a burst from this multiple of the mean rate on, and quiet below the mean."""


class Phase(enum.StrEnum):
    """The state of the load when a request arrives."""

    QUIET = "quiet"
    BURST = "burst"
    BETWEEN = "between"
    """Neither quiet nor a burst."""


class Block(NamedTuple):
    """A stretch of a prompt. Blocks with the same id have the same tokens."""

    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    """Seconds from the start of the workload."""
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    phase: Phase = Phase.BETWEEN
    prefix: tuple[Block, ...] = ()
    """The blocks that the prompt begins with; the rest of the prompt is the request's own. If the
    blocks are longer than the prompt, the prompt ends within them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    arrivals: tuple[Arrival, ...]

    def scaled(self, factor: float) -> "Workload":
        """Return the workload at ``factor`` times its rate.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"a rate cannot be scaled by {factor:g}")
        return self._with(replace(a, at=a.at / factor) for a in self.arrivals)

    def resized(self, factor: float) -> "Workload":
        """Return the workload with ``factor`` times the tokens, rounded, and at least one each.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"lengths cannot be scaled by {factor:g}")

        def size(tokens: int) -> int:
            return max(1, round(tokens * factor))

        return self._with(
            replace(
                a,
                prompt_tokens=size(a.prompt_tokens),
                output_tokens=size(a.output_tokens),
                prefix=tuple(Block(block.id, size(block.tokens)) for block in a.prefix),
            )
            for a in self.arrivals
        )

    def first(self, requests: int | None = None, seconds: float | None = None) -> "Workload":
        """Return the first ``requests`` requests, and of these only those before ``seconds``."""
        arrivals = itertools.islice(self.arrivals, requests)
        return self._with(a for a in arrivals if seconds is None or a.at < seconds)

    def fitting(self, tokens: int) -> "Workload":
        """Return the workload without the requests of more tokens, prompt and output together."""
        return self._with(a for a in self.arrivals if a.prompt_tokens + a.output_tokens <= tokens)

    def with_priorities(self, shares: Mapping[int, float], seed: int) -> "Workload":
        """Return the workload with priorities drawn in these proportions.

        Raises:
            ValueError: a share is negative, or all of them are 0.
        """
        if min(shares.values(), default=0) < 0 or not sum(shares.values()) > 0:
            raise ValueError("the shares of priorities must not be negative, and some more than 0")
        drawn = random.Random(seed).choices(
            list(shares), list(shares.values()), k=len(self.arrivals)
        )
        return self._with(
            replace(a, priority=priority) for a, priority in zip(self.arrivals, drawn, strict=True)
        )

    def _with(self, arrivals: Iterator[Arrival]) -> "Workload":
        return replace(self, arrivals=tuple(arrivals))


def with_phases(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return arrivals with their phases, by the rate in the window of each."""
    if not arrivals:
        return ()
    counts = Counter(int(arrival.at / WINDOW_SECONDS) for arrival in arrivals)
    seconds = max(WINDOW_SECONDS, arrivals[-1].at)
    mean = len(arrivals) / seconds * WINDOW_SECONDS

    def phase(arrival: Arrival) -> Phase:
        count = counts[int(arrival.at / WINDOW_SECONDS)]
        if count >= BURST_RATIO * mean:
            return Phase.BURST
        return Phase.QUIET if count < mean else Phase.BETWEEN

    return tuple(replace(arrival, phase=phase(arrival)) for arrival in arrivals)
