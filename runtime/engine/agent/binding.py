"""An engine's part in binds: where it stands, and when cores stop and go on for a switch.

    SOLO ──Prepare──> PREPARING ──safe point──> PREPARED ──Commit──> BOUND ──Resume──> SOLO
                          └───────AbortBind───────┴──────> SOLO

A core *serves* while it may dispatch steps: the engine's own in SOLO and PREPARING; the group's
while it is bound and this engine leads it. Every other core is paused: steps already in flight are
still collected.

A switch stops a core at a safe point: at once under hard preemption, else when its last request is
done. There are two such points, ``_stop_own`` and ``_stop_group``, and two points from which a core
goes on, ``commit`` and ``_go_solo``. Running requests stay in the core that has stopped, until they
are carried to another one (``carrying``).
"""

import enum
import math
from collections.abc import Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.interface import Core, EngineBackend, GroupCore, plain_lease
from shoal.runtime.engine.agent.watchdog import StepWatch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

FIRST_BLOCKS = 128
"""Blocks that go back with ``Released`` while requests wait for the engines to go on alone. A block
takes the host up to 5 microseconds. A request whose KV was copied ahead needs no more than two."""


class State(enum.StrEnum):
    """Where the engine stands in a bind."""

    SOLO = "solo"
    PREPARING = "preparing"
    PREPARED = "prepared"
    BOUND = "bound"


class Bind(msgspec.Struct):
    """The bind that an engine is in."""

    epoch: int
    unit: Unit
    blocks_asked: int
    lent: list[int]
    """What this engine lent in ``Prepare``; taken back if the bind is aborted."""
    waits_to_release: bool = False
    """A release waits for the group's requests to be done."""
    released: bool = False


class Beginning(msgspec.Struct):
    """A core that has gone on, until it has the requests that come first."""

    core: Core
    by: float
    """When it takes a step even if some of them have not come."""


