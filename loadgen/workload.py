"""Workloads: requests, when they arrive, and what their prompts have in common."""

import enum
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    """Seconds from the start of the workload; of a later turn of a chat, from the end of the answer
    to the turn before."""
    prompt_tokens: int
    """0 if ``content`` says what is sent, whose tokens only the server counts."""
    output_tokens: int
    priority: int = 0
    phase: Phase = Phase.BETWEEN
    prefix: tuple[Block, ...] = ()
    """The blocks that the prompt begins with; the rest of the prompt is the request's own. If the
    blocks are longer than the prompt, the prompt ends within them."""
    content: str | tuple[Message, ...] | None = None
    """What to send; None: tokens are made up."""
    next: "Arrival | None" = None
    """The next turn of the chat; it is sent once this one is answered."""

    def turns(self) -> Iterator["Arrival"]:
        """Yield the request and the later turns of its chat."""
        turn: Arrival | None = self
        while turn is not None:
            yield turn
            turn = turn.next


def chat_of(turns: Sequence[Arrival]) -> Arrival:
    """Return the first of these turns, linked to the others.

    Raises:
        IndexError: there is none.
    """
    *earlier, chat = turns
    for turn in reversed(earlier):
        chat = replace(turn, next=chat)
    return chat


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival; of a chat, only the first turn is among them."""

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def has_chats(self) -> bool:
        """Whether some request has to wait for the answer to another."""
        return any(arrival.next is not None for arrival in self.arrivals)

    @property
    def requests(self) -> int:
        """Requests with all turns of chats."""
        return sum(1 for arrival in self.arrivals for _ in arrival.turns())

    def scaled(self, factor: float) -> "Workload":
        """Return the workload at ``factor`` times its rate.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"a rate cannot be scaled by {factor:g}")
        return self._each(lambda a: replace(a, at=a.at / factor))

    def resized(self, factor: float) -> "Workload":
        """Return the workload with ``factor`` times the tokens, rounded, and at least one each.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"lengths cannot be scaled by {factor:g}")
        if factor == 1:
            return self

        def size(tokens: int) -> int:
            return max(1, round(tokens * factor))

        return self._each(
            lambda a: replace(
                a,
                prompt_tokens=size(a.prompt_tokens),
                output_tokens=size(a.output_tokens),
                prefix=tuple(Block(block.id, size(block.tokens)) for block in a.prefix),
            )
        )

    def first(self, requests: int | None = None, seconds: float | None = None) -> "Workload":
        """Return the first ``requests`` requests, and of these only those before ``seconds``."""
        arrivals = itertools.islice(self.arrivals, requests)
        return self._with(a for a in arrivals if seconds is None or a.at < seconds)

    def after(self, seconds: float) -> "Workload":
        """Return the workload without its first ``seconds``, after which it begins."""
        return self._with(replace(a, at=a.at - seconds) for a in self.arrivals if a.at >= seconds)

    def later(self, seconds: float) -> "Workload":
        """Return the workload, which begins after so many seconds."""
        return self._with(replace(a, at=a.at + seconds) for a in self.arrivals)

    def beside(self, other: "Workload") -> "Workload":
        """Return both workloads at the same time; blocks with the same id are the same in both."""
        arrivals = sorted((*self.arrivals, *other.arrivals), key=lambda a: a.at)
        return Workload(f"{self.name} and {other.name}", with_phases(arrivals))

    def apart(self, name: str) -> "Workload":
        """Return the workload with this name before the ids of its blocks."""

        def renamed(a: Arrival) -> Arrival:
            prefix = tuple(Block(f"{name}/{block.id}", block.tokens) for block in a.prefix)
            return replace(a, prefix=prefix)

        return self._each(renamed)

    def fitting(self, tokens: int) -> "Workload":
        """Return the workload without the requests of more tokens, prompt and output together.

        A chat ends before its first turn that is left out.
        """

        def fits(turn: Arrival) -> bool:
            return turn.prompt_tokens + turn.output_tokens <= tokens

        return self._with(
            chat_of([replace(turn, next=None) for turn in itertools.takewhile(fits, a.turns())])
            for a in self.arrivals
            if fits(a)
        )

    def with_priorities(self, shares: Mapping[int, float], seed: int) -> "Workload":
        """Return the workload with priorities drawn in these proportions, one for each chat.

        Raises:
            ValueError: a share is negative, or all of them are 0.
        """
        if min(shares.values(), default=0) < 0 or not sum(shares.values()) > 0:
            raise ValueError("the shares of priorities must not be negative, and some more than 0")
        drawn = random.Random(seed).choices(
            list(shares), list(shares.values()), k=len(self.arrivals)
        )
        return self._with(
            chat_of([replace(turn, priority=priority) for turn in a.turns()])
            for a, priority in zip(self.arrivals, drawn, strict=True)
        )

    def _each(self, change: Callable[[Arrival], Arrival]) -> "Workload":
        return self._with(
            chat_of([change(turn) for turn in arrival.turns()]) for arrival in self.arrivals
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
