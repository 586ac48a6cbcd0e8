"""An engine's part in carries: running requests that go to another unit, with their KV.

As the source, a core exports requests at a safe point without steps in flight, and holds their
blocks until it is told to drop or to keep them. As the destination, a core prepares requests before
they come, and adopts them in portions: as many as find room, the smallest first. Dropped requests
make room at the source, so that the rest may find room too. What finds none for ``ROOM_SECONDS`` is
computed again.
"""

import logging
from collections.abc import Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.binding import Binding
from shoal.runtime.engine.agent.copying_ahead import CopyingAhead
from shoal.runtime.engine.agent.interface import Copied, Core, EngineBackend
from shoal.runtime.engine.agent.stepping import Stepping
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport, Frames

log = logging.getLogger("shoal.engine")

ROOM_SECONDS = 0.25
"""How long requests wait for room while nothing changes: about what it takes to compute one of a
few thousand tokens again."""


class Portion(msgspec.Struct):
    """Requests that a core has adopted together, and whose KV is read by one copy."""

    carry: int
    carried: list[str] = []
    recomputed: dict[str, m.Fallback] = {}


class Arrivals(msgspec.Struct):
    """Requests of one carry that a core has not adopted yet."""

    message: m.Import
    waiting: list[m.CarriedRequest]
    """Those that have least to read first."""
    deadline: float
    """When the rest is computed again if nothing changes."""
    tried: int = -1
    """Free blocks with which there was no room for the first."""


