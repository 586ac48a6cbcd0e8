"""An engine's part in the protocol: one thread that serves its units and follows the controller.

The agent owns no model. It feeds an ``EngineBackend`` (``interface``) and publishes what its cores
produce. Modules beside this one hold what it does for a switch, for leases and for steps; this one
holds the order of these within a turn, on which their correctness depends.
"""

from collections.abc import Sequence

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.engine.agent.binding import Binding, State
from shoal.runtime.engine.agent.carrying import Carrying
from shoal.runtime.engine.agent.copying_ahead import CopyingAhead
from shoal.runtime.engine.agent.forming import POLL_SECONDS, Forming
from shoal.runtime.engine.agent.garbage import Garbage, collect_only_young
from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.engine.agent.lending import Lending
from shoal.runtime.engine.agent.moving import Moving
from shoal.runtime.engine.agent.resizing import Resizing
from shoal.runtime.engine.agent.sliced_work import SlicedWork
from shoal.runtime.engine.agent.stepping import Stepping
from shoal.runtime.engine.agent.watchdog import HungStepError, StepWatch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.compilations import compiled_lately, note_file
from shoal.runtime.protocol.transport import AgentTransport, Frames, ZmqAgentTransport


class Agent:
    """One engine's loop.

    Args:
        backend: the engine's cores and runner.
        transport: the way to the controller and the front ends.
        clock: seconds; injected so that tests own it.
        startup: what the engine's start took, reported once.
        watch: judges steps that take long; None: no step is judged.
        garbage: collects the process's garbage; None: Python does.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        *,
        clock: Clock = monotonic,
        startup: m.Startup | None = None,
        watch: StepWatch | None = None,
        garbage: Garbage | None = None,
    ) -> None:
        self.engine = backend.engine
        self._backend = backend
        self._transport = transport
        self._watch = watch or StepWatch(None)
        self._garbage = garbage
        self.binding = Binding(backend, transport, self._watch, clock)
        """Where the engine stands."""
        self._stepping = Stepping(backend, transport, self._watch, clock)
        work = SlicedWork(clock)
        self._ahead = CopyingAhead(backend, transport, work)
        self._carrying = Carrying(
            backend, transport, self.binding, self._stepping, self._ahead, work, clock
        )
        self._lending = Lending(backend, transport, self.binding, self._carrying, work, clock)
        self._moving = Moving(backend, transport)
        self._forming = Forming(backend, transport)
        self._resizing = Resizing(backend, transport, self.binding, self._watch, clock)
        # The first turn waits for nothing: the controller starts no request before the first load.
        self._busy = True
        self._announce(startup or m.Startup())

    @property
    def active(self) -> list[Core]:
        """The cores that may dispatch steps now.

        A core that serves may not while its steps in flight have to be collected first.
        """
        return [
            core
            for core in self.binding.serving
            if not any(part.holds(core) for part in (self._moving, self._carrying, self._resizing))
        ]

    @property
    def _is_idle(self) -> bool:
        return not any(core.num_requests for core in self._backend.cores.values())

    def run(self) -> None:
        """Serve until the process is ended.

        Raises:
            Exception: the backend cannot go on; the controller has been told why.
        """
        try:
            while True:
                self.turn()
        finally:
            self._backend.close()
            self._transport.close()

    def turn(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds, then do once everything that is due.

        Raises:
            Exception: see ``run``.
        """
        try:
            eager = self.binding.awaits_answer or self._carrying.is_under_way
            self._transport.wait(self._patience(timeout), eager=eager)
            for frames in self._transport.receive():
                self._handle(m.decode_to_engine(frames[0]), frames[1:])
            self._hold_garbage()
            if self._carrying.has_come:
                self._carrying.begin(self.active)
            self._backend.on_readable()
            self._tend_forming()
            self._ahead.tend()
            if self._carrying.tend():
                self._lending.ask_again()
            self._busy = self._stepping.drive(self.active, judges=not self._forming.busy)
            self._busy |= self._moving.take_out()
            self._busy |= self._carrying.take_out()
            self._carrying.go_on()
            self._busy |= self._resizing.tend()
            self.binding.reach_safe_point()
            self._lending.tend()
            self._stepping.publish()
            self._hold_garbage()
            if self._garbage is not None:
                self._garbage.tend(idle=self._is_idle)
        except Exception as error:
            cause = m.DeathCause.HUNG if isinstance(error, HungStepError) else m.DeathCause.FAILED
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._transport.to_controller(m.EngineFailed(self.engine, reason, cause))
            raise

    def _hold_garbage(self) -> None:
        if self._garbage is not None:
            self._garbage.hold(hurries=self._carrying.keeps_waiting)

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
                backend.shares,
                backend.tier_blocks,
            )
        )

    def _handle(self, message: m.ToEngine, frames: Frames) -> None:
        match message:
            case m.AddRequest():
                self._add(message, frames)
            case m.AbortRequests(unit, request_ids):
                self._carrying.forget(unit, request_ids)
                if unit in self._backend.cores:  # a group that is formed anew has no core
                    self._backend.cores[unit].abort(request_ids)
            case m.Try():
                self._stepping.trials.take(message)
            case m.MoveOut():
                self._moving.begin(message)
            case m.Pin() | m.Reserve() | m.CopyAhead() | m.Settle() | m.Unpin():
                self._ahead.take(message)
            case m.Expect() | m.Export() | m.Allot() | m.Import() | m.Drop() | m.Keep():
                self._carrying.take(message)
            case m.Prepare():
                self.binding.prepare(message)
            case m.Commit():
                if self.binding.commit(message):
                    self._lending.begin()
            case m.AbortBind():
                self.binding.abort(message)
            case m.Release():
                self.binding.release(message)
            case m.KeepBound():
                self.binding.keep(message)
            case m.Resume():
                self.binding.resume(message)
            case m.Lend():
                self._lending.lend(message)
            case m.Grow():
                self._lending.grow(message)
            case m.Shrink():
                self._lending.shrink(message)
            case m.TakeBack(blocks):
                self._resizing.take_back(blocks)
            case m.SetShift(thresholds):
                above = dict(thresholds)
                for unit, core in self._backend.cores.items():
                    core.shift.threshold = above.get(unit.layout)
            case m.Utility(call):
                self._utility(frames, call)
            case m.CheckIntegrity(call):
                self._check_integrity(call)
            case m.CloseBlocks() | m.FillWeights() | m.UseWeights() | m.OpenBlocks():
                self._resizing.take(message)
            case m.FormGroup() | m.StartGroup():
                self._forming.take(message, alone=self.binding.state is State.SOLO)
            case m.Ping():
                self._transport.to_controller(m.Pong(self.engine))

    def _add(self, message: m.AddRequest, frames: Frames) -> None:
        self._stepping.count(message.unit)
        try:
            core = self._backend.cores[message.unit]
            core.add(frames, message.tokens, message.patience)
        except ValueError as error:
            self._stepping.refuse(message.unit, message.request_id, frames, error)

    def _utility(self, frames: Sequence[bytes], call: int | None) -> None:
        answer = self._backend.utility(frames)
        if call is not None:
            frames = [bytes(frame) for frame in answer]
            self._transport.to_controller(m.UtilityDone(call, self.engine, frames))

    def _check_integrity(self, call: int) -> None:
        backend = self._backend
        problems = [line for core in backend.cores.values() for line in core.check_integrity()]
        leases = [(unit, core.lease_blocks) for unit, core in backend.groups.items()]
        self._transport.to_controller(
            m.Integrity(call, self.engine, problems, sorted(backend.own.lent), leases)
        )

    # --- what is due --------------------------------------------------------------------------

    def _tend_forming(self) -> None:
        """Follow the forming of a group, behind which the engine's own steps queue up."""
        if self._forming.busy:
            self._watch.expect_delay(self._backend.own.unit)
        formed = self._forming.tend()
        if formed is not None:
            self._stepping.note_formed(formed)

    def next_wakeup(self) -> float | None:
        """Return seconds until the next turn is due without a message; None: it waits for one."""
        return self._patience(None)

    def _patience(self, timeout: float | None) -> float | None:
        """Return how long to wait: not past the next thing that is due without a message."""
        if self._busy:
            return 0.0
        due = (
            timeout,
            POLL_SECONDS if self._forming.busy or self._resizing.busy else None,
            self._backend.next_wakeup(),
            self._stepping.due_in(),
            self._lending.due_in(),
            self._carrying.due_in(),
            self._garbage.due_in() if self._garbage is not None else None,
        )
        return min((seconds for seconds in due if seconds is not None), default=None)


def serve(backend: EngineBackend, config: NodeConfig, incarnation: int, startup: m.Startup) -> None:
    """Serve the controller of a node until it is ended: what an engine's process does.

    Args:
        backend: the engine, ready.
        config: the node.
        incarnation: how often the engine was restarted.
        startup: what the engine's start took.
    """
    transport = ZmqAgentTransport(
        backend.engine,
        Addresses(config.runtime_dir),
        config.api_servers,
        backend.pollables(),
        incarnation=incarnation,
    )
    # A runner takes no step while it writes a recording, so no step may count as hung then.
    timeout = config.step_timeout_seconds if config.recording_dir is None else None

    def compiles(unit: Unit, seconds: float) -> bool:
        files = (note_file(config.runtime_dir, engine) for engine in unit.engines)
        return compiled_lately(files, seconds)

    watch = StepWatch(timeout, compiles)
    collect_only_young()
    Agent(backend, transport, startup=startup, watch=watch, garbage=Garbage(monotonic)).run()
