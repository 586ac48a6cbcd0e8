"""An engine's part in carries: running requests that go to another unit, with their KV.

As the source, a core exports requests at a safe point without steps in flight, and holds their
blocks until it is told to drop or to keep them. As the destination, a core prepares requests before
they come, and adopts them in portions: as many as find room, the smallest first. Dropped requests
make room at the source, so that the rest may find room too. If none finds any for ``ROOM_SECONDS``,
the longest is computed again, whose blocks are room for any other; next time two are, then four.
"""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.allotting import Allotting
from shoal.runtime.engine.agent.arrived import Arrivals, Portion
from shoal.runtime.engine.agent.binding import Binding
from shoal.runtime.engine.agent.copying_ahead import CopyingAhead
from shoal.runtime.engine.agent.departures import Departures
from shoal.runtime.engine.agent.going_on import GoingOn
from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.agent.sliced_work import SlicedWork
from shoal.runtime.engine.agent.stepping import Stepping
from shoal.runtime.engine.agent.taking_turns import TakingTurns
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport, Frames

log = logging.getLogger("shoal.engine")

ROOM_SECONDS = 0.25
"""How long requests wait for room while nothing changes: about what it takes to compute one of a
few thousand tokens again."""
TOGETHER_SECONDS = 0.02
"""How long the first requests of a new group wait for those of its other members: longer than a
step that decodes. Who comes later waits for the steps that the group has begun, mostly two."""