class Carrying:
    """Takes requests out of cores for other units, and into cores from other units.

    Args:
        backend: the engine.
        transport: the way to the controller and the front ends.
        binding: the bind that the engine is in.
        stepping: counts the requests of each unit.
        ahead: knows what of the requests was copied ahead.
        clock: seconds.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        binding: Binding,
        stepping: Stepping,
        ahead: CopyingAhead,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._binding = binding
        self._stepping = stepping
        self._ahead = ahead
        self._clock = clock
        self._exports: list[m.Export] = []
        self._expected: dict[int, m.Expect] = {}
        """The requests that each carry is to bring, until they come."""
        self._refused: dict[str, tuple[Frames, ValueError]] = {}
        """Expected requests that are not valid for their unit, and why."""
        self._arrivals: dict[int, Arrivals] = {}
        self._copying: dict[Unit, list[Portion]] = {}
        """What each core's copies bring, in the order in which they end."""

    # --- as the source ---

    def export(self, message: m.Export) -> None:
        """Export requests at ``take_out``."""
        self._exports.append(message)

    def holds(self, core: Core) -> bool:
        """Return whether a core pauses because requests are about to leave it, or to come first.

        An engine that has just gone on alone waits for the requests that it expects: they have run
        in a group until now, and would wait for the prompts of new ones.
        """
        if core is self._binding.beginning and self.expects(core):
            return True
        return any(export.unit == core.unit for export in self._exports)

    def take_out(self) -> bool:
        """Export what can be exported now; return whether a core goes on."""
        ready = [export for export in self._exports if _rests(self._backend.cores[export.unit])]
        for export in ready:
            self._exports.remove(export)
            requests = self._backend.cores[export.unit].export(export.request_ids)
            self._transport.to_controller(
                m.Exported(export.carry, self._backend.engine, export.unit, requests)
            )
        return bool(ready)

    def drop(self, message: m.Drop) -> None:
        """Forget requests that another unit has, or that nobody wants."""
        self._backend.cores[message.unit].abort(message.request_ids)

    def keep(self, message: m.Keep) -> None:
        """Go on with requests that were to leave."""
        kept = set(message.request_ids)
        for export in self._exports:
            if export.unit == message.unit:
                export.request_ids[:] = [id_ for id_ in export.request_ids if id_ not in kept]
        self._backend.cores[message.unit].keep(message.request_ids)

    # --- as the destination ---

    def expect(self, message: m.Expect) -> None:
        """Prepare requests that are about to come."""
        core = self._backend.cores[message.unit]
        self._expected[message.carry] = message
        for request_id, frames in message.frames.items():
            try:
                core.expect(request_id, frames)
            except ValueError as error:
                self._refused[request_id] = frames, error

    def expects(self, core: Core) -> bool:
        """Return whether requests are about to come to a core, so that it needs its blocks."""
        return any(expected.unit == core.unit for expected in self._expected.values())

    def take_in(self, message: m.Import) -> None:
        """Adopt the requests that find room, and forget expected ones that do not come."""
        come = {request.request_id for request in message.requests}
        announced = self._expected.pop(message.carry, None)
        expected = [] if announced is None else list(announced.frames)
        self._backend.cores[message.unit].abort([id_ for id_ in expected if id_ not in come])
        for request_id in expected:
            refused = self._refused.pop(request_id, None)
            if refused is not None and request_id in come:
                self._stepping.refuse(message.unit, request_id, *refused)
        for _ in message.requests:
            self._stepping.count(message.unit)
        copied = self._ahead.arrive(message.carry)
        waiting = sorted(
            message.requests,
            key=lambda request: request.computed - copied.get(request.request_id, 0),
        )
        arrivals = Arrivals(message, waiting, self._clock() + ROOM_SECONDS)
        self._arrivals[message.carry] = arrivals
        self._admit(arrivals)

    def forget(self, unit: Unit, request_ids: Sequence[str]) -> None:
        """Forget requests that wait for room in a unit, because their clients have gone."""
        gone = set(request_ids)
        for arrivals in self._arrivals.values():
            if arrivals.message.unit == unit:
                arrivals.waiting = [r for r in arrivals.waiting if r.request_id not in gone]

    def tend(self) -> bool:
        """Answer for the copies that have ended, and adopt more; return whether one has ended."""
        if self._binding.beginning is not None and not self.expects(self._binding.beginning):
            self._binding.beginning = None
        ended = False
        for unit in [unit for unit, portions in self._copying.items() if portions]:
            for copied in self._backend.cores[unit].copied():
                self._end(unit, self._copying[unit].pop(0), copied)
                ended = True
        for arrivals in list(self._arrivals.values()):
            self._admit(arrivals)
        return ended

    def _end(self, unit: Unit, portion: Portion, copied: Copied) -> None:
        self._stepping.note_copied(unit)
        if portion.carry not in self._arrivals:
            return
        if not copied.problem:
            self._answer(portion, copied)
            return
        # The source has died. The controller begins the requests again when it hears of that, or
        # when it has had no answer for long.
        log.warning("the KV of %d requests is lost: %s", len(copied.request_ids), copied.problem)
        lost = self._arrivals.pop(portion.carry)
        self._backend.cores[unit].abort([request.request_id for request in lost.waiting])

    def _admit(self, arrivals: Arrivals) -> None:
        """Adopt the requests that find room, and begin to copy their KV."""
        message = arrivals.message
        core = self._backend.cores[message.unit]
        portion = self._adopt(core, arrivals)
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

    def _adopt(self, core: Core, arrivals: Arrivals) -> Portion:
        message, portion = arrivals.message, Portion(arrivals.message.carry)
        with_kv = not self._gives_up(core, arrivals)
        if with_kv and core.load.free_blocks == arrivals.tried:
            return portion
        while arrivals.waiting:
            request = arrivals.waiting[0]
            try:
                adoption = core.adopt(message.source, request, with_kv=with_kv)
            except KeyError:  # it is not valid for this unit
                del arrivals.waiting[0]
                continue
            if adoption is None:
                arrivals.tried = core.load.free_blocks
                break
            del arrivals.waiting[0]
            fallback = adoption.fallback
            if not with_kv and request.computed:
                fallback = m.Fallback.NO_ROOM
            if fallback is None:
                portion.carried.append(request.request_id)
            else:
                portion.recomputed[request.request_id] = fallback
        return portion

    def _gives_up(self, core: Core, arrivals: Arrivals) -> bool:
        """Return whether the requests that wait cannot have blocks, or not soon."""
        if core not in self._binding.serving:
            return True
        return self._clock() >= arrivals.deadline and not self._portions(arrivals.message)

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
        ]
        if not waiting:
            return 0
        layout = core.unit.layout
        (limits,) = (of for of in self._backend.layouts if of.layout == layout)
        needed = sum(limits.blocks(request.length + 1) for request in waiting)
        return max(1, needed - core.load.free_blocks)

    def due_in(self) -> float | None:
        """Return seconds until requests have waited long enough for room; None: none waits."""
        deadlines = [
            arrivals.deadline
            for arrivals in self._arrivals.values()
            if arrivals.waiting and not self._portions(arrivals.message)
        ]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None


def _rests(core: Core) -> bool:
    """Return whether nothing is about to write to a core's blocks."""
    return not core.in_flight and not core.copies
