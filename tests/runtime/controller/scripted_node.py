"""A controller whose engines the test plays: they answer binds, and nothing else by themselves."""

import random

import msgspec

from shoal.policies.values.layouts import Unit, layouts_up_to
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.loop import Controller
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.protocol.messages.views import SwitchView
from shoal.runtime.protocol.transport import SUPERVISOR, front_identity
from tests.runtime.loopback_node import request_payload

BLOCKS, BLOCK_TOKENS = 64, 4
READY = msgspec.msgpack.encode(wire.ReadyResponse(400, BLOCKS, BLOCK_TOKENS, "", "", 8, 400, ""))
CARRIES = (m.Expect, m.Export, m.Import, m.Drop, m.Keep, m.AbortRequests, m.MoveOut)
"""What engines are told about requests that leave a unit."""
AHEAD = (m.Pin, m.Reserve, m.CopyAhead, m.Settle, m.Unpin, m.Lend, m.Grow, m.TakeBack)
"""What they are told besides, if KV is copied ahead."""


class ScriptedNode:
    """See the module.

    Args:
        engines: number of engines.
        blocks: number of KV blocks of each engine.
        precopy_tokens: see ``NodeConfig``.
    """

    def __init__(self, engines: int, *, blocks: int = BLOCKS, precopy_tokens: int = 0) -> None:
        self.clock = ManualClock(1000.0)
        config = NodeConfig(
            engines=engines,
            max_group=engines,
            policy="manual",
            runtime_dir="unused",
            prepare_timeout_seconds=5.0,
            precopy_tokens=precopy_tokens,
        )
        self._kinds = CARRIES + (AHEAD if precopy_tokens else ())
        self.network = LoopbackNetwork()
        self.controller = Controller(
            config, self.network.controller, clock=self.clock, wall=self.clock
        )
        self.books = self.controller.books
        self.told: list[tuple[int, m.Message]] = []
        """What engines were told of carries, in order."""
        self.mute: set[int] = set()
        """Engines that do not answer."""
        self.added: dict[str, m.AddRequest] = {}
        self._calls = 0
        limits = [
            m.LayoutLimits(each, BLOCK_TOKENS * each.world_size, 8, 400)
            for each in layouts_up_to(engines)
        ]
        self._agents = {engine: self.network.agent(engine) for engine in range(engines)}
        for engine in range(engines):
            self.say(engine, m.EngineReady(engine, blocks, limits, READY))
        self.turn()
        for engine in range(engines):
            self.load(Unit((engine,), limits[0].layout), blocks)

    # --- processes ---

    def turn(self) -> None:
        """Let the controller and the engines do all that they can do now."""
        for _ in range(20):
            self.controller.turn()
            for engine, agent in self._agents.items():
                for frames in agent.receive() if engine not in self.mute else ():
                    self._take(engine, m.decode_to_engine(frames[0]))

    def say(self, engine: int, message: m.Message) -> None:
        """Send as an engine would."""
        self._agents[engine].to_controller(message)

    def answer(self, engine: int, message: m.Message) -> None:
        """Send as an engine would, and let everybody react."""
        self.say(engine, message)
        self.turn()

    def load(self, unit: Unit, free_blocks: int, finished: tuple[str, ...] = ()) -> None:
        """Report the state of a unit."""
        core = self.books.requests.core(unit)
        ran = len(core.requests)
        report = m.Load(unit.leader, unit, ran, 0, free_blocks, core.sent, list(finished))
        self.answer(unit.leader, report)

    def _take(self, engine: int, message: m.Message) -> None:
        match message:
            case m.Prepare(epoch, _, m.Treatment.HARD, blocks):
                self.say(engine, m.Prepared(epoch, engine, list(range(min(8, blocks))), 0))
            case m.Commit(epoch) | m.KeepBound(epoch):
                self.say(engine, m.Committed(epoch, engine))
            case m.Release(epoch, unit, m.Treatment.HARD):
                self.say(engine, m.Released(epoch, unit, {e: [] for e in unit.engines}, 0))
            case m.Resume(epoch) | m.AbortBind(epoch):
                self.say(engine, m.Resumed(epoch, engine, 0))
            case m.CheckIntegrity(call):
                self.say(engine, m.Integrity(call, engine, [], [], []))
            case m.AddRequest():
                self.added[message.request_id] = message
            case _ if isinstance(message, self._kinds):
                self.told.append((engine, message))

    def kill(self, engine: int) -> None:
        """End an engine; the supervisor tells."""
        self.network.control_sends(SUPERVISOR, m.EngineDied(engine, "killed"))
        self.turn()

    # --- clients and operators ---

    def send(self, request_id: str, prompt_tokens: int = 10, max_tokens: int = 20) -> None:
        """Send a request."""
        prompt = random.Random(request_id).choices(range(5, 250), k=prompt_tokens)
        payload = request_payload(request_id, prompt, max_tokens)
        self.network.front_sends(0, wire.RequestType.ADD, payload)
        self.turn()

    def abort(self, *request_ids: str) -> None:
        """Withdraw requests."""
        self.network.control_sends(front_identity(0), m.Stopped(list(request_ids)))
        self.turn()

    def switch(self, *units: Unit, treatment: m.Treatment = m.Treatment.CARRY) -> int:
        """Ask for a layout; return the number of the call."""
        return self.call(m.SetLayout, [list(unit.engines) for unit in units], treatment, 60.0)

    def call(self, kind: type, *args: object) -> int:
        """Make a call; return its number."""
        self._calls += 1
        self.network.control_sends(front_identity(0), kind(self._calls, *args))
        self.turn()
        return self._calls

    def reply(self, call: int) -> m.FromController | None:
        """Return the answer to a call, if there is one."""
        replies = self.network.control_replies.get(front_identity(0), [])
        return next((reply for reply in replies if getattr(reply, "call", None) == call), None)

    def view(self, call: int) -> SwitchView:
        """Return the view of a switch, which must be over."""
        reply = self.reply(call)
        assert isinstance(reply, m.SwitchDone), reply
        return reply.switch

    def take(self, *kinds: type[m.Message]) -> list[tuple[int, m.Message]]:
        """Return what engines were told of carries since the last call, or what of these kinds."""
        told, self.told = self.told, []
        return [each for each in told if not kinds or isinstance(each[1], kinds)]

    def interrupted(self) -> dict[str, int]:
        """Return the requests that front ends were asked about, with their next attempts."""
        notes = self.network.control_replies.get(front_identity(0), [])
        return {
            request_id: attempt
            for note in notes
            if isinstance(note, m.Interrupted)
            for request_id, attempt in note.attempts.items()
        }

    def value(self, name: str, *labels: str) -> float:
        """Return a counter's series, or the number of a histogram's observations."""
        call = self.call(m.GetMetrics)
        reply = self.reply(call)
        assert isinstance(reply, m.NodeMetrics)
        (family,) = [family for family in reply.families if family.name == name]
        (sample,) = [sample for sample in family.samples if sample.labels == labels]
        return sum(sample.counts) if sample.counts else sample.value
