"""An engine's part in leases: what it lends as a member, and what its group wants as a leader.

A lease starts with what members lend for the bind (``binding``). It grows before the group runs out
of blocks, and shrinks when the group is idle; what paused requests held goes back when they end.
"""

import msgspec

from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.binding import Binding, State
from shoal.runtime.engine.agent.carrying import Carrying
from shoal.runtime.engine.agent.interface import EngineBackend, GroupCore, plain_lease
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
        carrying: knows the requests that wait for room, and those that are about to come.
        clock: seconds.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        binding: Binding,
        carrying: Carrying,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._binding = binding
        self._carrying = carrying
        self._clock = clock
        self._growth = Growth()

    # --- as a member ---

    def lend(self, message: m.Lend) -> None:
        """Lend what is free, and answer."""
        if not self._is_in_time(message.epoch):
            return
        lent = self._backend.own.lend(message.blocks, urgent=message.urgent)
        self._transport.to_controller(
            m.Lent(message.epoch, self._backend.engine, message.unit, lent)
        )

    def _is_in_time(self, epoch: int) -> bool:
        return epoch == m.AHEAD or self._binding.current(epoch, State.BOUND) is not None

    # --- as the leader ---

    def begin(self) -> None:
        """Take note that a group is bound from now on."""
        self._growth = Growth()

    def grow(self, message: m.Grow) -> None:
        """Open what the members lent; an empty lease says that they had nothing to lend."""
        if not self._is_in_time(message.epoch):
            return
        added = len(message.lease.get(self._backend.engine, ()))
        if added:
            self._backend.groups[message.unit].grow(message.lease)
        if message.epoch == m.AHEAD:
            return
        self._growth.asked = False
        if not added:
            self._growth.retry_at = self._clock() + RETRY_SECONDS

    def tend(self) -> None:
        """Ask for blocks that the bound group lacks; give back what idle or paused groups hold.

        A group to which requests are about to come keeps what it was lent ahead of them.
        """
        serving = self._binding.serving
        for core in self._backend.groups.values():
            if core in serving:
                self._tend_bound(core)
            elif core.lease_blocks and not core.in_flight and not self._carrying.expects(core):
                self._return(core, keep=0)

    def _tend_bound(self, core: GroupCore) -> None:
        growth, now = self._growth, self._clock()
        if self._works(core):
            growth.idle_since = None
            self._ask(core, now)
            return
        if growth.idle_since is None:
            growth.idle_since = now
        if now >= growth.idle_since + IDLE_SECONDS and core.lease_blocks > LEASE_FLOOR:
            self._return(core, keep=LEASE_FLOOR)

    def _works(self, core: GroupCore) -> bool:
        return bool(core.num_requests or core.in_flight or self._carrying.lacking(core))

    def ask_again(self) -> None:
        """Ask without a pause: members may have blocks now that they did not have before."""
        self._growth.retry_at = 0.0

    def _ask(self, core: GroupCore, now: float) -> None:
        growth, bind = self._growth, self._binding.bind
        if bind is None or growth.asked or now < growth.retry_at:
            return
        wanted = core.blocks_wanted + self._carrying.lacking(core)
        if wanted > 0:
            # With nothing running no block of the group will come free by itself.
            urgent = not core.in_flight and not core.load.running
            growth.asked = True
            self._transport.to_controller(m.NeedBlocks(bind.epoch, core.unit, wanted, urgent))

    def _return(self, core: GroupCore, *, keep: int) -> None:
        returned = plain_lease(core.shrink(keep))
        if any(returned.values()):
            self._transport.to_controller(m.Returning(self._binding.epoch, core.unit, returned))

    def due_in(self) -> float | None:
        """Return seconds until ``tend`` has something to do without a message; None: never."""
        growth, serving = self._growth, self._binding.serving
        core = next((core for core in self._backend.groups.values() if core in serving), None)
        if core is None:
            return None
        due, now = [], self._clock()
        if self._works(core) and not growth.asked and growth.retry_at > now:
            due.append(growth.retry_at - now)
        if growth.idle_since is not None and core.lease_blocks > LEASE_FLOOR:
            due.append(max(0.0, growth.idle_since + IDLE_SECONDS - now))
        return min(due, default=None)
