"""Chooses the grammar to compile next: callers take turns, and small grammars come first.

Nobody knows how long a grammar takes before it is compiled. So each grammar is first tried for a
short time. One that needs more is stopped, and tried again with all the time that a grammar may
take. Two grammars are compiled at once, in two places. One place is for first tries only. The other
is for second tries, and for first tries while there is nothing to try again. So whatever others
send, the smallest grammar of a caller waits only for the first try that is running, and for one
first try of every other caller.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from shoal.server.frontend.sandbox import KilledError

FIRST_SECONDS = 1
"""CPU time of a first try: many times what most grammars take."""
BYTES_PER_PLACE = 1024
"""For each this many bytes of a grammar, one later grammar of its caller may overtake it."""

Compile = Callable[[bytes, int], Awaitable[None]]
"""Compiles a grammar in at most the given CPU seconds, as ``Sandbox.run`` does."""
Caller = str | None
"""The holder of an API key; None: all callers without a key."""


class QueueFullError(Exception):
    """A caller already has as many waiting grammars as it may; the message is one line."""


@dataclass(eq=False)
class _Grammar:
    """A grammar to compile, for one or more requests."""

    job: bytes
    done: asyncio.Future[None]
    requests: Counter[Caller] = field(default_factory=Counter)
    """The number of requests that wait for it, by caller."""
    line: "_Line | None" = None
    """The line in which it waits; None: it is being compiled."""
    tried: bool = False
    """Whether the first try was too short."""

    @property
    def callers(self) -> list[Caller]:
        return [caller for caller, requests in self.requests.items() if requests]


class _Line:
    """Grammars that wait for a place. Callers take turns, each with its smallest grammar first."""

    def __init__(self) -> None:
        self._by_caller: dict[Caller, dict[_Grammar, float]] = {}
        """The waiting grammars of each caller, with their rank. A grammar that several callers have
        asked for is listed for each of them."""
        self._served: dict[Caller, int] = {}
        """When each caller had its last turn; callers who had none come first."""
        self._serial = count(1)

    def add(self, caller: Caller, grammar: _Grammar) -> None:
        place = next(self._serial) + len(grammar.job) / BYTES_PER_PLACE
        self._by_caller.setdefault(caller, {})[grammar] = place
        grammar.line = self

    def discard(self, caller: Caller, grammar: _Grammar) -> None:
        own = self._by_caller.get(caller, {})
        own.pop(grammar, None)
        if not own:
            self._by_caller.pop(caller, None)

    def take(self) -> _Grammar | None:
        """Remove and return the next grammar; None if none waits."""
        if not self._by_caller:
            return None
        caller = min(self._by_caller, key=lambda each: self._served.get(each, 0))
        self._served[caller] = next(self._serial)
        own = self._by_caller[caller]
        grammar = min(own, key=own.__getitem__)
        for each in list(self._by_caller):
            self.discard(each, grammar)
        grammar.line = None
        return grammar


class GrammarQueue:
    """Compiles grammars, two at once, fairly among callers. For one asyncio event loop.

    Args:
        compile_within: compiles a grammar.
        cpu_seconds: CPU time that a grammar may take.
        per_caller: how many grammars one caller may have here at once.
    """

    def __init__(self, compile_within: Compile, *, cpu_seconds: int, per_caller: int) -> None:
        self._compile_within = compile_within
        self._cpu_seconds = cpu_seconds
        self._per_caller = per_caller
        self._grammars: dict[bytes, _Grammar] = {}
        new, self._again = _Line(), _Line()
        self._places: tuple[_Place, ...] = (_Place((new,)), _Place((self._again, new)))
        self._new = new

    async def run(self, caller: Caller, job: bytes) -> None:
        """Have a grammar compiled: only once if several requests bring it at the same time.

        Args:
            caller: who asks for it.
            job: the grammar.

        Raises:
            QueueFullError: the caller has too many grammars here.
            RefusedError: the grammar is wrong, or needs more time or memory than it may.
            OSError: the sandbox is gone.
        """
        grammar = self._grammars.get(job)
        if grammar is None or not grammar.requests[caller]:
            grammar = self._enter(caller, job, grammar)
        grammar.requests[caller] += 1
        self._fill_places()
        try:
            await asyncio.shield(grammar.done)
        finally:
            grammar.requests[caller] -= 1
            if not grammar.requests[caller]:
                self._leave(caller, grammar)

    def _enter(self, caller: Caller, job: bytes, grammar: _Grammar | None) -> _Grammar:
        """Put a grammar into the line of a caller who has not asked for it yet."""
        here = sum(caller in known.callers for known in self._grammars.values())
        if here >= self._per_caller:
            whose = "of this API key" if caller is not None else "of callers without an API key"
            raise QueueFullError(f"{here} grammars {whose} wait to be compiled: no more may")
        if grammar is None:
            grammar = _Grammar(job, asyncio.get_running_loop().create_future())
            self._grammars[job] = grammar
            self._new.add(caller, grammar)
        elif grammar.line is not None:
            grammar.line.add(caller, grammar)
        return grammar

    def _leave(self, caller: Caller, grammar: _Grammar) -> None:
        """Take a grammar out of a caller's line; a compilation that is running goes on."""
        if grammar.line is not None:
            grammar.line.discard(caller, grammar)
            if not grammar.callers:
                del self._grammars[grammar.job]

    # --- places -------------------------------------------------------------------------------

    def _fill_places(self) -> None:
        for place in self._places:
            if place.task is None:
                grammar = next(filter(None, (line.take() for line in place.lines)), None)
                if grammar is not None:
                    place.task = asyncio.create_task(self._compile(place, grammar))

    async def _compile(self, place: "_Place", grammar: _Grammar) -> None:
        seconds = self._cpu_seconds if grammar.tried else min(FIRST_SECONDS, self._cpu_seconds)
        error: Exception | None = None
        try:
            await self._compile_within(grammar.job, seconds)
        except Exception as problem:  # noqa: BLE001 - whatever it is, those who wait are told
            error = problem
        if isinstance(error, KilledError) and seconds < self._cpu_seconds and grammar.callers:
            grammar.tried = True
            for caller in grammar.callers:
                self._again.add(caller, grammar)
        else:
            del self._grammars[grammar.job]
            _settle(grammar, error)
        place.task = None
        self._fill_places()


@dataclass(eq=False)
class _Place:
    """One of the two places where a grammar is compiled."""

    lines: tuple[_Line, ...]
    """The lines that it serves: it takes from the first line that has a grammar."""
    task: asyncio.Task[None] | None = None


def _settle(grammar: _Grammar, error: Exception | None) -> None:
    if error is None:
        grammar.done.set_result(None)
    elif grammar.callers:
        grammar.done.set_exception(error)
