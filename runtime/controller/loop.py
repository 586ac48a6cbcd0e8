"""The controller's loop: it takes messages, asks the policy and sends what follows.

Three kinds of messages arrive: requests in vLLM's format from the front ends, calls from front ends
and the supervisor, and the engines' reports. After each batch the loop asks the policy once.
"""

import logging
import time
from concurrent.futures import Executor
from dataclasses import replace

import msgspec

from shoal.policies.lane import lane_of
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.config import BACKGROUND_PRIORITY, NodeConfig
from shoal.runtime.controller.adviser import Adviser
from shoal.runtime.controller.balancing import Balancing
from shoal.runtime.controller.books.books import open_books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.carry_book import CarryStage
from shoal.runtime.controller.books.demand import NO_NEWS, Demand, News
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import continued
from shoal.runtime.controller.calls import Calls
from shoal.runtime.controller.failures.losses import Losses
from shoal.runtime.controller.failures.migration import Migration
from shoal.runtime.controller.failures.outage import Outage
from shoal.runtime.controller.failures.pulse import Pulse
from shoal.runtime.controller.fitting import Fitting
from shoal.runtime.controller.handovers import Handovers
from shoal.runtime.controller.operations import Operations
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.controller.requests.background import Background
from shoal.runtime.controller.requests.closing import Closing
from shoal.runtime.controller.requests.dispatcher import Dispatcher
from shoal.runtime.controller.requests.pauses import Pauses
from shoal.runtime.controller.share_levels import ShareLevels
from shoal.runtime.controller.studies import Studies
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.controller.switching.shift_threshold import Shifting
from shoal.runtime.controller.utility_calls import UtilityCalls
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.transport import Arrival, Channel, ControllerTransport

log = logging.getLogger("shoal.controller")

REVIEW_SECONDS = 0.5
"""How often a policy that decides the layout is asked while nothing arrives; it may act on that.
Background requests that wait may start then, too."""
FINDINGS_SECONDS = 0.01
"""How often the loop looks whether a study of the policy has ended (``Studies``)."""


