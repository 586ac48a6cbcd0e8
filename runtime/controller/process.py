"""The controller's loop: what arrives, what the policy wants, what is sent.

Three kinds of messages arrive: requests in vLLM's format from the front ends, calls from front ends
and the supervisor, and the engines' reports. After each batch of them the policy is asked once.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

import msgspec

from policies.partition import (
    Group,
    Partition,
    PartitionError,
    layout_name,
    leader_of,
    parse_partition,
)
from policies.plan import Plan
from policies.registry import UnknownPolicyError
from policies.snapshot import Snapshot
from runtime import messages as m
from runtime import wire
from runtime.clock import Clock, monotonic
from runtime.config import Addresses, NodeConfig
from runtime.controller import views
from runtime.controller.admission import Admission
from runtime.controller.adviser import Adviser
from runtime.controller.audit import Audit
from runtime.controller.book import Book, EngineState, continued
from runtime.controller.capacity import Capacity
from runtime.controller.demand import Demand, SwitchBudget, most_urgent
from runtime.controller.gauges import Gauges
from runtime.controller.leases import Leases
from runtime.controller.pool import TaskPool
from runtime.controller.statistics import MANUAL, Statistics
from runtime.controller.switch import Switch
from runtime.transport import (
    SUPERVISOR,
    Arrival,
    Channel,
    ControllerTransport,
    ZmqControllerTransport,
    front_identity,
)
from runtime.views import SwitchView

log = logging.getLogger("shoal.controller")

SWITCHES_KEPT = 32
"""Past switches that ``GET /admin/layout`` shows."""
POLICY_TIMEOUT_SECONDS = 600.0
"""How long requests may take to end in a sequential switch that the policy asked for."""
RETRY_SECONDS = 5.0
"""Pause after a failed switch before the policy may ask for another."""
REVIEW_SECONDS = 0.5
"""How often a policy that decides the layout is asked when nothing happens: quiet is news too."""
PAUSE_SECONDS = 5.0
"""How long a request waits for its unit under such a policy, before it is moved to another; and one
that is interleaved under any policy, when the group has left it no KV blocks to go on with."""
WAITING_TREATMENTS = (m.Treatment.SEQUENTIAL, m.Treatment.INTERLEAVE)
"""Those whose switches take as long as requests run."""


class _Call(msgspec.Struct, frozen=True):
    """Who waits for a switch, and the number of the call."""

    peer: str
    number: int


class Controller:
    """One node's controller.

    Args:
        config: the node.
        transport: the way to everybody.
        clock: monotonic seconds; injected so that tests own it.
        wall: seconds since the epoch, for people to read.

    Raises:
        UnknownPolicyError: ``config.policy`` names none.
    """

    def __init__(
        self,
        config: NodeConfig,
        transport: ControllerTransport,
        *,
        clock: Clock = monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.book = Book(config.engines)
        self.pool = TaskPool(config.aging_seconds)
        self.leases = Leases(self.book, transport)
        self.switches: deque[SwitchView] = deque(maxlen=SWITCHES_KEPT)
        self._capacity = Capacity(config, self.book, self.leases, self.pool)
        self._admission = Admission(config, self.book, self.pool, self._capacity, transport, clock)
        self._config = config
        self._transport = transport
        self._clock = clock
        self._wall = wall
        self._switch: Switch | None = None
        self._caller: _Call | None = None
        self._audit: Audit | None = None
        self._later: deque[tuple[str, m.SetLayout | m.AuditNode]] = deque()
        self._retry_at = 0.0
        self._demand = Demand(clock())
        self._budget = SwitchBudget(clock())
        self._switched_at = -math.inf
        self._decided_at = clock()
        self._paused_since: dict[Group, float] = {}
        self._statistics = Statistics(config.degrees)
        self._adviser = Adviser(config.policy, self._statistics, clock)

    # --- loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve for ever; ends with the process."""
        try:
            while True:
                self.turn()
        finally:
            self._transport.close()

    def turn(self, timeout: float | None = None) -> None:
        """Do everything that is due once, after waiting for it at most ``timeout`` seconds."""
        self._transport.wait(self._patience(timeout))
        began = self._clock()
        self._do_what_is_due()
        self._statistics.turns.observe(self._clock() - began)

    def _do_what_is_due(self) -> None:
        for arrival in self._transport.receive():
            self._take(arrival)
        if self._switch is not None:
            self._switch.tick()
        self._end_switch()
        self._end_audit()
        self._take_deferred()
        self._admission.expire()
        started = self._decide() if self.book.started else 0
        self._admission.hold_limits(started)

    def next_wakeup(self) -> float | None:
        """Return seconds until the next turn is due if no message comes; None: there is none."""
        return self._patience(None)

    def _patience(self, timeout: float | None) -> float | None:
        due = [
            self._switch.deadline if self._switch is not None else None,
            self._audit.deadline if self._audit is not None else None,
            self._admission.deadline,
        ]
        now = self._clock()
        if self._adviser.policy.decides_layout:
            due.append(self._decided_at + REVIEW_SECONDS)
        waits = [timeout, *(max(0.0, at - now) for at in due if at is not None)]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _take(self, arrival: Arrival) -> None:
        try:
            match arrival.channel:
                case Channel.ENGINE:
                    self._take_report(m.decode_to_controller(arrival.frames[0]))
                case Channel.CONTROL:
                    self._take_call(arrival.peer, m.decode_control(arrival.frames[0]))
                case Channel.FRONT:
                    self._take_request(arrival.frames[0], arrival.frames[1:])
        except msgspec.DecodeError as error:
            log.error("dropped a malformed message from %s: %s", arrival.peer, error)

    # --- requests -----------------------------------------------------------------------------

    def _take_request(self, kind: bytes, frames: list[bytes]) -> None:
        if kind == wire.RequestType.ADD.value:
            self._demand.arrive(self._clock(), self._admission.add(frames))
        elif kind == wire.RequestType.ABORT.value:
            self._admission.abort(wire.decode_abort(frames))
        elif kind == wire.RequestType.UTILITY.value:
            self._utility(frames)
        else:
            log.error("dropped a front end's message of unknown type %r", kind)

    def _utility(self, frames: list[bytes]) -> None:
        alive = sorted(self.book.in_state(EngineState.SERVING))
        for engine in alive:
            self._transport.to_engine(engine, m.Utility(answer=engine == alive[0]), frames)
        if not alive:
            call = wire.decode_utility(frames)
            failure = wire.encode_utility_failure(call.call_id, "no engine is left")
            self._transport.to_front(call.client_index, [failure])

    # --- engines' reports ---------------------------------------------------------------------

    def _take_report(self, message: m.ToController) -> None:
        if self._sender(message) in self.book.in_state(EngineState.DEAD):
            return
        match message:
            case m.Load():
                self._take_load(message)
            case m.Prepared() | m.Committed() | m.Released() | m.Resumed():
                self._take_answer(message)
            case m.NeedBlocks():
                self.leases.need(message)
            case m.Lent():
                self.leases.lent(message)
            case m.Returning():
                self.leases.returning(message)
            case m.Integrity():
                if self._audit is not None:
                    self._audit.answer(message)
            case m.Moved():
                self._take_moved(message)
            case m.EngineReady():
                self._take_ready(message)
            case m.EngineFailed(engine, error):
                self._lose([engine], error)

    @staticmethod
    def _sender(message: m.ToController) -> int:
        if isinstance(message, m.Released | m.NeedBlocks | m.Returning):
            return leader_of(message.group)
        return message.engine

    def _take_ready(self, message: m.EngineReady) -> None:
        engine = self.book.engines[message.engine]
        engine.ready, engine.state = message, EngineState.SERVING
        if self.book.started:
            self._greet_fronts()

    def _greet_fronts(self) -> None:
        ready = [engine.ready for engine in self.book.engines if engine.ready is not None]
        greeting = wire.merge_ready_responses(
            [answer.ready_response for answer in ready],
            max_model_len=self._capacity.longest,
            num_blocks=sum(answer.num_blocks for answer in ready),
        )
        for index in range(self._config.api_servers):
            self._transport.greet_front(index, greeting)

    def _take_load(self, load: m.Load) -> None:
        core = self.book.core(load.group)
        # Between two interleaved steps of a unit there are those of another.
        if not self.book.interleaved_in(self.book.unit_of(load.engine)):
            self._capacity.observe(core, load)
        core.load = load
        for request_id in load.finished:
            if self.book.remove(request_id) is not None:
                self.book.outcomes[m.Outcome.FINISHED] += 1

    def _take_moved(self, message: m.Moved) -> None:
        """Let requests that a core has given back wait for another, in their old place."""
        for request_id, tokens in message.tokens.items():
            request = self.book.remove(request_id)
            if request is not None:
                self.pool.add(continued(request, tokens, self._clock()))
                self._statistics.moved.add()

    def _take_answer(self, message: m.Prepared | m.Committed | m.Released | m.Resumed) -> None:
        if isinstance(message, m.Resumed):
            engine = self.book.engines[message.engine]
            if engine.state is EngineState.SILENT:
                engine.state, engine.reason = EngineState.SERVING, None
                log.warning("engine %d answers again", message.engine)
        if self._switch is None or not self._switch.handle(message):
            self.book.stale += 1

    def _lose(self, engines: Collection[int], reason: str) -> None:
        """Go on without engines that died, and without those that died with them."""
        gone = {tied for engine in engines for tied in self._tied(engine)}
        gone -= self.book.in_state(EngineState.DEAD)
        if not gone:
            return
        log.error("engines %s are lost: %s", sorted(gone), reason)
        for number in gone:
            engine = self.book.engines[number]
            engine.state, engine.reason = EngineState.DEAD, reason
        for group in [group for group in self.book.bound if gone.intersection(group)]:
            if self._switch is None or not self._switch.is_released(group):
                self.book.set_free(group)
        if self._switch is not None:
            # First: what members lent to a bind that is aborted now they take back by themselves.
            self._switch.lost(gone, f"engines {sorted(gone)} are lost: {reason}")
        self.leases.lose(gone)
        self._lose_requests(gone)
        if self._audit is not None:
            self._audit.lose(gone)
        self._transport.to_control(SUPERVISOR, m.KillEngines(sorted(gone), reason))

    def _tied(self, engine: int) -> frozenset[int]:
        """Return the engines that cannot go on without this one."""
        unit = self.book.unit_of(engine)
        switch = self._switch
        if unit in self.book.bound and (switch is None or not switch.is_released(unit)):
            return frozenset(unit)
        return frozenset({engine}) if switch is None else switch.tied(engine)

    def _lose_requests(self, gone: Collection[int]) -> None:
        """End the requests whose KV was (also) on dead engines, and those nobody can hold now."""
        lost = []
        for core in list(self.book.cores.values()):
            if not set(gone).intersection(core.group) or not core.requests:
                continue
            ids = list(core.requests)
            if leader_of(core.group) not in gone:
                self._transport.to_engine(leader_of(core.group), m.AbortRequests(ids))
            removed = [self.book.remove(request_id) for request_id in ids]
            lost += [request for request in removed if request is not None]
        for request in self.pool.all():
            if not self._capacity.holds(request.seen):
                self.pool.remove(request.id)
                lost.append(request)
        message = "an engine that the request needs is lost"
        self._admission.fail(lost, m.Outcome.LOST, 500, message)

    # --- calls --------------------------------------------------------------------------------

    def _take_call(self, peer: str, message: m.ToControllerControl) -> None:
        match message:
            case m.GetLayout(call):
                self._transport.to_control(peer, self._layout(call))
            case m.GetMetrics(call):
                self._transport.to_control(peer, self._metrics(call))
            case m.SetLayout():
                if self._audit is not None:
                    self._later.append((peer, message))
                else:
                    self._set_layout(peer, message)
            case m.SetPolicy():
                self._set_policy(peer, message)
            case m.AuditNode():
                if self._audit is not None or self._switch is not None:
                    self._later.append((peer, message))
                else:
                    self._start_audit(peer, message)
            case m.EngineDied(engine, reason):
                self._lose([engine], reason)
            case m.CountRefused(outcome):
                self.book.outcomes[outcome] += 1
            case m.Stopped(request_ids):
                self._admission.abort(request_ids, m.Outcome.FINISHED)

    def _take_deferred(self) -> None:
        """Take the calls that waited for a switch or an audit to end, while nothing is running."""
        while self._later and self._audit is None and self._switch is None:
            self._take_call(*self._later.popleft())

    def _layout(self, call: int) -> m.LayoutView:
        reason = views.not_ready_reason(self.book)
        return m.LayoutView(
            call=call,
            engines=views.engine_views(self.book, self.leases),
            units=views.unit_views(self.book, self.leases, self._busy),
            switches=list(self.switches),
            waiting=len(self.pool),
            policy=self._adviser.policy.name,
            ready=reason is None,
            reason=reason,
            switches_total=self._statistics.switches,
            policy_errors=int(self._statistics.policy_errors.total()),
            moves_total=int(self._statistics.moved.total()),
            step_errors=self._capacity.step_errors,
        )

    def _metrics(self, call: int) -> m.NodeMetrics:
        gauges = Gauges(
            config=self._config,
            book=self.book,
            leases=self.leases,
            pool=self.pool,
            policy=self._adviser.policy.name,
            busy=self._busy,
            step_errors=self._capacity.step_errors,
            now=self._clock(),
        )
        families = gauges.families() + self._statistics.families()
        return m.NodeMetrics(call, families, gauges.engines())

    def _set_policy(self, peer: str, message: m.SetPolicy) -> None:
        """Change the policy; a switch that runs goes on, the next decision is the new one's."""
        try:
            self._adviser.change(message.policy)
        except UnknownPolicyError as error:
            self._transport.to_control(peer, m.CallFailed(message.call, 400, str(error)))
            return
        self._transport.to_control(peer, self._layout(message.call))

    @property
    def _busy(self) -> frozenset[int]:
        return frozenset() if self._switch is None else self._switch.engines

    def _set_layout(self, peer: str, message: m.SetLayout) -> None:
        status, error = 200, ""
        target: Partition = ()
        try:
            target = parse_partition(
                message.units, engines=self._config.engines, max_group=self._config.max_group
            )
        except PartitionError as problem:
            status, error = 400, str(problem)
        else:
            status, error = self._refusal(target)
        if error:
            self._transport.to_control(peer, m.CallFailed(message.call, status, error))
            return
        self._start_switch(target, message.treatment, MANUAL, message.timeout_seconds)
        self._caller = _Call(peer, message.call)
        self._end_switch()

    def _refusal(self, target: Partition) -> tuple[int, str]:
        """Return the HTTP status and the reason why a target cannot be switched to now."""
        if not self.book.started:
            return 503, str(views.not_ready_reason(self.book))
        if self._switch is not None:
            return 409, "a switch is running: ask again when it is over"
        if self._adviser.policy.decides_layout:
            return 409, f"the layout is decided by the policy {self._adviser.policy.name!r}"
        gone = self.book.in_state(EngineState.DEAD, EngineState.SILENT)
        for group in target:
            lost = sorted(gone.intersection(group))
            if len(group) > 1 and lost and group not in self.book.partition:
                return 503, f"unit {list(group)} needs engines {lost}, which do not answer"
        return 200, ""

    # --- switches -----------------------------------------------------------------------------

    def _start_switch(
        self, target: Partition, treatment: m.Treatment, reason: str, timeout: float
    ) -> None:
        self._switch = Switch(
            self.book,
            self.leases,
            self._transport,
            self._statistics,
            clock=self._clock,
            lose=self._lose,
            target=target,
            treatment=treatment,
            reason=reason,
            timeout=timeout,
            answer_timeout=self._config.prepare_timeout_seconds,
            lease=self._capacity.lease_for,
            seed=lambda epoch: (self._config.seed + epoch) % 2**31,
        )
        self._tell_fronts(self._switch, None)

    def _tell_fronts(self, switch: Switch, done: SwitchView | None) -> None:
        """Tell the front ends that a switch begins, or has ended so."""
        trace = None
        if self._config.tracing:
            trace = views.switch_trace(switch, done, now=self._clock())
        note = m.Switching(sorted(switch.engines), over=done is not None, trace=trace)
        for index in range(self._config.api_servers):
            self._transport.to_control(front_identity(index), note)

    def _end_switch(self) -> None:
        switch = self._switch
        if switch is None or not switch.done:
            return
        self._switch = None
        view = views.switch_view(switch, self.book.partition, at=self._wall(), now=self._clock())
        self.switches.append(view)
        self._statistics.switched(view)
        self._tell_fronts(switch, view)
        level = logging.INFO if switch.error is None else logging.ERROR
        log.log(level, "%s", view.line(), extra={"fields": {"switch": view}})
        self._switched_at = self._clock()
        if switch.treatment not in WAITING_TREATMENTS:
            self._budget.learn(view.duration_seconds)
        if switch.error is not None:
            self._retry_at = self._clock() + RETRY_SECONDS
        caller, self._caller = self._caller, None
        if caller is not None:
            failed = m.CallFailed(caller.number, switch.status, switch.error or "")
            done = m.SwitchDone(caller.number, view)
            self._transport.to_control(caller.peer, done if switch.error is None else failed)

    # --- audit --------------------------------------------------------------------------------

    def _start_audit(self, peer: str, message: m.AuditNode) -> None:
        deadline = self._clock() + self._config.prepare_timeout_seconds
        audit = Audit(message.call, peer, deadline)
        self._audit = self.leases.audit = audit
        for engine in sorted(self.book.in_state(EngineState.SERVING)):
            leases = {g: n for g, n in self.leases.opened.items() if leader_of(g) == engine}
            audit.ask(engine, self.leases.blocks_of(engine), leases)
            self._transport.to_engine(engine, m.CheckIntegrity(message.call))

    def _end_audit(self) -> None:
        audit = self._audit
        if audit is None:
            return
        if audit.deadline <= self._clock():
            audit.time_out()
        if audit.done:
            self._audit = self.leases.audit = None
            own = self.book.check_integrity() + self.leases.check_integrity()
            answer = m.AuditDone(audit.call, own + audit.problems)
            self._transport.to_control(audit.peer, answer)

    # --- decisions ----------------------------------------------------------------------------

    def _decide(self) -> int:
        """Ask the policy and do what it wants; a plan that cannot be done changes nothing.

        Returns:
            The number of requests that have left the pool for a unit.
        """
        self._decided_at = self._clock()
        self._free_paused()
        snapshot = self.snapshot()
        plan = self._adviser.ask(snapshot)
        self._dispatch(plan)
        if (
            plan.target is not None
            and not snapshot.switching
            and plan.target != self.book.partition
        ):
            self._budget.spend(snapshot.now)
            treatment = m.Treatment(plan.treatment)
            self._start_switch(plan.target, treatment, plan.reason, POLICY_TIMEOUT_SECONDS)
        return len(plan.dispatches)

    def snapshot(self) -> Snapshot:
        """Return what policies see now."""
        now, switch = self._clock(), self._switch
        held = switch is not None or self._audit is not None or now < self._retry_at
        snapshot = self._capacity.snapshot(
            now,
            switching=held or not self._budget.allows(now),
            busy=self._busy,
            pending=None if switch is None else switch.target,
        )
        self._demand.see(now, snapshot.requests, most_urgent(snapshot))
        return replace(
            snapshot,
            arrival_rate=self._demand.arrival_rate(now),
            prompt_rate=self._demand.prompt_rate(now),
            smoothed_requests=self._demand.smoothed_requests,
            since_switch=now - self._switched_at,
            since_urgent=self._demand.since_urgent(now),
        )

    def _free_paused(self) -> None:
        """Move requests whose unit has been gone for long: no policy need remember them."""
        now = self._clock()
        for core in self.book.cores.values():
            if not core.requests or core.group in self.book.partition:
                self._paused_since.pop(core.group, None)
                continue
            interleaved = self.book.interleaves(core.group)
            if interleaved and core.load is not None and core.load.running:
                self._paused_since.pop(core.group, None)
                continue
            since = self._paused_since.setdefault(core.group, now)
            moves = interleaved or self._adviser.policy.decides_layout
            if not moves or now - since < PAUSE_SECONDS:
                continue
            # Asked again only after as long a time: the answer is on its way.
            self._paused_since[core.group] = now
            movable = core.movable()
            if movable and self._switch is None and self.book.serves(core.group[:1]):
                message = m.MoveOut(core.group, movable)
                self._transport.to_engine(leader_of(core.group), message)

    def _dispatch(self, plan: Plan) -> None:
        for dispatch in plan.dispatches:
            request = self.pool.remove(dispatch.request_id)
            if request is None:
                raise LookupError(f"request {dispatch.request_id} is not in the pool")
            group = dispatch.group
            self.book.place(request, group)
            now = self._clock()
            self._statistics.placed(request, group, now)
            add = m.AddRequest(group, request.id)
            self._transport.to_engine(leader_of(group), add, request.frames)
            placed = m.Placed(request.id, group, layout_name(group))
            if self._config.tracing:
                placed = msgspec.structs.replace(placed, waited=(request.pooled_at, now))
            self._transport.to_control(front_identity(request.client), placed)


def run_controller(config: NodeConfig) -> None:
    """Entry of the controller's process."""
    transport = ZmqControllerTransport(Addresses(config.runtime_dir), config.api_servers)
    Controller(config, transport).run()
