"""What the controller knows: engines, the partition, and where every request is.

Plain bookkeeping: nothing here sends a message or decides anything.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import msgspec

from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.family import Family
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire


class EngineState(enum.StrEnum):
    """How an engine is."""

    STARTING = "starting"
    SERVING = "serving"
    SILENT = "silent"
    """It did not answer in time; it is left alone until it does."""
    DEAD = "dead"


class Engine(msgspec.Struct):
    """One engine."""

    number: int
    state: EngineState = EngineState.STARTING
    ready: m.EngineReady | None = None
    reason: str | None = None
    """Why it is silent or dead, or had to be restarted."""
    incarnation: int = 0
    """How often it was restarted."""
    returns: bool = False
    """Whether it is restarted when it is dead."""


class Request(msgspec.Struct, frozen=True):
    """One request, from its arrival on."""

    id: str
    client: int
    """Number of the front end that sent it."""
    frames: list[bytes]
    """vLLM's own payload, as it came."""
    seen: PoolRequest
    """What policies see of it."""
    terms: wire.Terms = wire.Terms()
    """What its front end asked of the task pool."""
    family: Family | None = None
    """The HTTP request that it came of, if others came of it, too."""
    moved_at: float | None = None
    """When it was last taken out of a unit, seconds."""
    tokens: tuple[int, ...] = ()
    """What other units have generated of it: for its next one they are part of the prompt."""
    attempt: int = 0
    """How often it was begun again because its engine died."""
    deaths: int = 0
    """Engines that died while they computed it."""
    suspect: bool = False
    """The last of them did, and no output of it has come since: it may be what they died of."""
    guilty: bool = False
    """It is what its engine died of."""
    counted: bool = False
    """It is among the outcomes already: its last outputs were lost, and it had to go on."""

    @property
    def pooled_at(self) -> float:
        """When it came into the task pool, or came back there."""
        return self.seen.arrival if self.moved_at is None else self.moved_at

    @property
    def payload(self) -> list[bytes]:
        """What a unit is sent to begin it, or to go on with it."""
        if not self.tokens and not self.attempt:
            return self.frames
        return wire.continue_request(self.frames, self.tokens, self.attempt)

    @property
    def movable(self) -> bool:
        """Whether it can be moved once it has begun."""
        return wire.decode_request(self.frames).movable

    @property
    def can_continue(self) -> bool:
        """Whether another unit can go on with it where it stands."""
        return not self.tokens or self.movable


class Figures(msgspec.Struct):
    """Sums over the requests of a core, kept up with every one that comes and goes."""

    prompt_tokens: int = 0
    priorities: Counter[int] = msgspec.field(default_factory=Counter)
    totals: Counter[int] = msgspec.field(default_factory=Counter)
    """Requests by the tokens they must be able to reach."""

    def count(self, seen: PoolRequest, change: int) -> None:
        """Add a request (1) or take it out (-1)."""
        self.prompt_tokens += change * seen.prompt_tokens
        for counts, key in ((self.priorities, seen.priority), (self.totals, seen.total_tokens)):
            counts[key] += change
            if not counts[key]:
                del counts[key]

    @property
    def longest_tokens(self) -> int:
        """Tokens that the longest of them must be able to reach."""
        return max(self.totals, default=0)

    @property
    def by_priority(self) -> tuple[tuple[int, int], ...]:
        """Priorities, ascending, and how many have each."""
        return tuple(sorted(self.priorities.items()))


