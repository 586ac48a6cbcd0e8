"""One agent on a fake backend; the test plays its controller, message by message."""

from typing import Any

from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.protocol.transport import Channel
from tests.runtime.loopback_node import request_payload
from tests.units import tp

GROUP = tp(0, 1)
LEASE_1 = list(range(500, 700))
"""Ids that the other member is said to have lent."""


class Bench:
    """One agent, its controller played by the test."""

    def __init__(
        self,
        engine: int = 0,
        faults: Faults = NO_FAULTS,
        step_seconds: float = 0.0,
        copy_seconds: float = 0.0,
        prefix_caching: bool = False,  # prompts are the same, and blocks are counted
    ) -> None:
        settings = FakeSettings(
            step_seconds=step_seconds,
            copy_seconds=copy_seconds,
            num_blocks=200,
            block_tokens=4,
            max_num_seqs=8,
            max_model_len=300,
            prefix_caching=prefix_caching,
        )
        config = NodeConfig(2, 2, "manual", "unused", {}, fake=settings)
        self.clock = ManualClock()
        self.network = LoopbackNetwork()
        self.backend = FakeBackend(config, engine, clock=self.clock, faults=faults)
        self.agent = Agent(self.backend, self.network.agent(engine), clock=self.clock)
        self.engine = engine

    def tell(self, message: m.Message, *frames: bytes, turns: int = 1) -> list[m.Message]:
        """Send a message, give turns, return the answers but for load reports."""
        self.network.controller.to_engine(self.engine, message, frames)
        return self.turn(turns)

    def turn(self, turns: int = 1) -> list[m.Message]:
        for _ in range(turns):
            self.agent.turn()
        return [message for message in self.heard() if not isinstance(message, m.Load)]

    def heard(self) -> list[m.Message]:
        queue = self.network.to_controller.get((Channel.ENGINE, f"engine-{self.engine}.0"))
        messages = [m.decode_to_controller(frames[0]) for frames in queue or ()]
        if queue:
            queue.clear()
        return messages

    def add(self, request_id: str, prompt: int = 8, tokens: int = 5, group=None) -> None:
        payload = request_payload(request_id, [1] * prompt, tokens)
        self.tell(m.AddRequest(group or alone(self.engine), request_id), *payload)

    def bind(self, blocks: int = 10, treatment: m.Treatment = m.Treatment.HARD) -> None:
        """Bring the agent into the bound group."""
        (prepared,) = self.tell(m.Prepare(5, GROUP, treatment, blocks))
        assert isinstance(prepared, m.Prepared)
        lease = {0: prepared.blocks, 1: LEASE_1[: len(prepared.blocks)]}
        assert self.tell(m.Commit(5, GROUP, 1, lease)) == [m.Committed(5, self.engine)]


def started(engine: int = 0, **settings: Any) -> Bench:
    """Return an agent that has announced itself; the settings are those of ``Bench``."""
    bench = Bench(engine, **settings)
    (ready,) = bench.turn()
    assert isinstance(ready, m.EngineReady)
    return bench