class Carrying:
    """Takes requests out of cores for other units, and into cores from other units.

    Args:
        backend: the engine.
        transport: the way to the controller and the front ends.
        binding: the bind that the engine is in.
        stepping: counts the requests of each unit.
        ahead: knows what of the requests was copied ahead.
        work: does what takes long.
        clock: seconds.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        binding: Binding,
        stepping: Stepping,
        ahead: CopyingAhead,
        work: SlicedWork,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._binding = binding
        self._stepping = stepping
        self._ahead = ahead
        self._work = work
        self._clock = clock
        self._departures = Departures(backend, transport)
        self._expected: dict[int, m.Expect] = {}
        """The requests that each carry is to bring, until they come."""
        self._unbuilt: dict[int, dict[str, Frames]] = {}
        """Those of them that the core does not know yet."""
        self._refused: dict[str, tuple[Frames, ValueError]] = {}
        """Expected requests that are not valid for their unit, and why."""
        self._allotting = Allotting(backend, binding, clock)
        self._arrivals: dict[int, Arrivals] = {}
        self._turns = TakingTurns(backend, self._arrivals)
        self._gathering: dict[Unit, list[int]] = {}
        """Carries that take turns with one whose ``Import`` is still to come."""
        self.has_come = False
        """Whether there are arrivals that were not tried yet."""
        self._copying: dict[Unit, list[Portion]] = {}
        """What each core's copies bring, in the order in which they end."""
        self.going_on = GoingOn(binding, stepping)
        """Follows the core that has gone on last."""

    @property
    def is_under_way(self) -> bool:
        """Whether requests stand still, or are about to, until the next message has come."""
        return self._departures.is_under_way or bool(self._expected)

    @property
    def keeps_waiting(self) -> bool:
        """Whether requests that leave or come stand still, or will after their steps in flight."""
        leaves, comes = self._departures.is_under_way, self._allotting.is_under_way
        return leaves or comes or bool(self._arrivals) or self.going_on.core is not None

    def take(self, message: m.Expect | m.Export | m.Allot | m.Import | m.Drop | m.Keep) -> None:
        """Do what the controller says."""
        match message:
            case m.Export() | m.Drop() | m.Keep():
                self._departures.take(message)
            case m.Expect():
                self.expect(message)
            case m.Allot():
                self._allotting.begin(message)
            case m.Import():
                self.take_in(message)

    # --- as the source ---

    def holds(self, core: Core) -> bool:
        """Return whether a core pauses because requests are about to leave it, or to come first.

        An engine that has just gone on alone waits for the requests that it expects: they have run
        in a group until now, and would wait for the prompts of new ones. A new group waits for
        ``TOGETHER_SECONDS``: its members' last steps mostly end at the same time. While it has no
        request at all it waits for the first: a step that only says which requests have ended
        would be in flight when they come, and keep their step from being sent ahead.
        """
        if self._waits_until(core) > self._clock():
            return True
        return self._departures.holds(core)

    def _waits_until(self, core: Core) -> float:
        """Return until when a core waits for the requests that come first."""
        beginning = self._binding.beginning
        if beginning is None or beginning.core is not core or not self.expects(core):
            return -math.inf
        return beginning.by if core.num_requests else math.inf

    def take_out(self) -> bool:
        """Export what can be exported now; return whether a core goes on."""
        return self._departures.take_out()

    # --- as the destination ---

    def expect(self, message: m.Expect) -> None:
        """Prepare requests that are about to come."""
        self._expected[message.carry] = message
        self._unbuilt[message.carry] = unbuilt = dict(reversed(message.frames.items()))
        core = self._backend.cores[message.unit]
        self._work.add(message.carry, self._build(core, unbuilt))
        if message.prefixes:
            self._work.add(message.carry, self._build_prefixes(core, message))

    def _build(self, core: Core, unbuilt: dict[str, Frames]) -> Iterator[None]:
        while unbuilt:
            request_id, frames = unbuilt.popitem()
            try:
                core.expect(request_id, frames)
            except ValueError as error:
                self._refused[request_id] = frames, error
            yield

    def _build_prefixes(self, core: Core, message: m.Expect) -> Iterator[None]:
        for name, frames in message.prefixes.items():
            if message.carry not in self._expected:
                return  # the pre-copy was given up
            with suppress(ValueError):
                core.expect_prefix(name, frames)
            yield

    def expects(self, core: Core) -> bool:
        """Return whether requests are about to come to a core, so that it needs its blocks."""
        return any(expected.unit == core.unit for expected in self._expected.values())

    @property
    def _crowded(self) -> set[Unit]:
        """The units in which requests that have come wait for room."""
        return {each.message.unit for each in self._arrivals.values() if not each.are_served}

    def take_in(self, message: m.Import) -> None:
        """Take note of requests that have come, and forget expected ones that do not come."""
        announced = self._expected.pop(message.carry, None)
        self._work.finish(message.carry)
        self._unbuilt.pop(message.carry, None)
        allotment = self._allotting.end(message)
        come = {request.request_id for request in message.requests}
        expected = [] if announced is None else [*announced.frames, *announced.prefixes]
        if absent := [id_ for id_ in expected if id_ not in come]:
            self._backend.cores[message.unit].abort(absent)
        for request_id in expected:
            refused = self._refused.pop(request_id, None)
            if refused is not None and request_id in come:
                self._stepping.refuse(message.unit, request_id, *refused)
        for _ in message.requests:
            self._stepping.count(message.unit)
        beginning = self._binding.beginning if message.requests else None
        if beginning and beginning.core.unit == message.unit and beginning.by == -math.inf:
            beginning.by = self._clock() + TOGETHER_SECONDS
        copied, served = self._ahead.arrive(message.carry), allotment.served
        whole = [request.whole(allotment.announced) for request in message.requests]
        late = {*copied, *(request.request_id for request in allotment.waiting)} - served
        if message.unit not in self._gathering:
            coming = [request for request in whole if request.request_id in late]
            served |= self._allotting.serve_now(message, coming, self._crowded)
        waiting = sorted(
            whole,
            key=lambda request: (
                request.request_id not in served,
                request.computed - copied.get(request.request_id, 0),
            ),
        )
        sharers = self._gathering.setdefault(message.unit, [])
        deadline = self._clock() + ROOM_SECONDS
        arrivals = Arrivals(message, waiting, deadline, sharers, served)
        sharers.append(message.carry)
        self._arrivals[message.carry] = arrivals
        if not message.more:
            del self._gathering[message.unit]
            self.has_come = True

    def forget(self, unit: Unit, request_ids: Sequence[str]) -> None:
        """Forget requests that are to come to a unit, because their clients have gone."""
        gone = set(request_ids)
        for carry, unbuilt in self._unbuilt.items():
            if self._expected[carry].unit == unit:
                for request_id in gone & unbuilt.keys():
                    del unbuilt[request_id]
        for arrivals in self._arrivals.values():
            if arrivals.message.unit == unit:
                arrivals.waiting = [r for r in arrivals.waiting if r.request_id not in gone]

    def begin(self, active: Collection[Core]) -> None:
        """Adopt requests that have just come.

        Args:
            active: the cores that may dispatch steps now.

        Raises:
            RuntimeError: a core was wrong about its first step.
        """
        self.has_come = False
        sent = [core for core in active if self._send_first(core)]
        self._admit_all()
        for core in sent:
            if not core.dispatch():
                raise RuntimeError("runners were told of a step that does not come")

    def _send_first(self, core: Core) -> bool:
        """Let a core send its first step before its requests are adopted, if all have come."""
        if self.expects(core) or core.unit in self._gathering:
            return False
        arrivals = self._arrivals.values()
        come = [each for each in arrivals if each.message.unit == core.unit and each.waiting]
        # All of them must be adopted, in this order.
        if not all(each.are_served and len(self._turns.sharers(each)) == 1 for each in come):
            return False
        carries = [(each.message.source, each.waiting) for each in come]
        return bool(carries) and core.send_first(carries)

    def tend(self) -> bool:
        """Answer for the copies that have ended, and adopt more; return whether one has ended."""
        ended = False
        for unit in [unit for unit, portions in self._copying.items() if portions]:
            for copied in self._backend.cores[unit].copied():
                self._end(unit, self._copying[unit].pop(0), copied)
                ended = True
        self._admit_all()
        self.going_on.see(self.expects)
        return ended

    def go_on(self) -> None:
        """Do some of what can be done before requests come."""
        self._work.go_on()
        if not self._work.is_due:
            self._allotting.go_on(self._crowded)

    def _end(self, unit: Unit, portion: Portion, copied: Copied) -> None:
        self._stepping.note_copied(unit)
        if portion.carry not in self._arrivals:
            return
        if not copied.problem:
            self._answer(portion, copied)
            return
        # The source has died. The controller begins the requests again when it hears of that, or
        # when it has had no other answer for long.
        log.warning("the KV of %d requests is lost: %s", len(copied.request_ids), copied.problem)
        lost = self._arrivals.pop(portion.carry)
        self._backend.cores[unit].abort([request.request_id for request in lost.waiting])
        self._transport.to_controller(
            m.Imported(portion.carry, self._backend.engine, unit, [], {}, 0, failed=True)
        )

    def _admit_all(self) -> None:
        """Adopt more of all that have come."""
        now, every = self._clock(), list(self._arrivals.values())
        overdue = [now >= self._deadline(arrivals) for arrivals in every]
        for arrivals, is_overdue in zip(every, overdue, strict=True):
            if self._gathering.get(arrivals.message.unit) != arrivals.sharers:
                self._admit(arrivals, gives_up=is_overdue)

    def _admit(self, arrivals: Arrivals, *, gives_up: bool) -> None:
        """Adopt the requests that find room, and begin to copy their KV."""
        message = arrivals.message
        core = self._backend.cores[message.unit]
        portion = self._adopt(core, arrivals, gives_up=gives_up)
        if portion.carried or portion.recomputed:
            arrivals.deadline = self._clock() + ROOM_SECONDS
            before = core.copies
            core.copy()
            if core.copies > before:
                self._stepping.expect_copy(message.unit)
                self._copying.setdefault(message.unit, []).append(portion)
                return
        elif arrivals.waiting or self._portions(message):
            return
        self._answer(portion, Copied([], 0, 0.0))

    def _adopt(self, core: Core, arrivals: Arrivals, *, gives_up: bool) -> Portion:
        portion = Portion(arrivals.message.carry)
        serves = core.unit.tier or core in self._binding.serving
        is_tried = core.load.free_blocks == arrivals.tried and not arrivals.begins_served
        if serves and not gives_up and is_tried:
            return portion
        share = self._turns.share(core, arrivals) if serves else 0
        while share and arrivals.waiting and self._take(core, arrivals, 0, portion):
            share -= 1
        arrivals.tried = core.load.free_blocks
        if portion.carried:
            arrivals.gives_up = 1
        elif not serves or gives_up:
            count = arrivals.gives_up if serves else len(arrivals.waiting)
            arrivals.gives_up *= 2
            for _ in arrivals.waiting[:count]:
                self._take(core, arrivals, -1, portion, with_kv=False)
        return portion

    def _take(
        self, core: Core, arrivals: Arrivals, index: int, portion: Portion, *, with_kv: bool = True
    ) -> bool:
        """Adopt a request that waits; return False if it goes on waiting."""
        request = arrivals.waiting[index]
        try:
            adoption = core.adopt(arrivals.message.source, request, with_kv=with_kv)
        except KeyError:  # it is not valid for this unit
            del arrivals.waiting[index]
            return True
        if adoption is None:
            return False
        del arrivals.waiting[index]
        fallback = adoption.fallback
        if not with_kv and request.computed:
            fallback = m.Fallback.NO_ROOM
        if fallback is None:
            portion.carried.append(request.request_id)
        else:
            portion.recomputed[request.request_id] = fallback
        return True

    def _deadline(self, arrivals: Arrivals) -> float:
        """Return when it is given up to wait for room; infinite while something is copied."""
        sharers = self._turns.sharers(arrivals)
        if not arrivals.waiting or any(self._portions(each.message) for each in sharers):
            return math.inf
        return max(each.deadline for each in sharers)

    def _portions(self, message: m.Import) -> list[Portion]:
        """Return the portions of a carry that are being copied."""
        portions = self._copying.get(message.unit, ())
        return [portion for portion in portions if portion.carry == message.carry]

    def _answer(self, portion: Portion, copied: Copied) -> None:
        arrivals = self._arrivals[portion.carry]
        message = arrivals.message
        arrivals.deadline = self._clock() + ROOM_SECONDS
        left = len(arrivals.waiting)
        left += sum(len(p.carried) + len(p.recomputed) for p in self._portions(message))
        if not left:
            del self._arrivals[portion.carry]
        self._transport.to_controller(
            m.Imported(
                portion.carry,
                self._backend.engine,
                message.unit,
                portion.carried,
                portion.recomputed,
                left,
                copied.bytes,
                copied.seconds,
                copied.host_bytes,
            )
        )

    # --- what is due ---

    def lacking(self, core: Core) -> int:
        """Return the blocks that a core lacks for the requests that wait for room."""
        waiting = [
            request
            for arrivals in self._arrivals.values()
            if arrivals.message.unit == core.unit
            for request in arrivals.waiting
            if request.request_id not in arrivals.served
        ]
        if not waiting:
            return 0
        needed = sum(self._turns.blocks(core, request) for request in waiting)
        return max(1, needed - core.load.free_blocks)

    def due_in(self) -> float | None:
        """Return seconds until requests have waited long enough; None: none waits."""
        if self._work.is_due or self._allotting.is_due(self._crowded):
            return 0.0
        due = min(map(self._deadline, self._arrivals.values()), default=math.inf)
        now, beginning = self._clock(), self._binding.beginning
        if beginning is not None and (until := self._waits_until(beginning.core)) > now:
            due = min(due, until)
        return None if due == math.inf else max(0.0, due - now)
