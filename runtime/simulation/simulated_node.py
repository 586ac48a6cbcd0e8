"""Runs a workload on a simulated node: the real controller and agents with fake cores, no threads.

Every process is a turn function. It gets a turn when a message arrives for it or when something is
due that it waits for, as it would with sockets and clocks. This module makes no decisions.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition, units_of
from shoal.runtime.clock import ManualClock
from shoal.runtime.controller.loop import Controller
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.step_times import Devices
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages.views import MemoryView, SwitchView
from shoal.runtime.protocol.transport import Frames, front_identity
from shoal.runtime.simulation.front_ends import FrontEnds
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import cost_model
from shoal.runtime.simulation.simulated_network import CONTROLLER, Events, SimulatedNetwork
from shoal.runtime.simulation.simulated_prompts import Block, SimulatedPrompts, wire_request

LEAD_SECONDS = 1.0
"""Time for the node to switch to its policy's first layout before the workload starts."""
PATIENCE_SECONDS = 3600.0
"""A simulation is given up when it lasts this much longer than the workload's arrivals."""
_TURNS_AT_ONCE = 1000
"""A process that is busy for longer without any time passing is stuck. An engine that gives up its
free blocks needs a turn for each few of them."""

_outputs = msgspec.msgpack.Decoder(wire.Outputs)


class SimulationError(RuntimeError):
    """The node stopped with requests left, or is broken; the message is one line."""


class Arrival(Protocol):
    """One request of a workload."""

    @property
    def at(self) -> float:
        """Seconds from the start."""

    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102

    @property
    def output_tokens(self) -> int: ...  # noqa: D102

    @property
    def priority(self) -> int: ...  # noqa: D102

    @property
    def prefix(self) -> Sequence[Block]:
        """The stretches with which its prompt begins, and which other prompts may share."""

    @property
    def next(self) -> Self | None:
        """The next turn of its chat; ``at`` of that one is seconds from the end of this answer."""


Asked = TypeVar("Asked", bound=Arrival)


@dataclass(slots=True)
class Life:
    """The course of one request. Times are seconds from the workload's start."""

    arrived: float
    started: float | None = None
    """When a step first computed it."""
    first_token: float | None = None
    ended: float | None = None
    tokens: int = 0
    cached: int | None = None
    """Prompt tokens that were found in the prefix cache; None: it has no token yet."""
    units: list[Unit] = field(default_factory=list)
    """The units to which it was sent, in order."""
    outcome: m.Outcome | None = None
    """``FINISHED``, or why it got no more tokens."""

    @property
    def finished(self) -> bool:
        """Whether it got all of its tokens."""
        return self.outcome is m.Outcome.FINISHED


