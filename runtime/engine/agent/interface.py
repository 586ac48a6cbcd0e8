"""The seam between the engine's protocol (``agent.py``) and what computes: vLLM, or the fake.

``agent.py`` knows binds, leases and epochs, and nothing of models. An ``EngineBackend`` offers one
``Core`` per unit the engine can lead. Both implementations (``vllm_backend.py``,
``fake_backend.py``) pass the same tests.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.protocol.messages import LayoutLimits, Mode, Work

Lease = Mapping[int, Sequence[int]]
"""Member engine -> physical block ids, all of one length (see ``messages.Commit``)."""


def plain_lease(lease: Lease) -> dict[int, list[int]]:
    """Return a lease as messages carry it."""
    return {engine: list(blocks) for engine, blocks in lease.items()}


class CoreOutputs(msgspec.Struct, frozen=True):
    """What one step produced: an encoded ``EngineCoreOutputs`` for one front end."""

    client_index: int
    frames: Sequence[Any]
    """Buffers to send as one multipart message."""


class CoreLoad(msgspec.Struct, frozen=True):
    """What a unit holds right now."""

    running: int
    waiting: int
    free_blocks: int


class EndedSteps(msgspec.Struct, frozen=True):
    """What a collected step computed, or several that followed each other."""

    mode: Mode
    work: Work
    """``steps`` of one kind, with or without prompts; ``seconds`` is left to the caller."""


class Core(Protocol):
    """One unit's scheduler and its way to the runners: what the design calls a unit.

    No method blocks on a step. A *safe point* is any moment outside ``dispatch``.
    """

    unit: Unit
    shift: Shift
    """Chooses the mode of the next steps."""

    def add(self, request_id: str, frames: Sequence[Any]) -> None:
        """Queue a request from vLLM's raw ``ADD`` payload frames.

        Raises:
            ValueError: the request is not valid for this core; it holds no state afterwards.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored. Frees their blocks."""

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """Forget requests; return the tokens each has generated. Unknown ids are left out.

        Only while no step is in flight: the result of a step would be lost.
        """

    def collect(self) -> bool:
        """Collect every finished step; return whether there was one."""

    def dispatch(self) -> bool:
        """Dispatch the next step if there is room and something to do; return whether one was."""

    def dispatch_ahead(self) -> bool:
        """Dispatch the next step in place of one that has ended and is not collected yet.

        Only where what that one's outcome leads to takes so long that the device would wait for it.
        Returns whether a step was dispatched.
        """

    def pause(self) -> None:
        """Take note that nothing is dispatched for now, while a step is in flight."""

    def take_outputs(self) -> list[CoreOutputs]:
        """Return and clear what collected steps produced."""

    def take_steps(self) -> list[EndedSteps]:
        """Return and clear what the collected steps computed, oldest first."""

    def take_finished(self) -> list[str]:
        """Return and clear the ids of requests that ended, for any reason but ``abort``."""

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

    # --- group cores only ---

    def bind(self, epoch: int, lease: Lease, seed: int) -> None:
        """Tell the members' runners to start the group (they must be attached) and open the lease.

        A core that holds paused requests keeps the blocks it already has and adds ``lease``.
        """

    def grow(self, lease: Lease) -> None:
        """Open more virtual blocks. Takes effect before the next step."""

    def release(self, epoch: int) -> Lease:
        """Send the members' runners back after the steps in flight; close every free virtual block.

        Returns the physical blocks that come back: all of them when no request is left, else those
        that no paused request holds.
        """

    def shrink(self, keep: int) -> Lease:
        """Close free virtual blocks until ``keep`` are left open; return the physical blocks."""

    @property
    def blocks_wanted(self) -> int:
        """Virtual blocks that the queued and running requests lack for the next steps (0: none)."""

    @property
    def blocks_ahead(self) -> int:
        """Blocks that the requests lack to reach the bounds of their outputs.

        Those that only the model's length bounds count none: few come near it.
        """

    @property
    def lease_blocks(self) -> int:
        """Virtual blocks that are open or held by requests."""

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant of the core's own books."""


class EngineBackend(Protocol):
    """One engine: its cores, its block pool as a lender, its runner's mailbox."""

    engine: int
    num_blocks: int
    ready_response: bytes

    @property
    def layouts(self) -> Sequence[LayoutLimits]:
        """Limits of every layout this engine leads a group of, its own included."""

    def core(self, group: Unit) -> Core:
        """Return the core of a group this engine leads (its own single group included)."""

    @property
    def cores(self) -> Mapping[Unit, Core]:
        """Every core of this engine, by group."""

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """Take up to ``blocks`` free blocks out of this engine's pool and return their ids.

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

    def attach(self, group: Unit, epoch: int, *, interleaves: bool = False) -> None:
        """Tell this engine's runner to leave its own queue for the group's, after what it holds.

        ``interleaves``: to read both in turn from then on.
        """

    def await_detach(self, epoch: int) -> None:
        """Tell this engine's runner to do what follows only after the group's last step.

        Only while it interleaves: otherwise it does so anyway.
        """

    def form(self, group: Unit, generation: int) -> "Future[str]":
        """Have this engine's runner make its part of a group anew; collective over its members.

        A core of the group is gone from then on. Yields why it could not be made, or "": then the
        engine goes on without the group.

        Args:
            group: one this engine belongs to, not bound and without a lease.
            generation: how often it was made before; the same for all members.
        """

    def start(self, group: Unit) -> "Future[Any]":
        """Start the group's core, if this engine leads it; every member has formed the group.

        Collective over the members. Done when this engine's runner does what it is told again.
        """

    def utility(self, frames: Sequence[Any], *, answer: bool) -> CoreOutputs | None:
        """Run a vLLM utility call; return its encoded answer if ``answer``."""

    def pollables(self) -> Sequence[Any]:
        """Return ZMQ sockets that become readable when a step may have finished."""

    def on_readable(self) -> None:
        """Read what the pollables hold, without blocking.

        Raises:
            RunnerDied: a runner reported an error it cannot go on from.
        """

    def next_wakeup(self) -> float | None:
        """Return seconds until something is due without a message (the fake's timers), or None."""

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant of the pool and of every core."""

    def close(self) -> None:
        """Free the backend's resources."""


class RunnerDied(RuntimeError):
    """A runner met an error it cannot go on from; the message is its one-line cause."""
