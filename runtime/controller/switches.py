"""The node's switches, one at a time: who asked for each, how it ended, when the next may start."""

import logging
import math
from collections import deque

import msgspec

from shoal.policies.values.partition import Partition
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.demand import SwitchBudget
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import DRAIN, FIT, MANUAL
from shoal.runtime.controller.reporting import layout_view
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.controller.switching.moves import LoseEngines, Node
from shoal.runtime.controller.switching.switch import Switch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import SwitchView
from shoal.runtime.protocol.transport import front_identity

log = logging.getLogger("shoal.controller")

SWITCHES_KEPT = 32
"""Past switches that ``GET /admin/layout`` shows."""
RETRY_SECONDS = 5.0
"""Pause after a failed switch before the policy may ask for another."""


class _Call(msgspec.Struct, frozen=True):
    """The caller that waits for a switch, and the number of its call."""

    peer: str
    number: int


class Switches:
    """Starts switches and reports how they end.

    Args:
        env: the node, the transport to all processes, and the time.
        books: engines, units and leases; switches are counted.
        capacity: how much new groups are lent.
        carries: lets requests go on in other units.
        lose: takes down the engines of a broken group.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        capacity: Capacity,
        carries: Carries,
        *,
        lose: LoseEngines,
    ) -> None:
        self.running: Switch | None = None
        self.past: deque[SwitchView] = deque(maxlen=SWITCHES_KEPT)
        self.ended_at = -math.inf
        """When the last switch ended."""
        self._config = env.config
        self._node = Node(env, books, capacity, carries, lose)
        self._books = books
        self._transport = env.transport
        self._clock = env.clock
        self._wall = env.wall
        self._caller: _Call | None = None
        self._budget = SwitchBudget(env.clock())
        self._retry_at = 0.0

    # --- what others see ----------------------------------------------------------------------

    @property
    def busy(self) -> frozenset[int]:
        """Engines that get no new requests, because they are being regrouped."""
        return frozenset() if self.running is None else self.running.busy

    @property
    def pending(self) -> Partition | None:
        """The target of the running switch."""
        return None if self.running is None else self.running.target

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes."""
        return None if self.running is None else self.running.deadline

    @property
    def is_held(self) -> bool:
        """Whether no switch can start now, whatever the policy's budget."""
        return self.running is not None or self._clock() < self._retry_at

    @property
    def has_budget(self) -> bool:
        """Whether the policy's budget allows a switch."""
        return self._budget.allows(self._clock())

    # --- start --------------------------------------------------------------------------------

    def start_for_operator(self, peer: str, message: m.SetLayout, target: Partition) -> None:
        """Start a switch that the admin API asked for, and wait for requests as the call says."""
        timeout, wait = message.timeout_seconds, message.wait_seconds
        if wait is None or wait >= timeout:
            self._start(target, message.treatment, MANUAL, wait=timeout, gives_up=True)
        else:
            self._start(target, message.treatment, MANUAL, wait=wait)
        self._caller = _Call(peer, message.call)
        self.end()

    def start_for_policy(self, target: Partition, treatment: m.Treatment, reason: str) -> None:
        """Start a switch that the policy asked for; it waits only a short time for requests."""
        self._budget.spend(self._clock())
        self._start(target, treatment, reason, wait=self._config.switch_wait_seconds)

    def start_for_drain(self, target: Partition) -> None:
        """Start a switch that releases groups of drained engines, whatever the policy."""
        self._start(target, m.Treatment.CARRY, DRAIN, wait=0.0)
        self.end()

    def start_for_fit(self, target: Partition) -> None:
        """Start a switch to a layout whose steps are to be timed; no request runs yet."""
        self._start(target, m.Treatment.HARD, FIT, wait=0.0)
        self.end()

    def _start(
        self,
        target: Partition,
        treatment: m.Treatment,
        reason: str,
        *,
        wait: float,
        gives_up: bool = False,
    ) -> None:
        self.running = Switch(
            self._node,
            target=target,
            treatment=treatment,
            reason=reason,
            wait=wait,
            gives_up=gives_up,
        )
        self._tell_fronts(self.running, None)

    def _tell_fronts(self, switch: Switch, done: SwitchView | None) -> None:
        """Tell the front ends that a switch begins (``done`` is None), or how it has ended."""
        trace = None
        if self._config.tracing:
            trace = layout_view.switch_trace(self._books, switch, done, now=self._clock())
        note = m.Switching(sorted(switch.engines), over=done is not None, trace=trace)
        for index in range(self._config.api_servers):
            self._transport.to_control(front_identity(index), note)

    # --- answers and end ----------------------------------------------------------------------

    def handle(self, message: m.SwitchAnswer) -> bool:
        """Take an engine's answer; return False if the running switch does not expect it."""
        return self.running is not None and self.running.handle(message)

    def tick(self) -> None:
        """Act on answers that are overdue, and end the switch if it is over."""
        if self.running is not None:
            self.running.tick()
        self.end()

    def end(self) -> None:
        """If the switch is over: count it, log it, tell the front ends and answer its caller."""
        switch = self.running
        if switch is None or not switch.done:
            return
        self.running = None
        now = self._clock()
        after = self._books.units.partition
        view = layout_view.switch_view(switch, after, at=self._wall(), now=now)
        self.past.append(view)
        self._books.statistics.switches.switched(view)
        self._tell_fronts(switch, view)
        level = logging.INFO if switch.error is None else logging.ERROR
        log.log(level, "%s", view.line(), extra={"fields": {"switch": view}})
        if switch.reason != FIT:  # no request runs yet, and first switches take long
            self._note_end(switch, view, now)
        self._answer(switch, view)

    def _note_end(self, switch: Switch, view: SwitchView, now: float) -> None:
        """Note what decides when the policy's next switch may start."""
        self.ended_at = now
        if not switch.rules.lasts:
            self._budget.learn(view.duration_seconds - view.precopy_seconds)
        if switch.error is not None:
            self._retry_at = now + RETRY_SECONDS

    def _answer(self, switch: Switch, view: SwitchView) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            failed = m.CallFailed(caller.number, switch.status, switch.error or "")
            done = m.SwitchDone(caller.number, view)
            self._transport.to_control(caller.peer, done if switch.error is None else failed)
