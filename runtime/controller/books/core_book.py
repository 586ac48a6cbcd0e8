"""The book of one core: the requests that a unit's scheduler has, and sums over them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol import messages as m


class Figures(msgspec.Struct):
    """Sums over the requests of a core, updated when a request comes or goes."""

    prompt_tokens: int = 0
    priorities: Counter[int] = msgspec.field(default_factory=Counter)
    totals: Counter[int] = msgspec.field(default_factory=Counter)
    """Number of requests, by the tokens that each must be able to reach."""

    def count(self, seen: PoolRequest, change: int) -> None:
        """Add a request (``change`` is 1) or take it out (-1)."""
        self.prompt_tokens += change * seen.prompt_tokens
        for counts, key in ((self.priorities, seen.priority), (self.totals, seen.total_tokens)):
            counts[key] += change
            if not counts[key]:
                del counts[key]

    @property
    def longest_tokens(self) -> int:
        """Tokens that the longest request must be able to reach."""
        return max(self.totals, default=0)

    @property
    def by_priority(self) -> tuple[tuple[int, int], ...]:
        """The priorities, ascending, each with its number of requests."""
        return tuple(sorted(self.priorities.items()))


class Uncounted(msgspec.Struct, frozen=True):
    """The requests of a core that no step has computed by its last report, as far as one can tell.

    Valid while ``load``, ``sent`` and ``held`` are unchanged.

    Attributes:
        requests: those that waited at the report, and then those that were sent since.
        prompt_tokens: the sum over these requests.
    """

    load: m.Load | None
    sent: int
    held: int
    requests: list[Request]
    prompt_tokens: int
    _blocks: dict[tuple[int, tuple[int, ...]], int] = {}

    def blocks(self, limits: m.LayoutLimits) -> int:
        """Return how many KV blocks the requests' first steps take in a layout."""
        key = (limits.block_tokens, limits.group_limits)
        if key not in self._blocks:
            self._blocks[key] = sum(
                limits.blocks(request.seen.prompt_tokens + 1) for request in self.requests
            )
        return self._blocks[key]


class CoreBook(msgspec.Struct):
    """The requests of one unit's core, whether the unit is bound now or not."""

    unit: Unit
    requests: dict[str, Request] = {}
    """The requests by id, in the order in which they were sent."""
    sent: int = 0
    """Requests ever sent to this core, by ``AddRequest`` or ``Import``."""
    carried: int = 0
    """Those of them that had begun elsewhere: requests that were carried here."""
    load: m.Load | None = None
    """The core's last report."""
    begun: int = 0
    """Most requests that had begun here, in any report."""
    steps: int = 0
    """Steps that the unit has computed, by its last report."""
    outputs: dict[str, int] = {}
    """How many tokens the requests got that the last report says have ended."""
    figures: Figures = msgspec.field(default_factory=Figures)
    """Sums over ``requests``."""
    _uncounted: Uncounted | None = None
    _turns: dict[str, tuple[int, float]] = {}
    """The requests that may not have begun: in which order the core computes them."""
    _first: dict[str, int] = {}
    """The step that gave a request its first token, or would have if all were from here."""

    def put(
        self,
        request: Request,
        *,
        carried: bool = False,
        generated: int = 0,
        patience: float = 0.0,
    ) -> None:
        """Note a request that is sent.

        Args:
            request: the request.
            carried: whether it has begun elsewhere.
            generated: tokens that it has got there.
            patience: that of ``Dispatch``, seconds.
        """
        if generated:
            self._first[request.id] = self.steps + 1 - generated
        else:
            self._turns[request.id] = request.seen.priority, request.seen.arrival + patience
        self.requests[request.id] = request
        self.sent += 1
        self.carried += carried
        self.figures.count(request.seen, 1)

    def take(self, request_id: str) -> Request:
        """Forget a request."""
        request = self.requests.pop(request_id)
        self._first.pop(request_id, None)
        self._turns.pop(request_id, None)
        self.figures.count(request.seen, -1)
        return request

    def replace(self, request: Request) -> None:
        """Replace a request by a changed one that looks the same to policies."""
        self.requests[request.id] = request

    def report(self, load: m.Load) -> None:
        """Note the core's report."""
        waiting, before = self.uncounted.requests, self.steps
        self.begun += self.begun_since(load)
        self.load, self.steps = load, load.steps
        still = {request.id for request in self.uncounted.requests} if waiting else ()
        for request in waiting:
            if request.id not in still:
                self._first.setdefault(request.id, before + 1)
                self._turns.pop(request.id, None)
        self.outputs = {id_: self.generated(id_) for id_ in load.finished if id_ in self._first}

    def generated(self, request_id: str) -> int:
        """Return how many tokens a request has got, as far as the number of steps tells.

        Every step gives each running request a token. If a prompt took several steps, these count
        as tokens, too.
        """
        return self.steps + 1 - self._first.get(request_id, self.steps + 1)

    def tokens(self, request_ids: Iterable[str]) -> int:
        """Return how many tokens some of the requests have together, as ``generated`` tells.

        Tokens that requests got on other units may count twice.
        """
        known = [self.requests[id_] for id_ in request_ids if id_ in self.requests]
        return sum(each.seen.prompt_tokens + self.generated(each.id) for each in known)

    def begun_since(self, load: m.Load) -> int:
        """Return how many requests a report shows to have begun here since the last one.

        A request that is carried here, or preempted, waits although it has begun before.
        """
        return max(0, load.added - load.waiting - self.carried - self.begun)

    @property
    def uncounted(self) -> Uncounted:
        """The latest requests: those whose KV blocks the last report does not count as taken."""
        load, sent, held = self.load, self.sent, len(self.requests)
        known = self._uncounted
        if known is not None and known.load is load and (known.sent, known.held) == (sent, held):
            return known
        new = held if load is None else max(0, sent - load.added)
        found = [*islice(reversed(self.requests.values()), new)][::-1]
        if load is not None and load.waiting:
            found = self._waiting(load.waiting, {request.id for request in found}) + found
        tokens = sum(request.seen.prompt_tokens for request in found)
        self._uncounted = Uncounted(load, sent, held, found, tokens)
        return self._uncounted

    def _waiting(self, count: int, new: Collection[str]) -> list[Request]:
        """Return the requests that waited at the last report: those whose turn comes last.

        Args:
            count: how many there were.
            new: those that were sent since.
        """
        known = (id_ for id_ in self._turns if id_ not in new)
        names = sorted(known, key=self._turns.__getitem__)[-count:]
        if len(names) < count:
            # The others have begun and were preempted: the latest ones.
            skipped = {*new, *names}
            latest = (id_ for id_ in reversed(self.requests) if id_ not in skipped)
            names = [*islice(latest, count - len(names)), *names]
        return [self.requests[id_] for id_ in names]

    @property
    def computed(self) -> list[Request]:
        """Requests that may have been in a step: all but those that waited at the last report."""
        if self.load is None:
            return list(self.requests.values())
        waiting = {request.id for request in self.uncounted.requests[: self.load.waiting]}
        return [request for request in self.requests.values() if request.id not in waiting]


def steps_between(before: m.Load, load: m.Load) -> Iterator[tuple[m.Mode, m.Work]]:
    """Yield the timed steps of each kind and mode between two reports of a core, at least one."""
    for mode in load.work:
        done, seen = load.done(mode), before.done(mode)
        for news in (done.decoding - seen.decoding, done.prefilling - seen.prefilling):
            if news.steps > 0 and news.seconds > 0:
                yield mode, news