class Uncounted(msgspec.Struct, frozen=True):
    """The latest requests of a core, and what they were found from: they are the same until then.

    Attributes:
        requests: in the order they were sent.
        prompt_tokens: of all of them.
    """

    load: m.Load | None
    sent: int
    held: int
    requests: list[Request]
    prompt_tokens: int
    _blocks: dict[int, int] = {}

    def blocks(self, block_tokens: int) -> int:
        """Return the KV blocks of so many tokens that their first steps take."""
        if block_tokens not in self._blocks:
            self._blocks[block_tokens] = sum(
                -(-(request.seen.prompt_tokens + 1) // block_tokens) for request in self.requests
            )
        return self._blocks[block_tokens]


class CoreBook(msgspec.Struct):
    """The requests of one group's core, bound now or not."""

    unit: Unit
    requests: dict[str, Request] = {}
    """In the order they were sent there."""
    sent: int = 0
    """``AddRequest`` messages ever sent for this group."""
    load: m.Load | None = None
    """The last report."""
    figures: Figures = msgspec.field(default_factory=Figures)
    """Of its requests."""
    _uncounted: Uncounted | None = None

    def put(self, request: Request) -> None:
        """Note a request that is sent."""
        self.requests[request.id] = request
        self.sent += 1
        self.figures.count(request.seen, 1)

    def pop(self, request_id: str) -> Request:
        """Forget a request."""
        request = self.requests.pop(request_id)
        self.figures.count(request.seen, -1)
        return request

    def movable(self) -> list[str]:
        """Return the requests that can go on elsewhere."""
        return [request.id for request in self.requests.values() if request.movable]

    @property
    def uncounted(self) -> Uncounted:
        """Requests whose KV blocks the last report does not count as taken: the latest ones."""
        load, sent, held = self.load, self.sent, len(self.requests)
        known = self._uncounted
        if known is not None and known.load is load and (known.sent, known.held) == (sent, held):
            return known
        count = held if load is None else max(0, sent - load.added + load.waiting)
        latest = [*islice(reversed(self.requests.values()), count)][::-1]
        tokens = sum(request.seen.prompt_tokens for request in latest)
        self._uncounted = Uncounted(load, sent, held, latest, tokens)
        return self._uncounted

    @property
    def computed(self) -> list[Request]:
        """Requests that a step may have had: all but those that were waiting at the last report."""
        if self.load is None:
            return list(self.requests.values())
        waiting = {request.id for request in self.uncounted.requests[: self.load.waiting]}
        return [request for request in self.requests.values() if request.id not in waiting]


class Book:
    """All of it, for one node.

    Args:
        engines: number of engines.
    """

    def __init__(self, engines: int) -> None:
        self.engines = [Engine(number) for number in range(engines)]
        self.partition: Partition = singles(engines)
        self.bound: dict[Unit, int] = {}
        """Epoch of the bind of every group of the partition with more than one engine."""
        self.interleaving: set[Unit] = set()
        """Those of them whose members go on with requests of their own."""
        self.cores: dict[Unit, CoreBook] = {}
        self.outcomes: Counter[m.Outcome] = Counter()
        """Requests that have left the node."""
        self.interrupted: dict[str, Request] = {}
        """Requests whose engines died, until their front ends say how far they have come."""
        self.starting: Unit | None = None
        """A group that is formed anew and whose members are in its collectives already."""
        self.refused: dict[Unit, str] = {}
        """Groups that could not be formed anew, and why."""
        self._members: dict[Unit, tuple[int, ...]] = {}
        """Incarnations of the engines that a group was last formed of, if not the first ones."""
        self.ending = False
        """Whether the node is to end: it takes no requests."""
        self.pushed_out = 0
        """Those of them that waited, and made room in the task pool for more urgent ones."""
        self.stale = 0
        """Switch messages that came too late and were dropped."""
        self._where: dict[str, Unit] = {}
        self._epoch = 0

    def next_epoch(self) -> int:
        """Return an epoch higher than any before."""
        self._epoch += 1
        return self._epoch

    # --- engines ------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether every engine has been ready."""
        return all(engine.ready is not None for engine in self.engines)

    def in_state(self, *states: EngineState) -> frozenset[int]:
        """Return the engines in one of these states."""
        return frozenset(engine.number for engine in self.engines if engine.state in states)

    def serves(self, group: Unit) -> bool:
        """Return whether every engine of the group is well."""
        return all(self.engines[engine].state is EngineState.SERVING for engine in group.engines)

    @property
    def gone(self) -> frozenset[int]:
        """Engines that died and are not back."""
        return frozenset(
            engine.number
            for engine in self.engines
            if engine.state is EngineState.DEAD
            or (engine.state is EngineState.STARTING and engine.incarnation > 0)
        )

    @property
    def lost(self) -> frozenset[int]:
        """Those of them that will not be back."""
        return frozenset(
            engine.number
            for engine in self.engines
            if engine.state is EngineState.DEAD and not engine.returns
        )

    def unformed(self, groups: Iterable[Unit]) -> list[Unit]:
        """Return those of these groups that are not formed; until an engine dies there is none."""
        if not any(engine.incarnation for engine in self.engines):
            return []
        return [group for group in groups if not self.is_formed(group)]

    def incarnations(self, group: Unit) -> tuple[int, ...]:
        """Return how often each engine of a group was restarted."""
        return tuple(self.engines[engine].incarnation for engine in group.engines)

    def is_formed(self, group: Unit) -> bool:
        """Return whether a group has communicators among its engines as they are now."""
        formed = self._members.get(group, (0,) * group.size)
        return not group.is_group or formed == self.incarnations(group)

    def form(self, group: Unit, members: tuple[int, ...]) -> None:
        """Note that a group was formed of these incarnations of its engines."""
        self._members[group] = members

    def forget_cores(self, leader: int) -> None:
        """Forget the cores of an engine that is started again."""
        for group in [group for group in self.cores if group.leader == leader]:
            del self.cores[group]

    def silence(self, engines: Iterable[int], reason: str) -> None:
        """Note that engines do not answer."""
        for engine in engines:
            if self.engines[engine].state is EngineState.SERVING:
                self.engines[engine].state = EngineState.SILENT
                self.engines[engine].reason = reason

    def limits(self, group: Unit) -> m.LayoutLimits:
        """Return what the group's layout can hold.

        Raises:
            LookupError: its leader is not ready, or does not know the layout.
        """
        return self._limits(group.leader, group.layout)

    def limits_of(self, layout: Layout) -> m.LayoutLimits:
        """Return what a layout can hold, as the first engine says.

        Raises:
            LookupError: that engine is not ready, or does not know the layout.
        """
        return self._limits(0, layout)

    def _limits(self, engine: int, layout: Layout) -> m.LayoutLimits:
        ready = self.engines[engine].ready
        for limits in ready.layouts if ready is not None else ():
            if limits.layout == layout:
                return limits
        raise LookupError(f"engine {engine} knows no limits of {layout.name}")

    def num_blocks(self, engine: int) -> int:
        """Return the size of an engine's pool; 0 before it is ready."""
        ready = self.engines[engine].ready
        return 0 if ready is None else ready.num_blocks

    # --- partition ----------------------------------------------------------------------------

    def unit_of(self, engine: int) -> Unit:
        """Return the unit that an engine is in."""
        return next(group for group in self.partition if engine in group.engines)

    def set_bound(self, group: Unit, epoch: int, *, interleaves: bool = False) -> None:
        """Make a unit of engines that were alone."""
        rest = [unit for unit in self.partition if not set(unit.engines) & set(group.engines)]
        self.partition = tuple(sorted([*rest, group]))
        self.bound[group] = epoch
        if interleaves:
            self.interleaving.add(group)

    def set_free(self, group: Unit) -> None:
        """Make each engine of a unit a unit of its own."""
        rest = [unit for unit in self.partition if unit != group]
        self.partition = tuple(sorted([*rest, *(alone(engine) for engine in group.engines)]))
        self.bound.pop(group, None)
        self.interleaving.discard(group)

    # --- requests -----------------------------------------------------------------------------

    def core(self, group: Unit) -> CoreBook:
        """Return the book of a group's core."""
        core = self.cores.get(group)
        if core is None:
            core = self.cores[group] = CoreBook(group)
        return core

    def place(self, request: Request, group: Unit) -> None:
        """Note that a request was sent to a unit."""
        self.core(group).put(request)
        self._where[request.id] = group

    def where(self, request_id: str) -> Unit | None:
        """Return the unit that a request was sent to."""
        return self._where.get(request_id)

    def remove(self, request_id: str, *, led_by: int | None = None) -> Request | None:
        """Forget a request that was sent to a unit; None if it is not known (any more).

        Args:
            request_id: that.
            led_by: only if this engine leads the unit. The request may have been begun again
                elsewhere since the engine wrote of it.
        """
        group = self._where.get(request_id)
        if group is None or led_by not in (None, group.leader):
            return None
        del self._where[request_id]
        return self.cores[group].pop(request_id)

    def find(self, request_id: str) -> Request | None:
        """Return a request that was sent to a unit; None if it is not known (any more)."""
        group = self._where.get(request_id)
        return None if group is None else self.cores[group].requests[request_id]

    def count(self, request: Request, outcome: m.Outcome) -> None:
        """Count a request that has left the node."""
        if not request.counted:
            self.outcomes[outcome] += 1

    def clear(self, request_id: str) -> None:
        """Note that a request runs on its unit: it is no suspect (any more)."""
        group = self._where.get(request_id)
        if group is not None:
            requests = self.cores[group].requests
            requests[request_id] = msgspec.structs.replace(requests[request_id], suspect=False)

    def may_start(self, request: Request, group: Unit) -> bool:
        """Return whether a request may be sent to a unit now: suspects go one at a time."""
        others = self.core(group).requests.values()
        return not request.suspect or not any(other.suspect for other in others)

    def runs(self, core: CoreBook) -> bool:
        """Return whether steps of a core are taken: its unit is there, or is interleaved."""
        return core.unit in self.partition or self.interleaves(core.unit)

    @property
    def paused(self) -> Counter[Unit]:
        """Requests that wait for a unit that is not there to be back, by the one its leader is in.

        Those that do not wait but are interleaved count too.
        """
        paused: Counter[Unit] = Counter()
        for core in self.cores.values():
            if core.requests and core.unit not in self.partition:
                paused[self.unit_of(core.unit.leader)] += len(core.requests)
        return paused

    def interleaves(self, group: Unit) -> bool:
        """Return whether a core's requests go on in turn with those of the unit it is in."""
        return not group.is_group and self.unit_of(group.leader) in self.interleaving

    def interleaved_in(self, unit: Unit) -> int:
        """Return the requests that go on in turn with those of this unit."""
        if unit not in self.interleaving:
            return 0
        return sum(len(self.core(alone(engine)).requests) for engine in unit.engines)

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant."""
        problems = []
        covered = sorted(engine for group in self.partition for engine in group.engines)
        if covered != [engine.number for engine in self.engines]:
            problems.append(f"controller: partition {self.partition} is not one")
        if set(self.bound) != {group for group in self.partition if group.is_group}:
            problems.append(f"controller: bound groups {sorted(self.bound)} are not the units")
        placed = {id_: core.unit for core in self.cores.values() for id_ in core.requests}
        if placed != self._where or placed.keys() & self.interrupted.keys():
            problems.append("controller: a request is in two units, or in none")
        return problems


def continued(request: Request, tokens: Sequence[int], now: float) -> Request:
    """Return a request that was taken out of a unit, as one that waits again.

    Args:
        request: that.
        tokens: every output token so far, whichever units generated them.
        now: seconds.
    """
    prompt = request.seen.prompt_tokens - len(request.tokens) + len(tokens)
    total = max(request.seen.total_tokens, prompt + 1)
    return msgspec.structs.replace(
        request,
        tokens=tuple(tokens),
        seen=replace(request.seen, prompt_tokens=prompt, total_tokens=total),
        moved_at=now,
    )


def pool_request(view: wire.RequestView, *, longest: int, now: float) -> PoolRequest:
    """Return what policies see of a request.

    Args:
        view: the request as it came.
        longest: tokens of the longest sequence that the node takes. A front end bounds a request
            without ``max_tokens`` by what this leaves: such a bound asks for no room.
        now: arrival, seconds.
    """
    sampling = view.sampling_params or wire.Sampling()
    bound = view.prompt_tokens + (sampling.max_tokens or 1)
    return PoolRequest(
        request_id=view.request_id,
        prompt_tokens=view.prompt_tokens,
        total_tokens=bound if bound < longest else min(view.prompt_tokens + 1, bound),
        priority=view.priority,
        arrival=now,
    )
