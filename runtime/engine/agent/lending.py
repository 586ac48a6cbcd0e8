"""An engine's part in leases: what it lends as a member, and what its group wants as a leader.

A lease starts with what members lend for the bind (``binding``). It grows before the group runs out
of blocks, and shrinks when the group is idle; what paused requests held goes back when they end.
"""

from collections.abc import Sequence

import msgspec

from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.binding import Binding, State
from shoal.runtime.engine.agent.interface import Core, EngineBackend, GroupCore, plain_lease
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

LEASE_FLOOR = 64
"""Virtual blocks an idle group keeps, so that its next request starts without asking for more."""
IDLE_SECONDS = 1.0
"""How long a group is idle before it gives blocks back: a client that sends requests one by one
should not change the lease with each of them."""
RETRY_SECONDS = 0.05
"""Pause before a group asks again for blocks when the members had none."""


class Growth(msgspec.Struct):
    """What the bound group wants of its members."""

    asked: bool = False
    retry_at: float = 0.0
    idle_since: float | None = None


class Lending:
    """Lends the engine's blocks to its group, and keeps the lease of the group that it leads.

    Args:
        backend: the engine.
        transport: the way to the controller.
        binding: the bind that the engine is in.
        clock: seconds.
    """

    def __init__(
        self, backend: EngineBackend, transport: AgentTransport, binding: Binding, clock: Clock
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._binding = binding
        self._clock = clock
        self._growth = Growth()
        self._lends: list[m.Lend] = []
        """Requests for blocks that wait for the engine's own steps in flight."""

    # --- as a member ---

    @property
    def holds_own(self) -> bool:
        """Whether the engine's own core pauses until its steps in flight are collected."""
        return bool(self._lends)

    def lend(self, message: m.Lend) -> None:
        """Lend at once; while the engine interleaves, at ``lend_interleaved``."""
        bind = self._binding.current(message.epoch, State.BOUND)
        if bind is not None and bind.interleaves:
            self._lends.append(message)
        elif bind is not None:
            self._answer(message, message.blocks, urgent=message.urgent)

    def lend_interleaved(self) -> bool:
        """Lend what was asked for, once no step of the engine's own is in flight.

        The runner may take a step of the group before one that was queued earlier here, and such a
        step still writes to the blocks of requests that have ended meanwhile. Returns whether the
        engine's own core goes on.
        """
        own = self._backend.own
        if not self._lends or own.in_flight:
            return False
        lends, self._lends = self._lends, []
        for message in lends:
            if self._binding.current(message.epoch, State.BOUND) is not None:
                # If none of its own requests runs, keeping blocks for them could stop both sides.
                spare = own.spare_blocks if own.load.running else message.blocks
                self._answer(message, min(message.blocks, spare), urgent=False)
        return True

    def _answer(self, message: m.Lend, blocks: int, *, urgent: bool) -> None:
        lent = self._backend.own.lend(blocks, urgent=urgent)
        self._transport.to_controller(
            m.Lent(message.epoch, self._backend.engine, message.unit, lent)
        )

    # --- as the leader ---

    def begin(self) -> None:
        """Take note that a group is bound from now on."""
        self._growth = Growth()

    def grow(self, message: m.Grow) -> None:
        """Open what the members lent; an empty lease says that they had nothing to lend."""
        if self._binding.current(message.epoch, State.BOUND) is None:
            return
        self._growth.asked = False
        added = len(message.lease.get(self._backend.engine, ()))
        if added:
            self._backend.groups[message.unit].grow(message.lease)
        else:
            self._growth.retry_at = self._clock() + RETRY_SECONDS

    def tend(self, active: Sequence[Core]) -> None:
        """Ask for blocks that the active group lacks; give back what idle or paused groups hold.

        Args:
            active: the cores that may dispatch steps now.
        """
        for core in self._backend.groups.values():
            if core in active:
                self._tend_active(core)
            elif core.lease_blocks and not core.in_flight:
                self._return(core, keep=0)

    def _tend_active(self, core: GroupCore) -> None:
        growth, now = self._growth, self._clock()
        if core.num_requests or core.in_flight:
            growth.idle_since = None
            self._ask(core, now)
            return
        if growth.idle_since is None:
            growth.idle_since = now
        if now >= growth.idle_since + IDLE_SECONDS and core.lease_blocks > self._floor:
            self._return(core, keep=self._floor)

    @property
    def _floor(self) -> int:
        """Virtual blocks that the idle group keeps: none if requests beside it may want them."""
        return 0 if self._binding.interleaves else LEASE_FLOOR

    def _ask(self, core: GroupCore, now: float) -> None:
        growth, bind = self._growth, self._binding.bind
        if bind is None or growth.asked or now < growth.retry_at:
            return
        wanted = core.blocks_wanted
        if wanted > 0:
            # With nothing running no block of the group will come free by itself.
            urgent = not core.in_flight and not core.load.running
            growth.asked = True
            self._transport.to_controller(m.NeedBlocks(bind.epoch, core.unit, wanted, urgent))

    def _return(self, core: GroupCore, *, keep: int) -> None:
        returned = plain_lease(core.shrink(keep))
        if any(returned.values()):
            self._transport.to_controller(m.Returning(self._binding.epoch, core.unit, returned))

    def due_in(self, active: Sequence[Core]) -> float | None:
        """Return seconds until ``tend`` has something to do without a message; None: never.

        Args:
            active: the cores that may dispatch steps now.
        """
        growth = self._growth
        core = next((core for core in self._backend.groups.values() if core in active), None)
        if core is None:
            return None
        due, now = [], self._clock()
        if core.num_requests and not growth.asked and growth.retry_at > now:
            due.append(growth.retry_at - now)
        if growth.idle_since is not None and core.lease_blocks > self._floor:
            due.append(max(0.0, growth.idle_since + IDLE_SECONDS - now))
        return min(due, default=None)
