"""A whole node in one thread: controller, agents on fake backends, front ends, all in memory.

Nothing runs by itself: ``step`` gives one process a turn, ``settle`` all of them until nothing is
left to do. Time is a ``ManualClock``.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit, tensor_parallel
from shoal.policies.values.partition import Partition
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.loop import Controller
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults
from shoal.runtime.engine.fake.step_times import Devices, StepTimes
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.protocol.messages.metrics import Sample
from shoal.runtime.protocol.messages.views import SwitchView
from shoal.runtime.protocol.transport import SUPERVISOR, Frames, front_identity
from shoal.server.frontend.interruptions import Interruptions
from shoal.server.frontend.ordering import InOrder

_outputs = msgspec.msgpack.Decoder(wire.Outputs)
SMALL = FakeSettings(num_blocks=64, block_tokens=4, max_num_seqs=8, max_model_len=400)


def request_payload(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int | None,
    *,
    client: int = 0,
    priority: int = 0,
    terms: wire.Terms | None = None,
    **sampling: Any,
) -> list[bytes]:
    """Return an ``EngineCoreRequest`` as vLLM encodes it."""
    headers = None if terms is None else terms.added_to(None)
    sampling = {"max_tokens": max_tokens, **sampling}
    head = [request_id, list(prompt), None, sampling, None, 0.0, None, None, None]
    return [msgspec.msgpack.encode([*head, None, None, client, 0, priority, headers])]


def index_of(frames: Frames) -> int:
    """Return the engine index of a message of outputs."""
    return _outputs.decode(frames[0]).engine_index


def problems(backend: FakeBackend) -> list[str]:
    """Return one line per broken invariant of a backend's cores."""
    return [line for core in backend.cores.values() for line in core.check_integrity()]


class Front:
    """What the outputs of one front end go through before vLLM's processor has them."""

    def __init__(self, node: "LoopbackNode", client: int) -> None:
        def standing(request_id: str) -> tuple[int, int] | None:
            tokens, prompt = node.tokens_of(request_id), node.prompts.get(request_id)
            return None if tokens is None or prompt is None else (len(prompt[0]), len(tokens))

        self.order = InOrder(standing, node.clock)
        self.late = 0
        self.interruptions = Interruptions(
            client,
            self.order,
            node.tokens_of,
            send=lambda message: node.network.control_sends(front_identity(client), message),
            expect=lambda _: None,
            count_late=self._count_late,
        )

    def _count_late(self, outputs: int) -> None:
        self.late += outputs

    def take(self, message: wire.Outputs) -> list[wire.Output]:
        unit = wire.sender_of(message.engine_index)
        return self.order.take(unit, self.interruptions.admit(unit, message.outputs))