class Controller:
    """One node's controller.

    Args:
        config: the node.
        transport: carries messages to and from all other processes.
        clock: monotonic seconds; injected so that tests control it.
        wall: seconds since the epoch, for people to read.
        thread: does long work of the policy beside the loop (``Studies``); None: the loop does it.

    Raises:
        UnknownPolicyError: ``config.policy`` names no policy.
        ShiftThresholdError: ``config.shift_threshold`` needs a cost model.
    """

    def __init__(
        self,
        config: NodeConfig,
        transport: ControllerTransport,
        *,
        clock: Clock = monotonic,
        wall: Clock = time.time,
        thread: Executor | None = None,
    ) -> None:
        env = Environment(config, transport, clock, wall)
        self.books = books = open_books(env)
        self._config = config
        self._transport = transport
        self._clock = clock
        self._decided_at = clock()
        self._demand = Demand(clock())
        self._capacity = Capacity(config, books)
        self._shifting = Shifting(env, books.engines)
        self._admission = Admission(env, books, self._capacity)
        self._closing = Closing(env, books, self._admission)
        self._carries = Carries(env, books, self._capacity)
        self._pauses = Pauses(env, books, self._carries)
        self._balancing = Balancing(env, books, self._capacity, self._carries)
        self._handovers = Handovers(env, books, self._capacity, self._carries)
        self._dispatcher = Dispatcher(env, books, self._demand)
        self._background = Background(env, books, self._capacity)
        self._pulse = Pulse(env, books.engines)
        self._outage = Outage(env, books, self._admission)
        self._migration = Migration(env, books, self._admission)
        self._utility_calls = UtilityCalls(env, books)
        self._operations = Operations(
            env,
            books,
            self._capacity,
            self._carries,
            Losses(env, books, self._migration, self._carries),
            greet=self._shifting.greet,
            give_up=self._admission.give_up_unholdable,
            share_followers=(self._capacity.costs.have_level, self._shifting.have_level),
        )
        self.switches = self._operations.switches.past
        self.memory_changes = self._operations.memory.past
        self._share_levels = ShareLevels(
            clock, self._capacity, self._shifting, self._operations.memory
        )
        self._fitting = Fitting(env, books, self._capacity, self._operations)
        self._adviser = Adviser(
            config.policy,
            books.statistics,
            clock,
            Studies(thread, books.statistics.policy_errors.add),
            followers=(
                self._shifting.follow,
                self._capacity.follow,
                lambda _: self._admission.give_up_unholdable(),
            ),
        )
        parts = self._capacity, self._adviser, self._shifting, self._operations, self._fitting
        self._calls = Calls(env, books, *parts)

    # --- loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the process ends."""
        try:
            while True:
                self.turn()
        finally:
            self._transport.close()

    def turn(self, timeout: float | None = None) -> None:
        """Wait for at most ``timeout`` seconds, then do once all that is due."""
        switch = self._operations.switches.running
        self._transport.wait(self._patience(timeout), eager=switch is not None)
        began = self._clock()
        self._do_what_is_due()
        self.books.statistics.turns.observe(self._clock() - began)

    def _do_what_is_due(self) -> None:
        if self._take_arrivals():
            return
        for engine, reason in self._pulse.check():
            self._operations.lose([engine], reason, m.DeathCause.SILENT)
        self._operations.tick()
        self._utility_calls.tick()
        self._migration.forget_finished()
        self._admission.expire()
        self._outage.end_waiting()
        self._closing.hand_back()
        if self.books.engines.started:
            self._fitting.tick()
        started = self._decide() if self._may_decide else 0
        self._admission.hold_limits(started)

    @property
    def _may_decide(self) -> bool:
        return self.books.engines.started and not self._fitting.running

    def _take_arrivals(self) -> bool:
        """Take all arrivals; return whether the running switch took all of them and awaits more.

        Such answers make nothing else due, and other work now would only delay the next answer. The
        same is so when one source of requests has answered and another one is about to.
        """
        arrivals, switch = self._transport.receive(), self._operations.switches.running
        answers = 0 if switch is None else switch.answers
        exporting = self._exporting
        for arrival in arrivals:
            self._take(arrival)
        if 0 < self._exporting < exporting:
            return True  # the books wait as well
        self._carries.before()
        if switch is None or switch.done or not arrivals:
            return False
        return switch.answers - answers == len(arrivals)

    @property
    def _exporting(self) -> int:
        """How many carries wait for their sources, which finish their last steps."""
        return sum(carry.stage is CarryStage.EXPORTING for carry in self.books.carries)

    def next_wakeup(self) -> float | None:
        """Return seconds until the next turn is due if no message comes; None: no turn is due."""
        return self._patience(None)

    def _patience(self, timeout: float | None) -> float | None:
        due = [
            self._operations.deadline,
            self._admission.deadline,
            self._closing.deadline,
            self._outage.deadline,
            self._pauses.deadline,
            self._pulse.deadline,
            self._fitting.deadline,
            self._balancing.deadline if self._operations.can_switch else None,
        ]
        now = self._clock()
        reviews = self._adviser.policy.decides_layout or self.books.requests.pool.background
        if reviews and self._may_decide:
            due.append(self._decided_at + REVIEW_SECONDS)
        if self._adviser.is_studying:
            due.append(now + FINDINGS_SECONDS)
        waits = [timeout, *(max(0.0, at - now) for at in due if at is not None)]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _take(self, arrival: Arrival) -> None:
        try:
            if arrival.channel is not Channel.ENGINE:
                self._carries.before()
            match arrival.channel:
                case Channel.ENGINE if self._operations.rejoin.is_current(arrival):
                    report = m.decode_to_controller(arrival.frames[0])
                    self._carries.before(report)
                    self._take_report(report)
                case Channel.ENGINE:
                    pass
                case Channel.CONTROL:
                    self._take_control(arrival.peer, m.decode_control(arrival.frames[0]))
                case Channel.FRONT:
                    self._take_request(arrival.frames[0], arrival.frames[1:])
        except msgspec.DecodeError as error:
            log.error("dropped a malformed message from %s: %s", arrival.peer, error)

    # --- front ends and the supervisor --------------------------------------------------------

    def _take_request(self, kind: bytes, frames: list[bytes]) -> None:
        if kind == wire.RequestType.ADD.value:
            request = self._admission.add(frames)
            if request is not None and request.priority < BACKGROUND_PRIORITY:
                self._demand.arrive(self._clock(), request)
        elif kind == wire.RequestType.ABORT.value:
            self._abort(wire.decode_abort(frames))
        elif kind == wire.RequestType.UNANSWERED.value:
            self._abort(wire.decode_abort(frames), m.Outcome.UNAVAILABLE)
        elif kind == wire.RequestType.UTILITY.value:
            self._utility_calls.take(frames)
        else:
            log.error("dropped a front end's message of unknown type %r", kind)

    def _abort(self, request_ids: list[str], outcome: m.Outcome = m.Outcome.ABORTED) -> None:
        requests = self.books.requests
        self._demand.end({id_: requests.generated(id_) for id_ in request_ids if id_ in requests})
        self._admission.abort(request_ids, outcome)

    def _take_control(self, peer: str, message: m.ToControllerControl) -> None:
        match message:
            case m.Received():
                self._migration.received(message)
            case m.GoesOn(request_ids):
                self._migration.clear(request_ids)
            case m.Stopped(request_ids, outcome):
                self._abort(request_ids, outcome)
            case m.CountRefused(outcome):
                self.books.statistics.requests.add(outcome)
            case m.EngineDied(engine, reason, cause):
                if self._operations.rejoin.died(message):
                    self._operations.lose([engine], reason, cause)
            case m.EngineStarting():
                for arrival in self._operations.rejoin.restarted(message):
                    self._take(arrival)
            case m.EndNode(seconds):
                self._closing.begin(seconds)
            case _:
                self._calls.take(peer, message)

    # --- engines' reports ---------------------------------------------------------------------

    def _take_report(self, message: m.ToController) -> None:
        if self._sender(message) in self.books.engines.in_state(EngineState.DEAD):
            return
        match message:
            case m.Load():
                self._take_load(message)
            case _ if isinstance(message, m.SwitchAnswer):
                self._take_answer(message)
            case m.NeedBlocks():
                self._count_unless(taken=self.books.leases.need(message))
            case m.Lent():
                self.books.leases.lent(message)
            case m.Returning():
                self.books.leases.returning(message)
            case m.Integrity():
                self._operations.audited(message)
            case m.Moved():
                self._take_moved(message)
            case _ if isinstance(message, m.AheadAnswer):
                self._count_unless(taken=self._carries.copied_ahead(message))
            case m.Leaving():
                self._count_unless(taken=self._carries.announced(message))
            case m.Exported():
                self._count_unless(taken=self._carries.exported(message))
            case m.Imported():
                self._count_unless(taken=self._carries.imported(message))
            case m.EngineReady() if self.books.engines.started:
                self._operations.rejoin.ready(message)
            case m.EngineReady():
                self._take_ready(message)
            case m.Tried():
                self._count_unless(taken=self._fitting.tried(message))
            case m.Formed():
                self._operations.rejoin.formed(message)
            case _ if isinstance(message, m.MemoryAnswer):
                self._count_unless(taken=self._operations.memory.handle(message))
            case m.EngineFailed(engine, error, cause):
                self._operations.lose([engine], error, cause)
            case m.UtilityDone():
                self._count_unless(taken=self._utility_calls.answered(message))
            case m.Pong(engine):
                self._pulse.feel(engine)

    @staticmethod
    def _sender(message: m.ToController) -> int:
        if isinstance(message, m.Released | m.NeedBlocks | m.Returning):
            return message.unit.leader
        return message.engine

    def _take_ready(self, message: m.EngineReady) -> None:
        self.books.engines.serve(message)
        self._shifting.greet(message.engine)
        if self.books.engines.started:
            self._capacity.costs.see_graphs()
            self._greet_fronts()

    def _greet_fronts(self) -> None:
        ready = [engine.ready for engine in self.books.engines if engine.ready is not None]
        greeting = wire.merge_ready_responses(
            [answer.ready_response for answer in ready],
            max_model_len=self._capacity.longest,
            num_blocks=sum(answer.num_blocks for answer in ready),
        )
        for index in range(self._config.api_servers):
            self._transport.greet_front(index, greeting)

    def _take_load(self, load: m.Load) -> None:
        requests = self.books.requests
        core = requests.core(load.unit)
        if self._fitting.running:
            self._fitting.see(core, load)
        else:
            self._capacity.observe(core, load)
        ended = requests.report(load)
        outputs = core.outputs
        self._capacity.see_lengths(
            [
                (one.seen.prompt_tokens, outputs[one.id], one.seen.output_limit)
                for one in ended
                if one.id in outputs
            ]
        )
        self._demand.end({request.id: outputs.get(request.id, 0) for request in ended})
        for request in ended:
            self.books.statistics.left(request, m.Outcome.FINISHED)
            self._migration.finished(request, load.engine)

    def _take_moved(self, message: m.Moved) -> None:
        """Put requests that a core has given back in their old place in the pool."""
        for request_id, tokens in message.tokens.items():
            request = self.books.requests.remove(request_id, led_by=message.engine)
            if request is not None:
                self._admission.readmit(continued(request, tokens, self._clock()))
                self.books.statistics.moved.add()

    def _take_answer(self, message: m.SwitchAnswer) -> None:
        if isinstance(message, m.Resumed) and self.books.engines.hear(message.engine):
            log.warning("engine %d answers again", message.engine)
        self._count_unless(taken=self._operations.switches.handle(message))

    def _count_unless(self, *, taken: bool) -> None:
        """Count a message as stale unless something was waiting for it."""
        if not taken:
            self.books.statistics.stale.add()

    # --- decisions ----------------------------------------------------------------------------

    def _decide(self) -> int:
        """Ask the policy and carry out its plan; an invalid plan changes nothing.

        Returns:
            The number of requests that have left the pool for a unit.
        """
        self._decided_at = self._clock()
        switches = self._operations.switches
        switching = switches.running is not None
        policy = self._adviser.policy
        self._pauses.end_long_ones(
            manual=not policy.decides_layout,
            parks=policy.parks,
            may_begin=self._operations.is_idle,
        )
        if switching and not len(self.books.requests.pool):
            return 0  # there is nothing to decide, and the members' answers are due
        snapshot = self.snapshot(self._demand.take_news())
        batches = self._adviser.policy.serves_batches
        people = snapshot if batches else self._background.without(snapshot)
        plan = self._adviser.ask(people)
        sent = self._dispatcher.send(plan)
        if self._operations.is_idle and not batches:
            sent += self._dispatcher.send(self._background.plan(snapshot, plan))
        self._carries.apart = lane_of(snapshot)
        target = None if snapshot.switching else plan.target
        if target is not None and target != self.books.units.partition:
            switches.start_for_policy(target, m.Treatment(plan.treatment), plan.reason)
        elif plan.level is not None and self._operations.can_switch:
            self._operations.memory.start_for_policy(plan.level, plan.share_reason)
        elif plan.moves and self._operations.can_move:
            self._handovers.begin(plan.moves)
        elif self._operations.can_switch and not batches:
            # Background requests leave where people's come, so only people's count beside these.
            self._balancing.look(people if people.requests else snapshot)
        return sent

    def snapshot(self, news: News = NO_NEWS) -> Snapshot:
        """Return what policies see now, with what has become of requests."""
        now, switches = self._clock(), self._operations.switches
        may_switch = self._operations.can_switch and switches.has_budget
        seen = self._capacity.snapshot(
            now,
            self._demand,
            switching=not may_switch,
            busy=switches.busy,  # engines that form a group serve meanwhile
            pending=switches.pending,
            since_switch=now - switches.ended_at,
            sp_above=self._shifting.sp_above,
            news=news,
        )
        if self._config.share_weights == 1:
            return seen
        levels, (share, stages) = self._share_levels.offered(), self._operations.memory.level
        return replace(seen, share_weights=share, share_stages=stages, share_levels=levels)
