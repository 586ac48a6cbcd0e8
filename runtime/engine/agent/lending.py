"""An engine's part in leases: what it lends as a member, and what its group wants as a leader.

A lease starts with what members lend for the bind (``binding``). It grows before the group runs out
of blocks, and before it evicts cached prefixes for want of others, so that in the end it has all
blocks of its members. It shrinks when other units need the blocks. When the group is released, its
blocks go back, portion by portion, those of paused requests when they end.
"""

from collections.abc import Iterator

import msgspec

from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.binding import Bind, Binding, State
from shoal.runtime.engine.agent.carrying import Carrying
from shoal.runtime.engine.agent.interface import Core, EngineBackend, GroupCore, plain_lease
from shoal.runtime.engine.agent.sliced_work import OF_EVERY_CARRY, SlicedWork
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

RETRY_SECONDS = 0.05
"""Pause before a group asks again for blocks that it lacks when the members had none."""
LONGEST_PAUSE = 3.2
"""Longest pause, in seconds, before a group asks again for blocks that would only save cached ones.
The pauses begin with ``RETRY_SECONDS`` and double."""
SHRUNK_SECONDS = 5.0
"""How long a group does so without such blocks after it has given some up for other units: a switch
is about to release it."""

HOLD_SECONDS = 0.03
"""How long a released group keeps its blocks at most for requests that stand still. Another engine
may lack these blocks, and a request may come from a unit whose last step takes long."""


class Growth(msgspec.Struct):
    """What the bound group wants of its members."""

    asked: bool = False
    retry_at: float = 0.0
    """When it asks again for blocks that it lacks."""
    spares_at: float = 0.0
    """When it asks again for blocks that would only save cached ones."""
    pause: float = RETRY_SECONDS
    """How long it does without those when the members have none."""


class Lending:
    """Lends the engine's blocks to its group, and keeps the lease of the group that it leads.

    Args:
        backend: the engine.
        transport: the way to the controller.
        binding: the bind that the engine is in.
        carrying: knows the requests that wait for room, and those that are about to come.
        work: does what takes long.
        clock: seconds.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        binding: Binding,
        carrying: Carrying,
        work: SlicedWork,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._binding = binding
        self._carrying = carrying
        self._work = work
        self._clock = clock
        self._growth = Growth()
        self._returns = False
        """Whether a group that is not bound has more blocks to return."""
        self._asks_at: float | None = None
        """When ``tend`` looks again whether the bound group wants blocks, if it was too early."""
        self._holds_until: float | None = None
        """Until when a released group keeps its blocks; None: it need not."""

    # --- as a member ---

    def lend(self, message: m.Lend) -> None:
        """Lend what is free, and answer, unless the group is released.

        Without an answer a group that is not would wait for this wish, and never ask again.
        """
        lent = []
        if self._is_in_time(message.epoch):
            lent = self._backend.own.lend(message.blocks, urgent=message.urgent)
        elif message.epoch < self._binding.epoch:
            return
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
        growth, now = self._growth, self._clock()
        growth.asked = False
        if added:
            growth.pause = RETRY_SECONDS
        else:
            growth.retry_at, growth.spares_at = now + RETRY_SECONDS, now + growth.pause
            growth.pause = min(2 * growth.pause, LONGEST_PAUSE)

    def shrink(self, message: m.Shrink) -> None:
        """Give up blocks that no request of the bound group holds, before any later work."""
        bind = self._binding.current(message.epoch, State.BOUND)
        if bind is not None and not bind.released:
            self._growth.spares_at = self._clock() + SHRUNK_SECONDS
            self._work.start(OF_EVERY_CARRY, self._give_up(bind, message.blocks))

    def _give_up(self, bind: Bind, blocks: int) -> Iterator[None]:
        while bind is self._binding.bind and not bind.released:
            self._return(self._backend.groups[bind.unit], min(blocks, m.PORTION))
            blocks -= m.PORTION
            if blocks <= 0:
                return
            yield

    def tend(self) -> None:
        """Ask for blocks that the bound group wants; give back what groups hold that are not bound.

        A group to which requests are about to come keeps what it was lent ahead of them. While
        requests stand still until a core here goes on, a group that has just been released gives
        nothing back, and one that is bound asks for nothing that would only save cached blocks: a
        portion takes milliseconds.
        """
        serving, self._returns, self._asks_at = self._binding.serving, False, None
        stands_still = self._stands_still()
        if not stands_still:
            self._holds_until = None
        for core in self._backend.groups.values():
            if core in serving:
                if self._works(core):
                    self._ask(core, self._clock(), spares=not stands_still)
            elif core.lease_blocks and not core.in_flight and not self._carrying.expects(core):
                if stands_still and self._holds():
                    continue
                self._return(core, m.PORTION)
                self._returns |= core.load.free_blocks > 0

    def _holds(self) -> bool:
        """Return whether a released group still keeps its blocks for requests that stand still."""
        if self._holds_until is None:
            self._holds_until = self._clock() + HOLD_SECONDS
        return self._clock() < self._holds_until

    def _stands_still(self) -> bool:
        """Return whether requests, which have room, have no token until a core here goes on."""
        carrying, beginning = self._carrying, self._binding.beginning
        if (begun := carrying.going_on.core) is not None:
            return not carrying.lacking(begun)
        core: Core | None = beginning.core if beginning is not None else None
        if self._binding.awaits_answer:
            core = self._backend.own
        return core is not None and carrying.expects(core) and not carrying.lacking(core)

    def _works(self, core: GroupCore) -> bool:
        return bool(core.num_requests or core.in_flight or self._carrying.lacking(core))

    def ask_again(self) -> None:
        """Ask without a pause: members may have blocks now that they did not have before."""
        self._growth.retry_at = 0.0

    def _ask(self, core: GroupCore, now: float, *, spares: bool) -> None:
        growth, bind = self._growth, self._binding.bind
        if bind is None or growth.asked:
            return
        if now < growth.retry_at:
            self._asks_at = growth.retry_at
            return
        lacking = core.blocks_lacking + self._carrying.lacking(core)
        wanted = max(lacking, core.blocks_wanted if spares and now >= growth.spares_at else 0)
        if wanted > 0:
            # With nothing running no block of the group will come free by itself.
            urgent = bool(lacking) and not core.in_flight and not core.load.running
            growth.asked, wanted = True, min(wanted, m.PORTION)
            self._transport.to_controller(m.NeedBlocks(bind.epoch, core.unit, wanted, urgent))

    def _return(self, core: GroupCore, blocks: int) -> None:
        returned = plain_lease(core.shrink(blocks))
        if any(returned.values()):
            self._transport.to_controller(m.Returning(self._binding.epoch, core.unit, returned))

    def due_in(self) -> float | None:
        """Return seconds until ``tend`` has something to do without a message; None: never."""
        if self._returns:
            return 0.0
        now = self._clock()
        # Not what ``retry_at`` says now: it may have come since ``tend`` found it too early.
        due = [] if self._asks_at is None else [max(0.0, self._asks_at - now)]
        if self._holds_until is not None and self._holds_until > now:
            due.append(self._holds_until - now)
        return min(due, default=None)