@dataclass(slots=True)
class Run(Generic[Asked]):
    """One workload under one policy."""

    policy: str
    lives: list[Life]
    """One per request: those of the workload in its order, then later turns of chats as they came.
    A turn after one that failed is not sent."""
    arrivals: list[Asked]
    """What each of them asked for. Of a later turn, ``at`` still counts from the last answer."""
    tokens: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Output tokens by the second in which they came. Those of steps that were simulated as one are
    spread evenly over its time."""
    switches: list[SwitchView] = field(default_factory=list)
    """All switches since the workload's start; the policy's first layout comes before that."""
    memory_changes: list[MemoryView] = field(default_factory=list)
    """All changes of memory between weights and KV."""
    layouts: list[tuple[float, Partition]] = field(default_factory=list)
    """Every partition, with the time from which on it was in effect."""
    moves: int = 0
    """Requests that were taken out of a unit and recomputed elsewhere."""
    policy_errors: int = 0
    step_errors: dict[str, float] = field(default_factory=dict)
    """Smoothed relative error of the cost model at the end (``messages.LayoutView``)."""


def simulate(
    node: Node,
    policy: str,
    arrivals: Sequence[Asked],
    awaited: Callable[[Asked], bool] = lambda _: True,
) -> Run[Asked]:
    """Serve a workload and return the results.

    Args:
        node: the node.
        policy: the name of its policy.
        arrivals: the workload.
        awaited: the run ends when those of its requests have ended for which this is true.

    Raises:
        FileError: the model does not fit the node.
        SimulationError: requests were left over, or a process broke.
        UnknownPolicyError: ``policy`` names no policy.
    """
    return _Simulation(node, policy, arrivals, awaited).run()


class _Simulation(Generic[Asked]):
    """The processes of one run, and the front end that measures it."""

    def __init__(
        self,
        node: Node,
        policy: str,
        arrivals: Sequence[Asked],
        awaited: Callable[[Asked], bool],
    ) -> None:
        self._awaited = awaited
        self._prompts = SimulatedPrompts()
        self._clock = ManualClock()
        self._events = Events(self._clock)
        self._result = Run(policy, [Life(arrival.at) for arrival in arrivals], [*arrivals])
        self._last_output: dict[int, float] = {}
        self._open = sum(map(awaited, arrivals))
        self._last_arrival = max((arrival.at for arrival in arrivals), default=0.0)
        self._concluded = False
        self._latest_switch: SwitchView | None = None
        config = node.config(policy)
        self._front_seconds = node.hardware.front_seconds
        self._front_ends = FrontEnds(
            node.front_ends or 2 * node.engines, node.hardware.stream_seconds
        )
        self._network = SimulatedNetwork(self._events, node.hardware.message_seconds, self)
        self._controller = Controller(
            config, self._network.controller, clock=self._clock, wall=self._clock
        )
        devices = Devices()
        times = {level: node.step_times(level) for level in node.levels}
        hops = cost_model(node.shape, node.hardware).hop_seconds
        self._processes: dict[int, Controller | Agent] = {CONTROLLER: self._controller}
        for engine in range(node.engines):
            backend = FakeBackend(
                config,
                engine,
                clock=self._clock,
                level_times=times,
                hop_times=hops,
                devices=devices,
                on_start=self._started,
            )
            agent = Agent(backend, self._network.agent(engine), clock=self._clock)
            self._processes[engine] = agent
        self._due: dict[int, float] = {}
        self._first_layout = None if node.layout is None else units_of(node.engines, node.layout)

    def run(self) -> Run[Asked]:
        """Run until every request that is awaited has ended."""
        for number in self._processes:
            self._wake_at(number, 0.0)
        self._start()
        if self._first_layout is not None:
            self._ask_for(self._first_layout)
        while self._open:
            late = self._clock.now > PATIENCE_SECONDS + self._last_arrival
            if late or not self._go_on():
                raise SimulationError(self._stuck())
        self._network.control_sends(front_identity(0), m.GetLayout(0))
        while not self._concluded and self._go_on():
            pass
        return self._result

    def _ask_for(self, units: Partition) -> None:
        engines, names = [list(unit.engines) for unit in units], [unit.name for unit in units]
        call = m.SetLayout(1, engines, m.Treatment.CARRY, PATIENCE_SECONDS, layouts=names)
        self._network.control_sends(front_identity(0), call)

    def _go_on(self) -> bool:
        """Run the next events and the turns that follow; return False if no event is left."""
        concerned = self._events.next()
        for number in sorted(n for n in concerned if isinstance(n, int)):
            self._turn(number)
        return bool(concerned)

    # --- processes ----------------------------------------------------------------------------

    def _turn(self, number: int) -> None:
        """Let a process do all that it can at this time, and plan its next turn."""
        process = self._processes[number]
        for _ in range(_TURNS_AT_ONCE):
            process.turn(0.0)
            if number == CONTROLLER:
                self._watch()
            seconds = process.next_wakeup()
            if seconds is None or seconds > 0:
                break
        else:
            raise SimulationError(f"process {number} never rests at {self._clock.now:.3f} s")
        if seconds is not None:
            self._wake_at(number, self._clock.now + seconds)

    def _wake_at(self, number: int, time: float) -> None:
        """Plan a process's turn at a time, instead of the one that was planned before."""
        if self._due.get(number) == time:
            return
        self._due[number] = time
        self._events.at(time, partial(self._ring, number, time))

    def _ring(self, number: int, time: float) -> Hashable:
        if self._due.get(number) != time:
            return None
        del self._due[number]
        return number

    def _watch(self) -> None:
        """Note a new partition and a finished switch."""
        controller, run = self._controller, self._result
        partition = controller.books.units.partition
        latest = controller.switches[-1] if controller.switches else None
        if self._now < 0.0:
            run.layouts = [(0.0, partition)]
        elif run.layouts[-1][1] != partition:
            run.layouts.append((self._now, partition))
        if latest is not self._latest_switch and latest is not None and self._now >= 0.0:
            run.switches.append(latest)
        self._latest_switch = latest
        changes = controller.memory_changes
        if changes and (not run.memory_changes or changes[-1] is not run.memory_changes[-1]):
            run.memory_changes.append(changes[-1])

    # --- the front end ------------------------------------------------------------------------

    def _start(self) -> None:
        for index, life in enumerate(self._result.lives):
            self._plan(index, life.arrived)

    def _plan(self, index: int, at: float) -> None:
        self._events.at(LEAD_SECONDS + at + self._front_seconds, partial(self._send, index))

    @property
    def _now(self) -> float:
        return self._clock.now - LEAD_SECONDS

    def _send(self, index: int) -> None:
        arrival, at = self._result.arrivals[index], self._result.lives[index].arrived
        prompt = self._prompts.make(str(index), arrival.prompt_tokens, arrival.prefix)
        payload = wire_request(str(index), prompt, arrival.output_tokens, arrival.priority, at)
        self._network.front_sends(0, wire.RequestType.ADD, [payload])

    def _started(self, request_id: str, at: float) -> None:
        life = self._result.lives[int(request_id)]
        if life.started is None:
            life.started = at - LEAD_SECONDS

    def outputs(self, frames: Frames) -> None:
        """See ``FrontEnd.outputs``."""
        for output in _outputs.decode(frames[0]).outputs:
            number, count = int(output.request_id), len(output.new_token_ids)
            life = self._result.lives[number]
            if life.ended is not None:
                raise SimulationError(f"request {number} got tokens after its end")
            before = self._last_output.get(number)
            sent = self._front_ends.sent(number, count, self._now, before)
            if count and life.first_token is None:
                life.first_token = sent
                stats = output.prefill_stats
                life.cached = 0 if stats is None else stats.num_cached_tokens
            if count:
                self._count(sent if before is None else before, sent, count)
                self._last_output[number] = self._now
                life.tokens += count
            if output.finish_reason is not None:
                self._end(life, output.finish_reason, sent)
                arrival = self._result.arrivals[number]
                if arrival.next is not None and life.finished:
                    self._take_turn(arrival.next, sent)
                self._open -= self._awaited(arrival)

    def _take_turn(self, turn: Asked, answered: float) -> None:
        """Plan the next turn of a chat, whose last turn was answered then."""
        due = answered + turn.at
        self._result.lives.append(Life(due))
        self._result.arrivals.append(turn)
        self._open += self._awaited(turn)
        self._last_arrival = max(self._last_arrival, due)
        self._plan(len(self._result.lives) - 1, due)

    def _count(self, start: float, end: float, count: int) -> None:
        tokens = self._result.tokens
        first, last = int(start), int(end)
        if first == last:
            tokens[last] += count
            return
        rate = count / (end - start)
        for second in range(first, last + 1):
            tokens[second] += rate * (min(end, second + 1) - max(start, second))

    def _end(self, life: Life, reason: wire.FinishReason, at: float) -> None:
        life.ended = at
        if reason is wire.FinishReason.LENGTH:
            life.outcome = m.Outcome.FINISHED
        elif life.outcome is None:
            life.outcome = m.Outcome.LOST

    def note(self, message: m.FromController) -> None:
        """See ``FrontEnd.note``."""
        match message:
            case m.Placed(request_id, unit):
                self._result.lives[int(request_id)].units.append(unit)
            case m.CarriedOn(request_ids, unit):
                for request_id in request_ids:
                    self._result.lives[int(request_id)].units.append(unit)
            case m.Ended(request_id, outcome):
                self._result.lives[int(request_id)].outcome = outcome
            case m.LayoutView():
                self._result.moves = message.moves_total
                self._result.policy_errors = message.policy_errors
                self._result.step_errors = message.step_errors
                self._concluded = True
            case m.CallFailed(error=error):
                raise SimulationError(f"the node refuses the layout: {error}")

    def _stuck(self) -> str:
        left = [n for n, life in enumerate(self._result.lives) if life.ended is None]
        partition = self._controller.books.units.partition
        return (
            f"{len(left)} requests are left at {self._clock.now:.0f} s, such as {left[:5]}, "
            f"in {[list(group.engines) for group in partition]}"
        )
