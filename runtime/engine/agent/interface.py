"""The seam between an engine's part in the protocol and what computes: vLLM, or the fake.

The agent knows binds, leases and epochs, and nothing of models. An ``EngineBackend`` offers one
``Core`` for each unit that the engine can lead: its own, which is also the ``BlockLender`` of the
engine's KV blocks, and a ``GroupCore`` for each group. Both implementations (``vllm_backend.py``,
``fake_backend.py``) pass the same tests.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from shoal.policies.values.layouts import Unit
from shoal.policies.values.level import Level
from shoal.runtime.engine.agent.copies_ahead import CopiesAhead
from shoal.runtime.engine.agent.results import (
    Adoption,
    Collected,
    Copied,
    CoreLoad,
)
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.protocol.messages import (
    CarriedRequest,
    LayoutLimits,
    Mode,
    Shares,
    Work,
)

Lease = Mapping[int, Sequence[int]]
"""Member engine -> physical block ids, all of one length (see ``messages.Commit``)."""


def plain_lease(lease: Lease) -> dict[int, list[int]]:
    """Return a lease as messages carry it."""
    return {engine: list(blocks) for engine, blocks in lease.items()}


class Core(CopiesAhead, Protocol):
    """One unit's scheduler and its way to the runners.

    No method blocks on a step. A *safe point* is any moment outside ``dispatch``.
    """

    unit: Unit
    shift: Shift
    """Chooses the mode of the next steps."""

    def add(self, frames: Sequence[Any], tokens: Sequence[int] = (), patience: float = 0.0) -> None:
        """Queue a request.

        Args:
            frames: vLLM's raw ``ADD`` payload, as the front end sent it.
            tokens: output tokens that other units have generated for it. Their KV is computed
                again, and the request goes on as if this core had generated them.
            patience: its prompt waits as if it had come so many seconds later.

        Raises:
            ValueError: the request is not valid for this core; it holds no state afterwards.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests, also exported and expected ones; unknown ids are ignored.

        Frees their blocks.
        """

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """Forget requests; return all output tokens of each. Unknown ids are left out.

        Only while no step is in flight: the result of such a step would be lost.
        """

    # --- requests that are carried: they go from core to core with their KV ---

    def announce(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """Describe requests that are about to leave, as they will be without another step.

        Steps in flight still end; no other is dispatched before ``export``. Requests whose state
        after these steps is not known are left out.
        """

    def export(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """Stop computing requests, and describe them; unknown ids are left out.

        Of one that ``announce`` has described, and that is as it was foretold, only the rest.
        They keep their blocks until ``abort`` or ``keep``. Exported requests count as requests of
        the core, but as neither running nor waiting. Only while no step is in flight, and while no
        copy into this core's blocks is going on (``copies``).
        """

    def keep(self, request_ids: Sequence[str]) -> None:
        """Go on with exported requests, where they were; unknown ids are ignored."""

    def expect(self, request_id: str, frames: Sequence[Any]) -> None:
        """Prepare what can be prepared of a request before it arrives with ``adopt``.

        An expected request is no request of the core yet.

        Raises:
            ValueError: see ``add``.
        """

    def expect_prefix(self, name: str, frames: Sequence[Any]) -> None:
        """Prepare for what another unit has cached of a request that has ended.

        Until ``abort`` it is an expected request of this name, which only ``reserve`` is told of.

        Raises:
            ValueError: see ``add``.
        """

    def allot(self, request: CarriedRequest) -> bool:
        """Give an expected request, as it was announced, its blocks; return whether it has them.

        Nothing is read into them before ``adopt``. ``abort`` frees them. A request gets none if it
        begins like another one that has: it will find that one's blocks when both have come.
        """

    def tell_allotted(self, complete: Iterable[tuple[Unit, Sequence[str]]] = ()) -> None:
        """Tell the runners of requests that have got blocks by ``allot`` since the last time.

        Args:
            complete: the source and all requests of each carry of which now all have blocks.
        """

    def adopt(self, source: Unit, request: CarriedRequest, *, with_kv: bool) -> Adoption | None:
        """Go on with an expected request, as if this core had computed it so far.

        With its KV, the request gets blocks into which ``copy`` reads it. Adopted requests may be
        scheduled at once: the runners do what they are told in order.

        Args:
            source: the unit whose members have the KV.
            request: the request.
            with_kv: whether to take its KV along; otherwise the core computes it again.

        Returns:
            How it was taken; None: there are not enough free blocks now, and nothing has changed.

        Raises:
            KeyError: the request is not expected, because it was aborted.
        """

    def send_first(self, carries: Sequence[tuple[Unit, Sequence[CarriedRequest]]]) -> bool:
        """Tell the runners to read the KV of allotted requests, and to begin with these.

        That takes less time than to adopt them and to schedule a step. If it was done, then for
        each carry ``adopt`` of all its requests, in this order, and ``copy``, and after all carries
        ``dispatch`` must follow, with nothing between. They send nothing then.

        Returns:
            Whether it was done; False: it is not sure what will come of these calls.
        """

    def copy(self) -> None:
        """Tell the runners to read the KV of the requests adopted since the last call."""

    def copied(self) -> list[Copied]:
        """Return the copies that have ended since the last call.

        Steps that were dispatched after a copy are collected only after the copy was returned here.

        Raises:
            RunnerDied: a copy failed, and other requests use the blocks that it was to fill.
        """

    @property
    def copies(self) -> int:
        """Copies into this core's blocks that were begun and have not been returned as ended."""

    # --- steps ---

    def collect(self) -> Collected | None:
        """Collect every step that has ended; return what came of them, None if none has ended.

        In a pipeline it is one step at a time, so that the next one is dispatched in between.
        """

    def dispatch(self) -> bool:
        """Dispatch the next step if there is room and work for it; return whether it was."""

    def dispatch_ahead(self) -> bool:
        """Dispatch the next step in place of one that has ended and is not collected yet.

        Only if handling that step's result takes so long that the device would wait meanwhile.
        Returns whether a step was dispatched.
        """

    def holders(self, beyond: int) -> list[str]:
        """Return the requests with a block whose id is above ``beyond`` on any member's engine."""

    def vacate(self, beyond: int, *, moves: bool) -> int:
        """Empty the blocks of the core whose ids are above ``beyond`` on any member's engine.

        What they hold moves to other blocks. Requests for whose KV there is no room lose their
        blocks, and are computed again. What is cached and held by nobody moves as far as there are
        blocks that cache nothing. Only while no step is in flight, or if there are no ``holders``.

        Args:
            beyond: an id.
            moves: whether anything can move: the members' runners must read the core's queue.

        Returns:
            How many requests are computed again.
        """

    @property
    def is_moving(self) -> bool:
        """Whether members still copy what ``vacate`` has moved."""

    def pause(self) -> None:
        """Take note that nothing is dispatched for now, while a step is in flight."""

    @property
    def in_flight(self) -> int:
        """Steps dispatched and not collected."""

    @property
    def oldest_step(self) -> tuple[Mode, Work] | None:
        """How the oldest step in flight runs, and what it computes; None: none is in flight."""

    @property
    def num_requests(self) -> int:
        """Requests not finished (running, waiting or preempted)."""

    @property
    def load(self) -> CoreLoad:
        """Counts for the controller."""

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant of the core's books and of the blocks it lends."""