class Binding:
    """Answers the messages of a switch.

    Args:
        backend: the engine.
        transport: the way to the controller.
        watch: told which units' next steps queue up behind other steps.
        clock: seconds.
    """

    def __init__(
        self, backend: EngineBackend, transport: AgentTransport, watch: StepWatch, clock: Clock
    ) -> None:
        self.state = State.SOLO
        self.bind: Bind | None = None
        self.epoch = -1
        """The epoch of the latest bind that was prepared, whether it has ended or not."""
        self.stale = 0
        """Switch messages dropped because their epoch was over."""
        self.beginning: Beginning | None = None
        """The core that has gone on last, if it still expects requests."""
        self._backend = backend
        self._transport = transport
        self._watch = watch
        self._clock = clock

    @property
    def serving(self) -> list[Core]:
        """The cores whose requests this engine serves now."""
        bind = self.bind
        cores: list[Core] = []
        if bind is None or self.state is State.PREPARING:
            cores.append(self._backend.own)
        if bind is not None and self.state is State.BOUND and not bind.released:
            cores += [self._group_core(bind)] if self._leads(bind) else []
        return cores

    @property
    def awaits_answer(self) -> bool:
        """Whether the controller's next message of a switch is due at once."""
        return self.state is State.PREPARED or (self.bind is not None and self.bind.released)

    def current(self, epoch: int, *states: State) -> Bind | None:
        """Return the bind that a message is about; None, and count it, when it came too late."""
        if self.bind is not None and self.bind.epoch == epoch and self.state in states:
            return self.bind
        self.stale += 1
        return None

    # --- a bind ---

    def prepare(self, message: m.Prepare) -> None:
        """Stop the engine's own core and answer, now or at ``reach_safe_point``."""
        repeated = self.bind is not None and self.bind.epoch == message.epoch
        if repeated and self.state is State.PREPARED:
            return
        waits = repeated and self.state is State.PREPARING
        if not waits and (message.epoch <= self.epoch or self.state is not State.SOLO):
            self.stale += 1
            return
        self.epoch = message.epoch
        self.bind = Bind(message.epoch, message.unit, message.blocks, [])
        self.state = State.PREPARING
        if message.treatment is m.Treatment.HARD:
            self._stop_own(self.bind)

    def _stop_own(self, bind: Bind) -> None:
        """Lend, and answer ``Prepare``: the safe point of the engine's own core."""
        own, began = self._backend.own, self._clock()
        bind.lent = own.lend(bind.blocks_asked)
        took = self._clock() - began
        self.state = State.PREPARED
        self._transport.to_controller(
            m.Prepared(bind.epoch, self._backend.engine, bind.lent, own.num_requests, took)
        )

    def commit(self, message: m.Commit) -> bool:
        """Begin the group: its core goes on from here. Return whether the message was in time."""
        bind = self.current(message.epoch, State.PREPARED)
        if bind is None:
            return False
        self._backend.attach(bind.unit)
        self.beginning = None
        if self._leads(bind):
            core = self._group_core(bind)
            core.bind(bind.epoch, message.lease, message.seed)
            self.beginning = Beginning(core, -math.inf)  # none have come that could wait
        self.state = State.BOUND
        # Its first step queues up behind its members' steps in flight.
        self._watch.expect_delay(bind.unit)
        self._transport.to_controller(m.Committed(bind.epoch, self._backend.engine))
        return True

    def abort(self, message: m.AbortBind) -> None:
        """Go on alone, as if nothing had been prepared."""
        bind = self.current(message.epoch, State.PREPARING, State.PREPARED)
        if bind is not None:
            self._go_solo(bind, bind.lent)

    # --- a release ---

    def release(self, message: m.Release) -> None:
        """Stop the group's core and answer, now or at ``reach_safe_point``."""
        bind = self.current(message.epoch, State.BOUND)
        if bind is None or bind.released:
            return
        bind.waits_to_release = True
        if message.treatment is m.Treatment.HARD:
            self._stop_group(bind)

    def _stop_group(self, bind: Bind) -> None:
        """Dissolve the group, and answer ``Release``: the safe point of the group's core."""
        core = self._group_core(bind)
        core.release(bind.epoch)
        returned = core.shrink(FIRST_BLOCKS if core.num_requests else m.PORTION)
        bind.released = True
        self._transport.to_controller(
            m.Released(bind.epoch, bind.unit, plain_lease(returned), core.num_requests)
        )

    def keep(self, message: m.KeepBound) -> None:
        """Wait no longer to dissolve the group. Does nothing if that has happened."""
        bind = self.current(message.epoch, State.BOUND)
        if bind is not None and not bind.released:
            bind.waits_to_release = False
            self._transport.to_controller(m.Committed(bind.epoch, self._backend.engine))

    def resume(self, message: m.Resume) -> None:
        """Go on alone with the blocks that come back from the group."""
        bind = self.current(message.epoch, State.BOUND)
        if bind is not None:
            self._go_solo(bind, message.blocks)

    def _go_solo(self, bind: Bind, blocks: Sequence[int]) -> None:
        """Let the engine's own core go on, with these blocks back."""
        own = self._backend.own
        own.take_back(blocks)
        self.beginning = Beginning(own, math.inf)
        self.bind = None
        self.state = State.SOLO
        # The next own step queues up behind the group's steps in flight.
        self._watch.expect_delay(own.unit)
        self._transport.to_controller(m.Resumed(bind.epoch, self._backend.engine, own.num_requests))

    # --- safe points ---

    def reach_safe_point(self) -> None:
        """Stop a core for a sequential bind or release once its last request is done."""
        bind = self.bind
        if bind is None:
            return
        if self.state is State.PREPARING and _is_idle(self._backend.own):
            self._stop_own(bind)
        elif bind.waits_to_release and not bind.released and _is_idle(self._group_core(bind)):
            self._stop_group(bind)

    def _group_core(self, bind: Bind) -> GroupCore:
        return self._backend.groups[bind.unit]

    def _leads(self, bind: Bind) -> bool:
        return bind.unit.leader == self._backend.engine


def _is_idle(core: Core) -> bool:
    return not core.num_requests and not core.in_flight
