"""The steps of an engine's cores: driven, judged, and told to the controller."""

import logging
from collections.abc import Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.engine.agent.results import CoreLoad, EndedSteps
from shoal.runtime.engine.agent.trials import Trials
from shoal.runtime.engine.agent.watchdog import SHORTEST_SECONDS, StepWatch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.transport import AgentTransport, Frames

log = logging.getLogger("shoal.engine")

WATCH_SECONDS = 0.25
"""Time between two looks whether a step in flight hangs."""


class Account(msgspec.Struct):
    """What became of one unit's requests and steps."""

    work: dict[m.Mode, m.ModeWork] = {}
    """What its steps computed, and how long they took."""
    since: float | None = None
    """When the oldest step in flight began, if its device was free then; None: no step is."""
    ended: list[EndedSteps] = []
    """Steps that were collected and are not in ``work`` yet."""
    steps: int = 0
    """How many steps have ended."""
    added: int = 0
    """Requests that were sent to it."""
    finished: list[str] = []
    """Requests that have ended, of which the controller has not been told."""
    reported: tuple[CoreLoad, int] | None = None
    """What the controller was told last: the unit's load, and ``added``."""

    def see(
        self, now: float, steps: Sequence[EndedSteps], in_flight: bool, *, judges: bool
    ) -> None:
        """Add the steps that have just ended.

        If steps of several kinds or modes end at once, nobody knows how long each took. Then only
        the totals include them, each with an equal part of the time. So it is with steps whose
        times say nothing of them (``judges``).
        """
        kinds = {(step.mode, step.work.prefill_tokens > 0) for step in steps}
        alike = judges and self.since is not None and len(kinds) == 1
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


class Stepping:
    """Drives the cores of an engine and keeps the accounts of their units.

    Args:
        backend: the engine.
        transport: the way to the controller and the front ends.
        watch: judges the steps in flight.
        clock: seconds.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        watch: StepWatch,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._watch = watch
        self._clock = clock
        self._accounts = {unit: Account() for unit in backend.cores}
        self.trials = Trials(backend, transport)
        """Made-up requests among those that the cores compute."""

    def ended(self, unit: Unit) -> int:
        """Return how many steps of a unit have ended."""
        return self._accounts[unit].steps

    def count(self, unit: Unit) -> None:
        """Take note of a request that was sent to a unit."""
        self._accounts[unit].added += 1

    def refuse(self, unit: Unit, request_id: str, frames: Frames, error: ValueError) -> None:
        """End a request that is not valid for its unit's core.

        Args:
            unit: the core's.
            request_id: the request.
            frames: its payload.
            error: says why.
        """
        log.warning("refused %s: %s", request_id, error)
        client = wire.decode_request(frames).client_index
        answer = wire.encode_finish([request_id], wire.FinishReason.ERROR)
        self._transport.to_front(client, [answer])
        self._accounts[unit].finished.append(request_id)

    def note_formed(self, unit: Unit) -> None:
        """Take note that a group was formed: own steps in flight have waited for that."""
        self._accounts.setdefault(unit, Account())
        self._begin_now(self._backend.own.unit)

    def expect_copy(self, unit: Unit) -> None:
        """Take note that a core's next steps come after a copy of KV."""
        self._watch.expect_delay(unit)

    def note_copied(self, unit: Unit) -> None:
        """Take note that a copy of KV has ended: a core's steps in flight have waited for it."""
        self._begin_now(unit)

    def _begin_now(self, unit: Unit) -> None:
        account = self._accounts[unit]
        account.since = None if account.since is None else self._clock()

    def drive(self, active: Sequence[Core], *, judges: bool) -> bool:
        """Collect the steps that have ended and dispatch the next; return whether there were any.

        Args:
            active: the cores that may dispatch steps now.
            judges: whether the time that steps take now says anything about them.

        Raises:
            HungStepError: a step takes too long.
        """
        cores, busy = self._backend.cores, False
        for unit, core in cores.items():
            if core in active:
                busy |= core.dispatch_ahead()
            busy |= self._collect(core, self._accounts[unit])
        for core in cores.values():
            if core in active:
                busy |= core.dispatch()
            elif core.in_flight:
                core.pause()
        now = self._clock()
        self._watch.turn(now)
        for unit, core in cores.items():
            account = self._accounts[unit]
            if judges and self._watch.judges and account.since is not None:
                self._judge(core, account.ended, account.since, now)
            account.see(now, account.ended, bool(core.in_flight), judges=judges)
            account.ended = []
        return busy

    def _collect(self, core: Core, account: Account) -> bool:
        collected = core.collect()
        if collected is None:
            return False
        account.ended += collected.steps
        account.steps += len(collected.steps)
        # Of a step without outputs vLLM sends its statistics to the first front end.
        of_trial = self.trials.running
        account.finished += self.trials.without_own(collected.finished)
        # Sent before the next step is scheduled, because that can take as long as a step itself.
        for output in collected.outputs:
            if of_trial or output.client_index == wire.NOBODY:
                continue
            self._transport.to_front(output.client_index, output.frames)
        return True

    def _judge(self, core: Core, ended: Sequence[EndedSteps], since: float, now: float) -> None:
        watch = self._watch
        watch.see(core.unit, ended, (now - since) / max(1, len(ended)))
        # If steps have ended, they were the oldest, and the next one has only just begun.
        took = 0.0 if ended else now - max(since, watch.awake_since)
        if took > SHORTEST_SECONDS and (oldest := core.oldest_step) is not None:
            watch.check(core.unit, *oldest, took)

    def publish(self) -> None:
        """Tell the controller of every unit whose load has changed or whose requests have ended."""
        for unit, core in self._backend.cores.items():
            account = self._accounts[unit]
            load, added = core.load, account.added
            if account.finished or (load, added) != account.reported:
                account.reported = (load, added)
                finished, account.finished = account.finished, []
                self._transport.to_controller(
                    m.Load(
                        engine=self._backend.engine,
                        unit=unit,
                        running=load.running,
                        waiting=load.waiting,
                        free_blocks=load.free_blocks,
                        added=added,
                        finished=finished,
                        work=account.work,
                        begun=load.begun,
                    )
                )

        self.trials.tell()

    def due_in(self) -> float | None:
        """Return seconds until the next look at steps in flight; None: there is none to look at."""
        watched = self._watch.judges and any(c.in_flight for c in self._backend.cores.values())
        return WATCH_SECONDS if watched else None