class BlockLender(Protocol):
    """Lends the KV blocks of one engine's pool to the groups that the engine is a member of."""

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """Take up to ``blocks`` free blocks out of the pool and return their ids.

        ``urgent`` preempts this engine's own paused requests, latest first, until enough are free.
        """

    def take_back(self, blocks: Sequence[int]) -> None:
        """Return lent blocks to the pool.

        Raises:
            KeyError: a block is not lent.
        """

    @property
    def lent(self) -> frozenset[int]:
        """Ids of the blocks lent now."""

    def clear(self, beyond: int, *, moves: bool) -> bool:
        """Take some free blocks whose ids are above ``beyond`` out of the pool, while steps go on.

        What they cache is copied to others that cache nothing, beside steps.

        Args:
            beyond: an id.
            moves: whether anything can be copied: the engine's runner must read its own queue.

        Returns:
            Whether to call this again at once.
        """

    @property
    def is_clearing(self) -> bool:
        """Whether ``clear`` has begun something that has not ended."""

    def withhold(self, beyond: int) -> int:
        """Take free blocks whose ids are above ``beyond`` out of the pool, whatever they cache.

        Returns:
            How many such blocks requests or groups still hold.
        """

    def restore(self) -> None:
        """Put all blocks back that are withheld."""


class OwnCore(Core, BlockLender, Protocol):
    """The core of an engine alone; it owns the engine's blocks, and so lends them."""


