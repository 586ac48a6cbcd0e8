"""The calls that reach the controller through the front ends; each gets exactly one answer."""

from collections.abc import Callable
from functools import partial

import msgspec

from shoal.policies.registry import UnknownPolicyError
from shoal.policies.shift import ShiftThresholdError
from shoal.policies.values.level import Level
from shoal.policies.values.partition import Partition, PartitionError, parse_partition
from shoal.runtime.controller.adviser import Adviser
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.fitting import Fitting
from shoal.runtime.controller.operations import Operations
from shoal.runtime.controller.reporting import layout_view
from shoal.runtime.controller.reporting.gauges import Gauges
from shoal.runtime.controller.switching.shift_threshold import Shifting
from shoal.runtime.protocol import messages as m

Call = (
    m.GetLayout
    | m.GetMetrics
    | m.SetLayout
    | m.DrainEngines
    | m.SetPolicy
    | m.SetShiftThreshold
    | m.ChangeMemory
    | m.AuditNode
)


class Calls:
    """Answers callers.

    Args:
        env: the node, the transport to callers, and the time.
        books: what the controller knows and has counted.
        capacity: knows how good the cost model's predictions are.
        adviser: the policy.
        shifting: the threshold between TP and SP.
        operations: switches and audits.
        fitting: may keep the node from being ready.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        capacity: Capacity,
        adviser: Adviser,
        shifting: Shifting,
        operations: Operations,
        fitting: Fitting,
    ) -> None:
        self._env = env
        self._books = books
        self._capacity = capacity
        self._adviser = adviser
        self._shifting = shifting
        self._operations = operations
        self._fitting = fitting

    def take(self, peer: str, message: Call) -> None:
        """Answer a call, either now or when the work that it asks for is done."""
        match message:
            case m.GetLayout(call, named):
                self._env.transport.to_control(peer, self._layout(call, named))
            case m.GetMetrics(call):
                self._env.transport.to_control(peer, self._metrics(call))
            case m.SetLayout() if self._is_switching or self._operations.is_idle:
                self._set_layout(peer, message)
            case m.SetLayout():
                asked = self._env.clock()
                self._operations.when_idle(partial(self._set_layout_late, peer, message, asked))
            case m.DrainEngines():
                self._drain(peer, message)
            case m.SetPolicy():
                self._change(peer, message.call, partial(self._adviser.change, message.policy))
            case m.SetShiftThreshold():
                self._change(peer, message.call, partial(self._shifting.set, message.threshold))
            case m.ChangeMemory() if not (self._is_switching or self._operations.memory.running):
                asked = self._env.clock()
                self._operations.when_idle(partial(self._change_memory_late, peer, message, asked))
            case m.ChangeMemory():
                self._change_memory(peer, message)
            case m.AuditNode(call):
                self._operations.when_idle(partial(self._operations.start_audit, peer, call))

    def _fail(self, peer: str, call: int, status: int, error: str) -> None:
        self._env.transport.to_control(peer, m.CallFailed(call, status, error))

    # --- reading ------------------------------------------------------------------------------

    def _layout(self, call: int, named: int = 0) -> m.LayoutView:
        books, reason = self._books, self._not_ready_reason
        return m.LayoutView(
            call=call,
            engines=layout_view.engine_views(books),
            units=layout_view.unit_views(books, self._operations.busy, named=named),
            switches=list(self._operations.switches.past),
            waiting=len(books.requests.pool),
            policy=self._adviser.policy.name,
            ready=reason is None,
            reason=reason,
            switches_total=books.statistics.switches.ended,
            policy_errors=int(books.statistics.policy_errors.total()),
            moves_total=int(books.statistics.moved.total()),
            step_errors=self._capacity.costs.errors,
            costs=self._costs,
            corrections=self._capacity.costs.corrections,
            candidates=layout_view.candidate_views(self._adviser.verdicts),
            shift=self._shifting.view,
            unavailable=layout_view.unavailable_views(
                books, self._env.config.units, self._operations.rejoin.unavailable()
            ),
            lengths=layout_view.lengths(books.engines),
            share_weights=self._operations.memory.shown.share,
            share_stages=self._operations.memory.shown.stages,
            share_decided_by="operator" if self._operations.memory.is_held else "policy",
            hidden_above=self._capacity.costs.hidden_above,
            memory_changes=list(self._operations.memory.past),
        )

    @property
    def _costs(self) -> str:
        return "" if self._capacity.costs.model is None else self._fitting.costs

    @property
    def _not_ready_reason(self) -> str | None:
        """Why the node cannot take requests or switch; None if it can."""
        reason = layout_view.not_ready_reason(self._books)
        return "step times are measured" if reason is None and self._fitting.running else reason

    def _metrics(self, call: int) -> m.NodeMetrics:
        gauges = Gauges(
            config=self._env.config,
            books=self._books,
            policy=self._adviser.policy.name,
            busy=self._operations.busy,
            unavailable=self._operations.rejoin.unavailable().keys(),
            step_errors=self._capacity.costs.errors,
            now=self._env.clock(),
        )
        families = gauges.families() + self._books.statistics.families()
        return m.NodeMetrics(call, families, gauges.engines())

    # --- changing -----------------------------------------------------------------------------

    def _change(self, peer: str, call: int, change: Callable[[], None]) -> None:
        """Change what decides from now on; a running switch goes on."""
        try:
            change()
        except (UnknownPolicyError, ShiftThresholdError) as error:
            self._fail(peer, call, 400, str(error))
            return
        self._env.transport.to_control(peer, self._layout(call))

    def _drain(self, peer: str, message: m.DrainEngines) -> None:
        status, error = self._operations.drains.set(message.engines, drained=message.drained)
        if error:
            self._fail(peer, message.call, status, error)
        else:
            self._env.transport.to_control(peer, self._layout(message.call))

    def _set_layout_late(self, peer: str, message: m.SetLayout, asked: float) -> None:
        """Switch in the time that the caller has left, which other operations may have taken."""
        left = self._left(peer, message, asked)
        if left > 0:
            self._set_layout(peer, msgspec.structs.replace(message, timeout_seconds=left))

    def _left(self, peer: str, message: m.SetLayout | m.ChangeMemory, asked: float) -> float:
        """Return for how long the caller still waits; fail the call if it has gone."""
        left = message.timeout_seconds - (self._env.clock() - asked)
        if left <= 0:
            error = f"other operations took longer than {message.timeout_seconds:g} s"
            self._fail(peer, message.call, 504, error)
        return left

    def _set_layout(self, peer: str, message: m.SetLayout) -> None:
        config = self._env.config
        try:
            target = parse_partition(
                message.units,
                engines=config.engines,
                max_group=config.max_group,
                max_pp=config.max_pp,
                names={
                    tuple(sorted(unit)): name
                    for unit, name in zip(message.units, message.layouts, strict=False)
                    if name
                },
            )
        except PartitionError as problem:
            self._fail(peer, message.call, 400, str(problem))
            return
        status, error = self._refusal(target)
        if error:
            self._fail(peer, message.call, status, error)
        else:
            self._operations.switches.start_for_operator(peer, message, target)

    def _refusal(self, target: Partition) -> tuple[int, str]:
        """Return the HTTP status and the reason why the node cannot switch to a target now."""
        if not self._books.engines.started or self._fitting.running:
            return 503, str(self._not_ready_reason)
        if self._is_switching:
            return 409, "a switch is running: ask again when it is over"
        if self._adviser.policy.decides_layout:
            return 409, (
                f"the layout is decided by the policy {self._adviser.policy.name!r}: "
                "POST /admin/policy 'manual' first"
            )
        return layout_view.refusal(self._books, target, self._operations.rejoin.unavailable())

    @property
    def _is_switching(self) -> bool:
        return self._operations.switches.running is not None

    def _change_memory_late(self, peer: str, message: m.ChangeMemory, asked: float) -> None:
        """Change memory, unless other operations have taken all the time that the caller had."""
        if self._left(peer, message, asked) > 0:
            self._change_memory(peer, message)

    def _change_memory(self, peer: str, message: m.ChangeMemory) -> None:
        decides = message.share_weights == m.POLICY_DECIDES
        wanted = Level(message.share_weights, message.stages)
        status, error = self._memory_refusal(self._operations.memory.level if decides else wanted)
        if error:
            self._fail(peer, message.call, status, error)
        else:
            self._operations.memory.start_for_operator(peer, message)

    def _memory_refusal(self, level: Level) -> tuple[int, str]:
        """Return the HTTP status and the reason why memory cannot be changed now."""
        if not self._books.engines.started or self._fitting.running:
            return 503, str(self._not_ready_reason)
        if self._is_switching:
            return 409, "a switch is running: ask again when it is over"
        if self._operations.memory.running:
            return 409, "a change of memory is running: ask again when it is over"
        return self._operations.memory.refusal(level)
