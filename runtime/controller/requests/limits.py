"""How many requests may wait, which newcomers are refused, and which requests make room for others.

Two limits are of bytes: those of all requests on the node, and those of one caller's. They count
what runs, too, so they also hold for requests that a unit could start at once.

When the pool is full, a newcomer pushes out the request that would be served last, if that request
comes after the newcomer in the order of service. So of two requests of one priority the later one
is refused, and a long wait makes a request more urgent here, too. A request that a unit has had is
never pushed out. Nor is one whose response may have begun, because it can no longer become an error
response.

The engine requests of one HTTP request are let in, refused and pushed out together. Once a unit has
had one of them, the others may wait beyond the limits, but not beyond those of bytes.
"""

from collections.abc import Iterator, Sequence

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.family import Families, Family, Refusal
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome

KEPT_SHARE = 0.25
"""Share of the waiting requests, at the end of the order, that urgent newcomers must leave there.
However many urgent requests come, the others keep this part of the pool and age until served."""

Party = list[Request]
"""Newcomers of one family, or a single newcomer without a family."""


class Limits:
    """Keeps the task pool within its own limits and those of callers.

    Args:
        env: the limits of the pool, and the time.
        books: the task pool; requests that are pushed out are counted.
        families: which requests belong together.
    """

    def __init__(self, env: Environment, books: Books, families: Families) -> None:
        self._config = env.config
        self._clock = env.clock
        self._held = books.requests.held
        self._pool = books.requests.pool
        self._statistics = books.statistics
        self._families = families
        self._allowances: dict[str, int] = {}
        """For each caller with a limit: how many of its requests may wait."""

    def too_large(self, request: Request) -> str | None:
        """Return why a request would not be let in even if it were alone; None if it would be."""
        allowed = (self._config.max_held_bytes, request.terms.max_held_bytes)
        most = min((limit for limit in allowed if limit is not None), default=request.size)
        if request.size <= most:
            return None
        return f"the request has {request.size} bytes, its images included: at most {most} may be"

    def has_bytes(self, request: Request) -> bool:
        """Return whether the limits of bytes are kept, now that a request has come."""
        too_many = self._lacks_bytes(self._held.total), self._caller_lacks_bytes(request.terms)
        return too_many == (None, None)

    def hold(self, newcomers: Sequence[Request]) -> list[tuple[Request, Refusal]]:
        """Let newcomers wait as far as the limits allow.

        Args:
            newcomers: requests that have come into the pool since the last call and still wait.

        Returns:
            The requests that were taken out of the pool, and the reasons.
        """
        for request in newcomers:
            self._note_allowance(request.terms)
            self._pool.remove(request.id)
        # The most urgent first: no newcomer is let in only to be pushed out by another.
        parties = sorted(_parties(newcomers), key=lambda party: self._pool.rank(party[0]))
        return [refused for party in parties for refused in self._admit(party)]

    def _note_allowance(self, terms: wire.Terms) -> None:
        """Note how many requests of a caller may wait: its API key may have changed."""
        if terms.caller is None:
            return
        if terms.max_waiting is None:
            self._allowances.pop(terms.caller, None)
        else:
            self._allowances[terms.caller] = terms.max_waiting

    def told(self, retry_after: int) -> m.PoolLimits:
        """Return which requests the front ends must refuse from now on.

        Args:
            retry_after: seconds after which refused callers may try again.
        """
        full = self._full(len(self._pool) + 1, self._pool.tokens + 1, self._held.total + 1)
        callers = {
            caller: _caller_full(allowed)
            for caller, allowed in self._allowances.items()
            if self._pool.waiting_of(caller) >= allowed
        }
        if full is None:
            return m.PoolLimits(callers=callers, retry_after=retry_after if callers else 1)
        let_in = self._pool.priority_before(self._clock(), self._kept)
        return m.PoolLimits(full, callers, retry_after, let_in)

    @property
    def _kept(self) -> int:
        return int(KEPT_SHARE * len(self._pool))

    def _full(self, requests: int, tokens: int, held: int) -> str | None:
        """Return an error that names the limit which these numbers exceed; None if none does."""
        limits = (
            ("requests", requests, self._config.max_waiting_requests),
            ("prompt tokens", tokens, self._config.max_waiting_tokens),
        )
        for what, amount, limit in limits:
            if limit is not None and amount > limit:
                return f"the task pool is full: {limit} {what} may wait"
        return self._lacks_bytes(held)

    def _lacks_bytes(self, held: int) -> str | None:
        """Return an error if the requests on the node must not have so many bytes."""
        limit = self._config.max_held_bytes
        if limit is None or held <= limit:
            return None
        return f"the node is full: its requests may have {limit} bytes together"

    def _caller_lacks_bytes(self, terms: wire.Terms, more: int = 0) -> str | None:
        """Return an error if a caller's requests must not have so many bytes more."""
        caller, limit = terms.caller, terms.max_held_bytes
        if caller is None or limit is None or self._held.of(caller) + more <= limit:
            return None
        return f"the requests of this API key may have {limit} bytes together"

    # --- newcomers ----------------------------------------------------------------------------

    def _admit(self, party: Party) -> Iterator[tuple[Request, Refusal]]:
        """Let newcomers wait, or refuse them; yield each request that loses its place, and why."""
        family, room = party[0].family, self._room_for(party)
        refusal = self._refusal(party, room)
        if refusal is not None:
            self._families.refuse(family, refusal)
            for request in [*party, *self._take(self._waiting(family))]:
                yield request, refusal
            return
        yield from self._push_out(room or [])
        for request in party:
            self._pool.add(request, deadline=request.terms.deadline)
            if not request.terms.begun:
                self._pool.let_in(request.id)

    def _refusal(self, party: Party, room: Sequence[Request] | None) -> Refusal | None:
        """Return why newcomers may not wait; None if they may.

        Args:
            party: the newcomers.
            room: the requests that they would push out; None: there is no room for them.
        """
        terms, family = party[0].terms, party[0].family
        requests, tokens, held = self._with(party)
        lacking = self._caller_lacks_bytes(terms, held - self._held.total)
        if lacking is not None:
            return Refusal(Outcome.CALLER_FULL, 429, lacking)
        if family is not None and family.started:
            lacking = self._lacks_bytes(held)
            return None if lacking is None else Refusal(Outcome.POOL_FULL, 503, lacking)
        if family is not None and family.refused is not None:
            return family.refused
        if terms.caller is not None and terms.max_waiting is not None:
            waiting = self._pool.waiting_of(terms.caller) + len(party)
            if waiting > terms.max_waiting:
                return Refusal(Outcome.CALLER_FULL, 429, _caller_full(terms.max_waiting))
        if room is None:
            full = self._full(requests, tokens, held)
            return Refusal(Outcome.POOL_FULL, 503, full or "")
        return None

    def _with(self, party: Party) -> tuple[int, int, int]:
        """Return what there is once the newcomers wait, too.

        Returns:
            The requests that wait, their prompt tokens, and the bytes of all requests.
        """
        tokens = sum(request.seen.prompt_tokens for request in party)
        held = self._held.total + sum(request.size for request in party)
        return len(self._pool) + len(party), self._pool.tokens + tokens, held

    # --- making room --------------------------------------------------------------------------

    def _room_for(self, party: Party) -> list[Request] | None:
        """Return the requests to push out for newcomers; None if these cannot make enough room."""
        requests, tokens, held = self._with(party)
        pushed_out: dict[str, Request] = {}
        if self._full(requests, tokens, held) is None:
            return []
        rank = self._pool.rank(party[0])
        spare = self._pool.behind(rank) - self._kept
        for last in self._pool.replaceable(rank):
            if len(pushed_out) >= spare:
                return None
            if last.id in pushed_out:
                continue
            kin = self._replaceable_with(last, rank)
            pushed_out |= {request.id: request for request in kin}
            requests -= len(kin)
            tokens -= sum(request.seen.prompt_tokens for request in kin)
            held -= sum(request.size for request in kin)
            if self._full(requests, tokens, held) is None:
                return list(pushed_out.values())
        return None

    def _replaceable_with(self, request: Request, rank: float) -> list[Request]:
        """Return a request and the rest of its family; an empty list if they must stay."""
        if request.family is None:
            return [request]
        if request.family.started:
            self._pool.keep(request.id)
            return []
        kin = self._waiting(request.family)
        return kin if all(self._pool.rank(other) > rank for other in kin) else []

    def _waiting(self, family: Family | None) -> list[Request]:
        members = [] if family is None else [self._pool.get(id_) for id_ in family.members]
        return [request for request in members if request is not None]

    def _push_out(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Refusal]]:
        if not requests:
            return
        full = self._full(len(self._pool) + 1, self._pool.tokens + 1, self._held.total + 1)
        full = full or "the task pool is full"
        refusal = Refusal(Outcome.POOL_FULL, 503, f"{full}, and more urgent ones have come")
        self._statistics.pushed_out.add(amount=len(requests))
        for request in self._take(requests):
            self._families.refuse(request.family, refusal)
            yield request, refusal

    def _take(self, requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            self._pool.remove(request.id)
        return requests


def _parties(newcomers: Sequence[Request]) -> list[Party]:
    """Group newcomers by family, in the order in which they came."""
    parties: dict[int, Party] = {}
    for request in newcomers:
        of_its_own = request if request.family is None else request.family
        parties.setdefault(id(of_its_own), []).append(request)
    return list(parties.values())


def _caller_full(allowed: int) -> str:
    return f"{allowed} requests of this API key may wait, and so many do"