class GroupCore(Core, Protocol):
    """The core of a group, in the engine that leads it. It schedules over the group's lease."""

    def bind(self, epoch: int, lease: Lease, seed: int) -> None:
        """Tell the members' runners to start the group (they must be attached) and open the lease.

        A core that holds paused requests keeps the blocks it already has and adds ``lease``.
        """

    def grow(self, lease: Lease) -> None:
        """Open more virtual blocks. Takes effect before the next step."""

    def release(self, epoch: int) -> None:
        """Send the members' runners back after the steps in flight. The lease stays open."""

    def surrender(self, beyond: int) -> Lease:
        """Close the free virtual blocks that a block backs whose id is above ``beyond``.

        Returns the physical blocks that backed them, also those of lower ids.
        """

    def shrink(self, blocks: int) -> Lease:
        """Close up to so many free virtual blocks; return the physical blocks that backed them.

        Those that cache nothing go first, then the least lately used.
        """

    @property
    def blocks_lacking(self) -> int:
        """Virtual blocks that the queued and running requests lack for the next steps (0: none).

        They have those, too, that are free and cache something.
        """

    @property
    def blocks_wanted(self) -> int:
        """Virtual blocks that are lacking for the next steps to evict nothing (0: none)."""

    @property
    def lease_blocks(self) -> int:
        """Virtual blocks that are open or held by requests."""


class EngineBackend(Protocol):
    """One engine: its cores and its runner's mailbox."""

    engine: int
    num_blocks: int
    ready_response: bytes
    shares: Shares
    tier_blocks: int
    """Blocks of the engine's tier; 0: it has none, and no core for it."""

    @property
    def own(self) -> OwnCore:
        """The core of the engine alone."""

    @property
    def groups(self) -> Mapping[Unit, GroupCore]:
        """The core of every group that the engine leads and that is formed."""

    @property
    def cores(self) -> Mapping[Unit, Core]:
        """Every core, the engine's own first, also that of its tier."""

    @property
    def layouts(self) -> Sequence[LayoutLimits]:
        """Limits of every layout this engine leads a group of, its own included."""

    def attach(self, unit: Unit) -> None:
        """Tell this engine's runner to leave its own queue for the group's, after what it holds."""

    def form(self, unit: Unit, generation: int) -> "Future[str]":
        """Have this engine's runner make its part of a group anew; collective over its members.

        The group's core is gone from then on. The future yields "", or why the part could not be
        made; in that case the engine goes on without the group.

        Args:
            unit: a group that this engine belongs to; it is not bound and has no lease.
            generation: how often it was made before; the same for all members.
        """

    def start(self, unit: Unit) -> "Future[Any]":
        """Start the group's core, if this engine leads it; every member has formed the group.

        Collective over the members. Done when this engine's runner takes instructions again.
        """

    def fill_weights(self, unit: Unit, blocks: int, level: Level) -> "Future[str]":
        """Have the unit's runners give up the memory of KV blocks, and copy their peers' weights.

        Steps go on meanwhile. The future yields "", or why the copies cannot be used.

        Args:
            unit: this engine's unit, which it leads.
            blocks: the KV blocks whose ids are above this number are given up.
            level: what engines have whole at this level is copied.
        """

    def use_weights(self, unit: Unit, level: Level) -> "Future[dict[int, int]]":
        """Have the unit's runners go on at a level of memory, after the steps in flight.

        The future yields the bytes of weights in the memory of each member.

        Args:
            unit: see ``fill_weights``.
            level: at that of the start copies are given back, and KV has its memory. At others they
                are used; they have been made for this level.
        """

    def utility(self, frames: Sequence[Any]) -> Sequence[Any]:
        """Run a vLLM utility call; return its answer, encoded for the front end."""

    def pollables(self) -> Sequence[Any]:
        """Return ZMQ sockets that become readable when a step may have finished."""

    def on_readable(self) -> None:
        """Read what the pollables hold, without blocking.

        Raises:
            RunnerDied: a runner reported an error it cannot go on from.
        """

    def next_wakeup(self) -> float | None:
        """Return seconds until something is due without a message (the fake's timers), or None."""

    def close(self) -> None:
        """Free the backend's resources."""


class RunnerDied(RuntimeError):
    """A runner met an error it cannot go on from; the message is its one-line cause."""