class LoopbackNode:
    """See the module.

    Args:
        engines: number of engines.
        seed: order of arrivals and turns; None delivers at once and in order.
        clock: the node's; None: one that moves only when it is told to.
        step_times: how long steps take; None: the settings say it.
        thread: does long work of the policy; None: the controller's loop does it.
        limits: further fields of ``NodeConfig``.
    """

    def __init__(
        self,
        engines: int = 4,
        *,
        max_group: int | None = None,
        seed: int | None = None,
        policy: str = "manual",
        settings: FakeSettings = SMALL,
        faults: dict[int, Faults] | None = None,
        clock: ManualClock | None = None,
        step_times: StepTimes | None = None,
        thread: Executor | None = None,
        **limits: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = clock or ManualClock(1000.0)
        self.config = NodeConfig(
            engines=engines,
            max_group=max_group or engines,
            policy=policy,
            runtime_dir=str(Path("unused")),
            api_servers=2,
            fake=settings,
            prepare_timeout_seconds=5.0,
            **limits,
        )
        self.network = LoopbackNetwork(self.rng if seed is not None else None)
        self.controller = Controller(
            self.config,
            self.network.controller,
            clock=self.clock,
            wall=self.clock,
            thread=thread,
        )
        self.incarnations = dict.fromkeys(range(engines), 0)
        self.backends: dict[int, FakeBackend] = {}
        self.agents: dict[int, Agent] = {}
        self._devices = Devices()
        self._step_times = step_times
        for engine in range(engines):
            self._start(engine, (faults or {}).get(engine, NO_FAULTS))
        self.hung: set[int] = set()
        self.deaths: dict[int, Exception] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, wire.FinishReason] = {}
        self.last_attempts: dict[str, int] = {}
        """Attempt of the last output of every request that has ended."""
        self.aborted: set[str] = set()
        self.utilities: list[wire.UtilityOutput] = []
        self.fronts = {client: Front(self, client) for client in range(self.config.api_servers)}
        self._calls = 0

    def _start(self, engine: int, faults: Faults) -> None:
        incarnation = self.incarnations[engine]
        self.backends[engine] = FakeBackend(
            self.config,
            engine,
            incarnation,
            clock=self.clock,
            faults=faults,
            step_times=self._step_times,
            devices=self._devices,
        )
        transport = self.network.agent(engine, incarnation)
        self.agents[engine] = Agent(self.backends[engine], transport, clock=self.clock)

    # --- running ---

    def step(self) -> None:
        """Give one process, drawn at random, a turn."""
        who = self.rng.choice([None, *self.agents])
        if who is None:
            self.controller.turn()
        elif who not in self.hung:
            self.turn_agent(who)

    def turns(self, count: int) -> None:
        """Give everybody so many turns, in order: with steps of no time, about one token each."""
        for _ in range(count):
            self.controller.turn()
            for engine in list(self.agents):
                self.turn_agent(engine)

    def turn_agent(self, engine: int) -> None:
        """Give an engine a turn; one that cannot go on is buried."""
        try:
            self.agents[engine].turn()
        except (RunnerDied, KeyError) as error:
            self.deaths[engine] = error
            del self.agents[engine]

    def settle(self, rounds: int = 3000) -> None:
        """Run until nothing is left to do at this time; fail if that never comes."""
        quiet = 0
        for _ in range(rounds):
            self.controller.turn()
            for engine in sorted(set(self.agents) - self.hung):
                self.turn_agent(engine)
            self.collect()
            quiet = quiet + 1 if self.is_quiet else 0
            if quiet == 3:
                return
        raise AssertionError(f"the node does not settle: {self.describe()}")

    @property
    def is_quiet(self) -> bool:
        alive = set(self.agents) - self.hung
        queues = [self.network.to_engines[e] for e in alive]
        stepping = any(c.in_flight for e in alive for c in self.backends[e].cores.values())
        return not stepping and not any(queues) and not any(self.network.to_controller.values())

    def run_for(self, seconds: float, tick: float = 0.05) -> None:
        """Let time pass, settling as it does."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(tick)
            for front in self.fronts.values():
                front.interruptions.begin_overdue_again()
            self.settle()

    def describe(self) -> str:
        states = {e: agent.binding.state.value for e, agent in self.agents.items()}
        return f"{states}, partition {self.partition}, missing {self.missing}"

    def hold_outputs(self, *unit: int, keep: int = 0) -> list[tuple[int, Frames]]:
        """Take out what a unit has sent to front ends and they have not read, but for the first.

        Args:
            unit: that.
            keep: messages that stay.

        Returns:
            Front ends and messages, for ``deliver``; those of a dead engine may be lost as well.
        """
        held: list[tuple[int, Frames]] = []
        wanted = tensor_parallel(unit)
        for client, frames_list in self.network.front_outputs.items():
            sent = [f for f in frames_list if wire.sender_of(index_of(f)) == wanted][keep:]
            held += [(client, frames) for frames in sent]
            frames_list[:] = [f for f in frames_list if not any(f is taken for taken in sent)]
        return held

    def deliver(self, held: list[tuple[int, Frames]]) -> None:
        """Let messages arrive that were held."""
        for client, frames in held:
            self.network.post_to_front(client, frames)

    def kill(self, engine: int, reason: str = "killed") -> None:
        """End an engine as the operating system would; the supervisor tells."""
        self.agents.pop(engine, None)
        died = m.EngineDied(
            engine,
            reason,
            incarnation=self.incarnations[engine],
            restarts=self.config.restart_limit > 0,
        )
        self.network.control_sends(SUPERVISOR, died)

    def restart(self, engine: int, *, faults: Faults = NO_FAULTS) -> None:
        """Start a dead engine again as the supervisor would, which tells."""
        self.agents.pop(engine, None)
        self.hung.discard(engine)
        self.incarnations[engine] += 1
        starting = m.EngineStarting(engine, self.incarnations[engine])
        self.network.control_sends(SUPERVISOR, starting)
        self._start(engine, faults)

    # --- clients ---

    def send(
        self,
        request_id: str,
        prompt_tokens: int = 10,
        max_tokens: int = 8,
        *,
        client: int = 0,
        priority: int = 0,
        terms: wire.Terms | None = None,
        **sampling: Any,
    ) -> None:
        """Send a request whose prompt is drawn from its id."""
        rng = random.Random(request_id)
        prompt = [rng.randrange(5, 250) for _ in range(prompt_tokens)]
        self.prompts[request_id] = (prompt, max_tokens)
        payload = request_payload(
            request_id,
            prompt,
            max_tokens,
            client=client,
            priority=priority,
            terms=terms,
            **sampling,
        )
        self.network.front_sends(client, wire.RequestType.ADD, payload)

    def abort(self, request_id: str, client: int = 0) -> None:
        """Withdraw a request, as a front end does for a client that is gone."""
        self.aborted.add(request_id)
        payload = [msgspec.msgpack.encode([request_id])]
        self.network.front_sends(client, wire.RequestType.ABORT, payload)

    def utility(self, method: str, client: int = 0) -> None:
        """Make a utility call."""
        payload = [msgspec.msgpack.encode([client, 7, method, []])]
        self.network.front_sends(client, wire.RequestType.UTILITY, payload)

    def collect(self) -> None:
        """Take what the front ends received; nothing may follow the end of a request."""
        for client, front in self.fronts.items():
            self._collect_notes(client, front)
            frames_list = self.network.front_outputs.get(client, [])
            for frames in frames_list:
                message = _outputs.decode(frames[0])
                if message.utility_output is not None:
                    self.utilities.append(message.utility_output)
                for output in front.take(message):
                    ends = (self.finish.get(output.request_id), output.finish_reason)
                    attempt = wire.attempt_of(output.trace_headers)
                    if ends[0] is not None:
                        # The controller's word and an engine's may cross when engines are lost, and
                        # a dead engine's come late; vLLM's front end drops what comes second.
                        late = attempt < self.last_attempts[output.request_id]
                        assert late or wire.FinishReason.ERROR in ends, "token after the end"
                        continue
                    got = self.tokens.setdefault(output.request_id, [])
                    got += output.new_token_ids
                    if output.finish_reason is not None:
                        self.finish[output.request_id] = output.finish_reason
                        self.last_attempts[output.request_id] = attempt
                front.interruptions.settle()
            frames_list.clear()

    def _collect_notes(self, client: int, front: "Front") -> None:
        notes = self.network.control_replies.get(front_identity(client), [])
        for note in [note for note in notes if isinstance(note, m.Interrupted)]:
            notes.remove(note)
            front.interruptions.interrupted(note)

    def tokens_of(self, request_id: str) -> list[int] | None:
        """Return what a client has of a request; None if it has ended."""
        over = request_id in self.finish or request_id in self.aborted
        return None if over else self.tokens.get(request_id, [])

    @property
    def missing(self) -> list[str]:
        return sorted(set(self.prompts) - set(self.finish) - self.aborted)

    def assert_exact(self) -> None:
        """Every request that ended in order has exactly its tokens; aborted ones a prefix."""
        for request_id, (prompt, max_tokens) in self.prompts.items():
            got = self.tokens.get(request_id, [])
            expected = expected_tokens(prompt, max_tokens)
            if self.finish.get(request_id) is wire.FinishReason.LENGTH:
                assert got == expected, request_id
            else:
                assert got == expected[: len(got)], request_id

    # --- operators ---

    def call(self, message_type: type, *args: object) -> int:
        self._calls += 1
        self.network.control_sends("front-0", message_type(self._calls, *args))
        return self._calls

    def set_layout(
        self,
        *units: Unit | Sequence[int],
        treatment: m.Treatment = m.Treatment.HARD,
        timeout: float = 60.0,
    ) -> int:
        wanted = [list(unit.engines if isinstance(unit, Unit) else unit) for unit in units]
        layouts = [unit.name if isinstance(unit, Unit) else "" for unit in units]
        return self.call(m.SetLayout, wanted, treatment, timeout, None, layouts)

    def reply(self, call: int) -> m.FromController | None:
        replies = self.network.control_replies.get("front-0", [])
        return next((r for r in replies if getattr(r, "call", None) == call), None)

    def switch(
        self, *units: Unit | Sequence[int], treatment: m.Treatment = m.Treatment.HARD
    ) -> SwitchView:
        """Switch and settle; the switch must be done then."""
        call = self.set_layout(*units, treatment=treatment)
        self.settle()
        reply = self.reply(call)
        assert isinstance(reply, m.SwitchDone), reply
        return reply.switch

    def audit(self) -> list[str]:
        call = self.call(m.AuditNode)
        self.settle()
        reply = self.reply(call)
        assert isinstance(reply, m.AuditDone), reply
        return reply.problems

    def view(self) -> m.LayoutView:
        call = self.call(m.GetLayout)
        self.settle()
        reply = self.reply(call)
        assert isinstance(reply, m.LayoutView)
        return reply

    def metrics(self) -> m.NodeMetrics:
        call = self.call(m.GetMetrics)
        self.settle()
        reply = self.reply(call)
        assert isinstance(reply, m.NodeMetrics)
        return reply

    def metric(self, name: str, **labels: str) -> list[Sample]:
        """Return the series of a metric that have these labels; there must be one."""
        (family,) = [family for family in self.metrics().families if family.name == name]
        found = [
            sample
            for sample in family.samples
            if labels.items() <= dict(zip(family.labels, sample.labels, strict=True)).items()
        ]
        assert found, (name, labels, family.samples)
        return found

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of those series; of a histogram: the number of its observations."""
        return sum(sum(s.counts) if s.counts else s.value for s in self.metric(name, **labels))

    @property
    def partition(self) -> Partition:
        """The units that there are."""
        return self.controller.books.units.partition

    @property
    def pool(self) -> TaskPool:
        """The requests that wait."""
        return self.controller.books.requests.pool

    @property
    def outcomes(self) -> dict[m.Outcome, int]:
        """Requests that have left the node by now, by those outcomes that there were."""
        left = self.controller.books.statistics.requests
        counts = {outcome: int(left.total(outcome)) for outcome in m.Outcome}
        return {outcome: count for outcome, count in counts.items() if count}

    def ended(self, client: int = 0) -> dict[str, m.Ended]:
        """Return the controller's notes on requests that it ended, by request."""
        notes = self.network.control_replies.get(f"front-{client}", [])
        return {note.request_id: note for note in notes if isinstance(note, m.Ended)}

    def placed(self) -> dict[str, Unit]:
        """Return where every request was sent, by its latest note to the front ends."""
        found = dict[str, Unit]()
        for replies in self.network.control_replies.values():
            for note in replies:
                match note:
                    case m.Placed(request_id, unit):
                        found[request_id] = unit
                    case m.CarriedOn(request_ids, unit):
                        found |= dict.fromkeys(request_ids, unit)
        return found
