"""An engine's part in the protocol: one thread that serves its unit and follows the controller.

The agent owns no model. It feeds an ``EngineBackend`` (``interface.py``), publishes what its cores
produce, and keeps the engine's side of binds, releases and leases. Its states:

    SOLO ──Prepare──> PREPARING ──safe point──> PREPARED ──Commit──> BOUND ──Resume──> SOLO
                          └───────AbortBind───────┴──────> SOLO

Under hard preemption the safe point is now; a sequential bind drains the engine's own core first.
A core whose requests are to move pauses until its steps in flight are collected.
A core is *active* when it may dispatch steps: the engine's own in SOLO and PREPARING, and in every
state of a bind that interleaves; the group's when it leads a bound group. Every other core is
paused: steps already in flight are still collected.
"""

import enum
import logging
from collections.abc import Sequence

import msgspec

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.engine.agent.forming import POLL_SECONDS, Forming
from shoal.runtime.engine.agent.interface import (
    Core,
    CoreLoad,
    EndedSteps,
    EngineBackend,
    plain_lease,
)
from shoal.runtime.engine.agent.watchdog import SHORTEST_SECONDS, HungStepError, StepWatch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.transport import AgentTransport, Frames

log = logging.getLogger("shoal.engine")

LEASE_FLOOR = 64
"""Virtual blocks an idle group keeps, so that its next request starts without asking for more."""
IDLE_SECONDS = 1.0
"""How long a group is idle before it gives blocks back: a client that sends one request after the
other should not move its lease every time."""
WATCH_SECONDS = 0.25
"""How often a step in flight is looked at, to see whether it hangs."""
RETRY_SECONDS = 0.05
"""Pause before a group asks again for blocks when the members had none."""


class State(enum.StrEnum):
    """Where the engine stands in a bind."""

    SOLO = "solo"
    PREPARING = "preparing"
    PREPARED = "prepared"
    BOUND = "bound"


class Bind(msgspec.Struct):
    """The bind that this engine is in."""

    epoch: int
    unit: Unit
    blocks_asked: int
    lent: list[int]
    """What this engine lent in ``Prepare``; taken back if the bind is aborted."""
    interleaves: bool = False
    """The engine's own requests go on, in turn with those of the group."""
    releasing: m.Release | None = None
    """A release that waits for the group's requests to be done."""
    released: bool = False


class Growth(msgspec.Struct):
    """What the bound group wants of its members."""

    asked: bool = False
    retry_at: float = 0.0
    idle_since: float | None = None


class Stepping(msgspec.Struct):
    """What the steps of a core computed, and how long they took."""

    work: dict[m.Mode, m.ModeWork] = {}
    since: float | None = None
    """When the oldest step in flight began, as far as its device was not busy before."""

    def see(self, now: float, steps: Sequence[EndedSteps], in_flight: bool) -> None:
        """Add the steps that have just ended.

        Of steps of several kinds or modes that end at once nobody knows what each took: the totals
        alone have them, with an equal part of the time.
        """
        kinds = {(step.mode, step.work.prefill_tokens > 0) for step in steps}
        alike = self.since is not None and len(kinds) == 1
        for mode in {step.mode for step in steps}:
            ended = [step.work for step in steps if step.mode is mode]
            took = 0.0 if self.since is None else (now - self.since) * len(ended) / len(steps)
            self._add(mode, sum(ended, m.Work(seconds=took)), alike)
        if steps or self.since is None or not in_flight:
            self.since = now if in_flight else None

    def _add(self, mode: m.Mode, done: m.Work, alike: bool) -> None:
        before, none = self.work.get(mode, m.ModeWork()), m.Work()
        prompts = done.prefill_tokens > 0
        self.work[mode] = m.ModeWork(
            decoding=before.decoding + (done if alike and not prompts else none),
            prefilling=before.prefilling + (done if alike and prompts else none),
            total=before.total + done,
        )


