"""The node over real sockets: the same protocol as in memory, driven turn by turn."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.controller.loop import Controller
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.node.runtime_dir import make_runtime_dir, remove_runtime_dir
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import transport, wire
from shoal.runtime.protocol.transport import (
    ZmqAgentTransport,
    ZmqControllerTransport,
    drain,
    front_identity,
)
from tests.runtime.loopback_node import SMALL, request_payload

TURNS = 2000
"""Bound of every wait in this module: at 5 ms a turn far more than any message takes."""


class SocketNode:
    """Controller, two agents and one front end played by the test, all in this thread."""

    def __init__(self, directory: Path) -> None:
        self.config = NodeConfig(2, 2, "manual", str(directory), {}, fake=SMALL)
        addresses = Addresses(directory)
        self.context = zmq.Context()
        self.input = self._bind(zmq.ROUTER, addresses.front_input(0))
        self.output = self._bind(zmq.PULL, addresses.front_output(0))
        clock = ManualClock()
        self.beats = 0
        self.controller_transport = ZmqControllerTransport(addresses, 1, self._beat)
        self.controller = Controller(self.config, self.controller_transport, clock=clock)
        self.transports = [ZmqAgentTransport(e, addresses, 1) for e in range(2)]
        self.backends = [FakeBackend(self.config, e, clock=clock) for e in range(2)]
        self.agents = [
            Agent(b, t, clock=clock) for b, t in zip(self.backends, self.transports, strict=True)
        ]
        self.control = self.context.socket(zmq.DEALER)
        self.control.setsockopt(zmq.IDENTITY, front_identity(0).encode())
        self.control.connect(addresses.control)
        self.notes: list[m.FromController] = []
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, wire.FinishReason] = {}

    def _beat(self) -> None:
        self.beats += 1

    def _bind(self, kind: int, address: str) -> zmq.Socket:
        socket = self.context.socket(kind)
        socket.bind(address)
        return socket

    def until(self, condition) -> None:
        """Give turns until the condition holds."""
        for _ in range(TURNS):
            self.controller.turn(0.005)
            for agent in self.agents:
                agent.turn(0.0)
            for frames in drain(self.output):
                self._take(msgspec.msgpack.decode(frames[0], type=wire.Outputs))
            self.notes += [m.decode_from_controller(frames[0]) for frames in drain(self.control)]
            if condition():
                return
        raise AssertionError("it does not come")

    def _take(self, outputs: wire.Outputs) -> None:
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finish[output.request_id] = output.finish_reason

    def greeting(self) -> tuple[bytes, bytes]:
        """Return identity and ready response of the engine core that presents itself.

        As a front end does, it then calls the controller once: a ROUTER drops what it has for a
        peer whose connection is still under way, and notes would be lost.
        """
        self.until(lambda: self.input.poll(0))
        identity, payload = self.input.recv_multipart()
        self.call(m.GetLayout(0), m.LayoutView)
        return identity, payload

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        payload = request_payload(request_id, prompt, max_tokens)
        self.input.send_multipart([b"\x00\x00", wire.RequestType.ADD.value, *payload])

    def call(self, message: m.Message, kind: type) -> m.FromController:
        self.control.send(m.encode(message))
        self.until(lambda: any(isinstance(note, kind) for note in self.notes))
        return next(note for note in self.notes if isinstance(note, kind))

    def close(self) -> None:
        self.controller_transport.close()
        for agents_own in self.transports:
            agents_own.close()
        self.context.destroy(linger=0)


@pytest.fixture
def node() -> Iterator[SocketNode]:
    directory = make_runtime_dir()
    node = SocketNode(directory)
    yield node
    node.close()
    remove_runtime_dir(directory)


def test_a_front_end_sees_one_engine_core(node: SocketNode) -> None:
    identity, payload = node.greeting()
    assert identity == (0).to_bytes(2, "little")
    ready = msgspec.msgpack.decode(payload)
    assert ready["num_gpu_blocks"] == 2 * SMALL.num_blocks


@pytest.mark.parametrize("eager_seconds", [0.0, 0.001])
def test_tokens_come_straight_from_the_engines_over_a_switch(
    node: SocketNode, eager_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "EAGER_SECONDS", eager_seconds)
    node.greeting()
    prompts = {f"r{k}": [k + 1] * 9 for k in range(12)}
    for request_id, prompt in prompts.items():
        node.add(request_id, prompt, 20)
    node.until(lambda: len(node.tokens) == 12)
    done = node.call(m.SetLayout(1, [[0, 1]], m.Treatment.HARD, 10.0), m.SwitchDone)
    assert isinstance(done, m.SwitchDone)
    assert done.switch.after == [(0, 1)]
    node.add("shared", [3] * 50, 6)
    node.until(lambda: "shared" in node.finish)
    node.notes.clear()
    node.call(m.SetLayout(2, [[0], [1]], m.Treatment.HARD, 10.0), m.SwitchDone)
    node.until(lambda: len(node.finish) == 13)
    prompts["shared"] = [3] * 50
    assert node.tokens == {
        r: expected_tokens(p, 6 if r == "shared" else 20) for r, p in prompts.items()
    }
    audit = node.call(m.AuditNode(3), m.AuditDone)
    assert isinstance(audit, m.AuditDone)
    assert audit.problems == []


def test_every_turn_counts_once_in_the_controllers_heartbeat(node: SocketNode) -> None:
    before = node.beats
    for _ in range(5):
        node.controller.turn(0.0)
    assert node.beats == before + 5
    node.controller_transport.wait(None)  # an idle controller turns, too
    assert node.beats == before + 6


def test_notes_say_where_a_request_runs(node: SocketNode) -> None:
    node.greeting()
    node.add("a", [1, 2, 3], 2)
    # Both engines are idle. The one that was ready first gets the request.
    allowed = [m.Placed("a", alone(engine)) for engine in range(2)]
    node.until(lambda: any(note in allowed for note in node.notes))
    assert len([note for note in node.notes if isinstance(note, m.Placed)]) == 1


def test_messages_to_nobody_are_dropped(node: SocketNode) -> None:
    node.controller_transport.to_engine(7, m.Ping())
    node.controller_transport.to_control("front-9", m.Placed("a", alone(0)))
    node.greeting()