class Agent:
    """One engine's loop and state machine.

    Args:
        backend: the engine's cores and block pool.
        transport: the way to the controller and the front ends.
        clock: seconds; injected so that tests own it.
        startup: what the engine's start took, reported once.
        watch: judges steps that take long; None: they may.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        *,
        clock: Clock = monotonic,
        startup: m.Startup | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        self.engine = backend.engine
        self.running = True
        self.stale = 0
        """Switch messages dropped because their epoch was over."""
        self._backend = backend
        self._transport = transport
        self._clock = clock
        self._watch = watch
        self._own: Unit = alone(backend.engine)
        self._bind: Bind | None = None
        self._state = State.SOLO
        self._growth = Growth()
        self._epoch = -1
        self._loads: dict[Unit, tuple[CoreLoad, int]] = {}
        self._added: dict[Unit, int] = {}
        self._rejected: dict[Unit, list[str]] = {}
        self._moving: dict[Unit, list[str]] = {}
        self._lends: list[m.Lend] = []
        """Wishes for blocks that wait for the own steps in flight."""
        self._forming = Forming(backend, transport)
        self._stepping: dict[Unit, Stepping] = {group: Stepping() for group in backend.cores}
        # The first turn waits for nothing: the controller starts no request before the first load.
        self._busy = True
        self._announce(startup or m.Startup())

    @property
    def state(self) -> State:
        """Where the engine stands."""
        return self._state

    @property
    def active(self) -> list[Core]:
        """The cores that may dispatch steps now."""
        return [self._backend.core(group) for group in self._serving if not self._is_held(group)]

    @property
    def _serving(self) -> list[Unit]:
        """The groups whose requests this engine's cores serve now."""
        bind, groups = self._bind, []
        if bind is None or bind.interleaves or self._state is State.PREPARING:
            groups.append(self._own)
        if bind is not None and self._state is State.BOUND and not bind.released:
            groups += [bind.unit] if self._leads(bind.unit) else []
        return groups

    @property
    def _awaits_answer(self) -> bool:
        """Whether the controller's next message of a switch is due at once."""
        bind = self._bind
        return self._state is State.PREPARED or (bind is not None and bind.released)

    def _is_held(self, group: Unit) -> bool:
        """Return whether a core pauses until its steps in flight are collected."""
        return group in self._moving or (group == self._own and bool(self._lends))

    def run(self) -> None:
        """Serve until ``Stop``.

        Raises:
            Exception: whatever the backend could not go on from; the controller has been told.
        """
        try:
            while self.running:
                self.turn()
        finally:
            self._backend.close()
            self._transport.close()

    def turn(self, timeout: float | None = None) -> None:
        """Do everything that is due once, after waiting for it at most ``timeout`` seconds.

        Raises:
            Exception: see ``run``.
        """
        try:
            self._transport.wait(self._patience(timeout), eager=self._awaits_answer)
            for frames in self._transport.receive():
                self._handle(m.decode_to_engine(frames[0]), frames[1:])
            self._backend.on_readable()
            self._tend_forming()
            self._drive()
            self._move_out()
            self._lend_interleaved()
            self._reach_safe_point()
            self._tend_lease()
            self._publish()
        except Exception as error:
            self.running = False
            cause = m.DeathCause.HUNG if isinstance(error, HungStepError) else m.DeathCause.FAILED
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._transport.to_controller(m.EngineFailed(self.engine, reason, cause))
            raise

    # --- messages -----------------------------------------------------------------------------

    def _announce(self, startup: m.Startup) -> None:
        backend = self._backend
        self._transport.to_controller(
            m.EngineReady(
                self.engine,
                backend.num_blocks,
                list(backend.layouts),
                backend.ready_response,
                startup,
            )
        )

    def _handle(self, message: m.ToEngine, frames: Frames) -> None:
        match message:
            case m.AddRequest():
                self._add(message, frames)
            case m.AbortRequests(request_ids):
                for core in self._backend.cores.values():
                    core.abort(request_ids)
            case m.MoveOut(group, request_ids):
                self._moving.setdefault(group, []).extend(request_ids)
            case m.Prepare():
                self._prepare(message)
            case m.Commit():
                self._commit(message)
            case m.AbortBind():
                self._abort_bind(message)
            case m.Release():
                self._release(message)
            case m.KeepBound(epoch):
                self._keep_bound(epoch)
            case m.Resume():
                self._resume(message)
            case m.Lend():
                self._lend(message)
            case m.Grow():
                self._grow(message)
            case m.TakeBack(blocks=blocks):
                self._backend.take_back(blocks)
            case m.SetShift(thresholds):
                above = dict(thresholds)
                for unit, core in self._backend.cores.items():
                    core.shift.threshold = above.get(unit.layout)
            case m.Utility(answer):
                self._utility(frames, answer)
            case m.CheckIntegrity(call):
                self._check_integrity(call)
            case m.FormGroup() | m.StartGroup():
                self._forming.take(message, alone=self._state is State.SOLO)
            case m.Ping():
                self._transport.to_controller(m.Pong(self.engine))
            case m.Stop():
                self.running = False

    def _add(self, message: m.AddRequest, frames: Frames) -> None:
        self._added[message.unit] = self._added.get(message.unit, 0) + 1
        try:
            self._backend.core(message.unit).add(message.request_id, frames)
        except ValueError as error:
            log.warning("refused %s: %s", message.request_id, error)
            client = wire.decode_request(frames).client_index
            answer = wire.encode_finish([message.request_id], wire.FinishReason.ERROR)
            self._transport.to_front(client, [answer])
            self._rejected.setdefault(message.unit, []).append(message.request_id)

    def _utility(self, frames: Sequence[bytes], answer: bool) -> None:
        output = self._backend.utility(frames, answer=answer)
        if output is not None:
            self._transport.to_front(output.client_index, output.frames)

    def _tend_forming(self) -> None:
        """See how a group gets on that is formed anew; own steps queue up behind that."""
        if self._forming.busy and self._watch is not None:
            self._watch.expect_delay(self._own)
        group = self._forming.tend()
        if group is not None:
            self._stepping.setdefault(group, Stepping())
            own = self._stepping[self._own]
            own.since = None if own.since is None else self._clock()

    def _check_integrity(self, call: int) -> None:
        backend = self._backend
        leases = [(g, core.lease_blocks) for g, core in backend.cores.items() if g.is_group]
        self._transport.to_controller(
            m.Integrity(call, self.engine, backend.check_integrity(), sorted(backend.lent), leases)
        )

    # --- binds and releases -------------------------------------------------------------------

    def _prepare(self, message: m.Prepare) -> None:
        bind, interleaves = self._bind, message.treatment is m.Treatment.INTERLEAVE
        repeated = bind is not None and bind.epoch == message.epoch
        if bind is not None and repeated and self._state is State.PREPARED:
            # All members of a group take turns, or none does.
            bind.interleaves = interleaves
            return
        waits = repeated and self._state is State.PREPARING
        if not waits and (message.epoch <= self._epoch or self._state is not State.SOLO):
            self.stale += 1
            return
        self._epoch = message.epoch
        blocks = self._spare(message.blocks) if interleaves else message.blocks
        self._bind = Bind(message.epoch, message.unit, blocks, [], interleaves)
        self._state = State.PREPARING
        if interleaves or message.treatment is m.Treatment.HARD:
            self._lend_and_answer(self._bind)

    def _lend_and_answer(self, bind: Bind) -> None:
        began = self._clock()
        bind.lent = self._backend.lend(bind.blocks_asked)
        took = self._clock() - began
        self._state = State.PREPARED
        paused = 0 if bind.interleaves else self._backend.core(self._own).num_requests
        self._transport.to_controller(m.Prepared(bind.epoch, self.engine, bind.lent, paused, took))

    def _commit(self, message: m.Commit) -> None:
        bind = self._current(message.epoch, State.PREPARED)
        if bind is None:
            return
        self._backend.attach(bind.unit, bind.epoch, interleaves=bind.interleaves)
        if self._leads(bind.unit):
            self._backend.core(bind.unit).bind(bind.epoch, message.lease, message.seed)
        self._growth = Growth()
        self._state = State.BOUND
        if self._watch is not None:
            # Behind the steps in flight of its members.
            self._watch.expect_delay(bind.unit)
        self._transport.to_controller(m.Committed(bind.epoch, self.engine))

    def _abort_bind(self, message: m.AbortBind) -> None:
        bind = self._current(message.epoch, State.PREPARING, State.PREPARED)
        if bind is not None:
            self._go_solo(bind, bind.lent)

    def _release(self, message: m.Release) -> None:
        bind = self._current(message.epoch, State.BOUND)
        if bind is None or bind.released:
            return
        bind.releasing = message
        if message.treatment is m.Treatment.HARD:
            self._dissolve(bind)

    def _keep_bound(self, epoch: int) -> None:
        bind = self._current(epoch, State.BOUND)
        if bind is not None and not bind.released:
            bind.releasing = None
            self._transport.to_controller(m.Committed(epoch, self.engine))

    def _dissolve(self, bind: Bind) -> None:
        core = self._backend.core(bind.unit)
        returned = core.release(bind.epoch)
        bind.released = True
        self._transport.to_controller(
            m.Released(bind.epoch, bind.unit, plain_lease(returned), core.num_requests)
        )

    def _resume(self, message: m.Resume) -> None:
        bind = self._current(message.epoch, State.BOUND)
        if bind is not None:
            if bind.interleaves:
                self._backend.await_detach(bind.epoch)
            self._go_solo(bind, message.blocks)

    def _go_solo(self, bind: Bind, blocks: Sequence[int]) -> None:
        self._backend.take_back(blocks)
        self._bind = None
        self._state = State.SOLO
        if self._watch is not None:
            # Behind the group's steps in flight.
            self._watch.expect_delay(self._own)
        resumed = 0 if bind.interleaves else self._backend.core(self._own).num_requests
        self._transport.to_controller(m.Resumed(bind.epoch, self.engine, resumed))

    def _move_out(self) -> None:
        """Take requests out whose core has no step in flight, and let the core go on."""
        for group in list(self._moving):
            core = self._backend.core(group)
            if not core.in_flight:
                tokens = core.withdraw(self._moving.pop(group))
                self._transport.to_controller(m.Moved(self.engine, tokens))
                self._busy = True

    def _reach_safe_point(self) -> None:
        """Finish a sequential bind or release whose last request is done."""
        bind = self._bind
        if bind is None:
            return
        if self._state is State.PREPARING and self._is_idle(self._own):
            self._lend_and_answer(bind)
        elif bind.releasing is not None and not bind.released and self._is_idle(bind.unit):
            self._dissolve(bind)

    def _is_idle(self, group: Unit) -> bool:
        core = self._backend.core(group)
        return not core.num_requests and not core.in_flight

    def _current(self, epoch: int, *states: State) -> Bind | None:
        """Return the bind that a message is about; None, and count it, when it came too late."""
        bind = self._bind
        if bind is not None and bind.epoch == epoch and self._state in states:
            return bind
        self.stale += 1
        return None

    def _leads(self, group: Unit) -> bool:
        return group.leader == self.engine

    # --- leases -------------------------------------------------------------------------------

    def _lend(self, message: m.Lend) -> None:
        bind = self._current(message.epoch, State.BOUND)
        if bind is not None and bind.interleaves:
            self._lends.append(message)
        elif bind is not None:
            self._answer_lend(message, message.blocks, urgent=message.urgent)

    def _answer_lend(self, message: m.Lend, blocks: int, *, urgent: bool) -> None:
        lent = self._backend.lend(blocks, urgent=urgent)
        self._transport.to_controller(m.Lent(message.epoch, self.engine, message.unit, lent))

    def _lend_interleaved(self) -> None:
        """Lend once no step of the engine's own is in flight.

        The runner may take a step of the group before one that was queued earlier here, and such a
        step still writes to the blocks of requests that have ended meanwhile.
        """
        own = self._backend.core(self._own)
        if not self._lends or own.in_flight:
            return
        lends, self._lends = self._lends, []
        for message in lends:
            if self._current(message.epoch, State.BOUND) is not None:
                # If none of its requests can run, neither side could without what is kept for them.
                blocks = self._spare(message.blocks) if own.load.running else message.blocks
                self._answer_lend(message, blocks, urgent=False)
        self._busy = True

    def _spare(self, blocks: int) -> int:
        """Return how many of so many blocks the engine's own requests can do without."""
        own = self._backend.core(self._own)
        return max(0, min(blocks, own.load.free_blocks - own.blocks_ahead))

    def _grow(self, message: m.Grow) -> None:
        """Open what the members lent; an empty lease says that they had nothing to lend."""
        if self._current(message.epoch, State.BOUND) is None:
            return
        self._growth.asked = False
        added = len(message.lease.get(self.engine, ()))
        if added:
            self._backend.core(message.unit).grow(message.lease)
        else:
            self._growth.retry_at = self._clock() + RETRY_SECONDS

    def _tend_lease(self) -> None:
        """Ask for blocks that the active group lacks; give back what idle or paused ones hold."""
        active = self.active
        for group, core in self._backend.cores.items():
            if not group.is_group:
                continue
            if core in active:
                self._tend_active(group, core)
            elif core.lease_blocks and not core.in_flight:
                self._return(group, core, keep=0)

    def _tend_active(self, group: Unit, core: Core) -> None:
        growth, now = self._growth, self._clock()
        if core.num_requests or core.in_flight:
            growth.idle_since = None
            self._ask(group, core, now)
            return
        if growth.idle_since is None:
            growth.idle_since = now
        if now >= growth.idle_since + IDLE_SECONDS and core.lease_blocks > self._floor:
            self._return(group, core, keep=self._floor)

    @property
    def _floor(self) -> int:
        """Virtual blocks that the idle group keeps: none that requests beside it may want."""
        return 0 if self._bind is not None and self._bind.interleaves else LEASE_FLOOR

    def _ask(self, group: Unit, core: Core, now: float) -> None:
        growth, bind = self._growth, self._bind
        if bind is None or growth.asked or now < growth.retry_at:
            return
        wanted = core.blocks_wanted
        if wanted > 0:
            # With nothing running no block of the group will come free by itself.
            urgent = not core.in_flight and not core.load.running
            growth.asked = True
            self._transport.to_controller(m.NeedBlocks(bind.epoch, group, wanted, urgent))

    def _return(self, group: Unit, core: Core, *, keep: int) -> None:
        returned = plain_lease(core.shrink(keep))
        if any(returned.values()):
            self._transport.to_controller(m.Returning(self._epoch, group, returned))

    # --- steps --------------------------------------------------------------------------------

    def _drive(self) -> None:
        active, self._busy = self.active, False
        for core in self._backend.cores.values():
            if core in active:
                self._busy |= core.dispatch_ahead()
            self._busy |= core.collect()
            # Before the next step is scheduled, which takes as long as many of them do.
            for output in core.take_outputs():
                self._transport.to_front(output.client_index, output.frames)
        for core in self._backend.cores.values():
            if core in active:
                self._busy |= core.dispatch()
            elif core.in_flight:
                core.pause()
        now = self._clock()
        if self._watch is not None:
            self._watch.turn(now)
        for group, core in self._backend.cores.items():
            stepping, steps = self._stepping[group], core.take_steps()
            if self._watch is not None and not self._forming.busy:
                self._judge(self._watch, core, steps, now)
            stepping.see(now, steps, bool(core.in_flight))

    def _judge(self, watch: StepWatch, core: Core, ended: list[EndedSteps], now: float) -> None:
        since = self._stepping[core.unit].since
        if since is None:
            return
        if self._bind is not None and self._bind.interleaves:
            watch.expect_delay(core.unit)
        watch.see(core.unit, ended, (now - since) / max(1, len(ended)))
        # What has ended since was the oldest.
        took = 0.0 if ended else now - max(since, watch.awake_since)
        if took > SHORTEST_SECONDS and (oldest := core.oldest_step) is not None:
            watch.check(core.unit, *oldest, took)

    def _publish(self) -> None:
        for group, core in self._backend.cores.items():
            finished = core.take_finished() + self._rejected.pop(group, [])
            load, added = core.load, self._added.get(group, 0)
            if finished or (load, added) != self._loads.get(group):
                self._loads[group] = (load, added)
                self._transport.to_controller(
                    m.Load(
                        engine=self.engine,
                        unit=group,
                        running=load.running,
                        waiting=load.waiting,
                        free_blocks=load.free_blocks,
                        added=added,
                        finished=finished,
                        work=self._stepping[group].work,
                    )
                )

    def next_wakeup(self) -> float | None:
        """Return seconds until the next turn is due if no message comes; None: there is none."""
        return self._patience(None)

    def _patience(self, timeout: float | None) -> float | None:
        """Return how long to wait: not past the next thing that is due without a message."""
        if self._busy:
            return 0.0
        if self._forming.busy:
            timeout = POLL_SECONDS if timeout is None else min(timeout, POLL_SECONDS)
        now, due = self._clock(), [timeout, self._backend.next_wakeup()]
        if self._watch is not None and any(core.in_flight for core in self._backend.cores.values()):
            due.append(WATCH_SECONDS)
        growth, core = self._growth, next((c for c in self.active if c.unit.is_group), None)
        if core is not None:
            if core.num_requests and not growth.asked and growth.retry_at > now:
                due.append(growth.retry_at - now)
            if growth.idle_since is not None and core.lease_blocks > self._floor:
                due.append(max(0.0, growth.idle_since + IDLE_SECONDS - now))
        return min((seconds for seconds in due if seconds is not None), default=None)
