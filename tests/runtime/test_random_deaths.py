"""A random life in which engines hang and die: the others go on, and every request gets an end."""

import msgspec
import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition, units_of
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.protocol.transport import Frames
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.runtime.random_run import RandomRun, hasty

ENGINES = 8
ACTIONS = 600
MOST_HUNG = 2
LEAST_ALIVE = 4


class DeadlyRun(RandomRun):
    """Also hangs, wakes and kills engines; their last outputs arrive, come late, or are lost."""

    def __init__(self, node: LoopbackNode, *, decided: bool = False) -> None:
        super().__init__(node, decided=decided)
        self._late: list[tuple[int, Frames]] = []

    def act(self) -> None:
        super().act()
        node, rng = self.node, self.node.rng
        if self._late and rng.random() < 0.2:
            node.deliver(self._late)
            self._late = []
        if rng.random() < 0.03 and len(node.hung) < MOST_HUNG and self.may_end():
            node.hung.add(rng.randrange(ENGINES))
        if node.hung and rng.random() < 0.1:
            node.hung.pop()
        if rng.random() < 0.01 and self.may_end():
            self.kill(rng.choice(sorted(node.agents)))
        if rng.random() < 0.02:
            node.clock.advance(1.5)  # a few of these are a time-out
        self.bury()

    def may_end(self) -> bool:
        """Return whether some engines live when one more ends: it takes its whole group along."""
        node = self.node
        return len(node.agents) - node.config.max_group * len(node.hung) > LEAST_ALIVE

    def kill(self, engine: int) -> None:
        """End an engine in the middle of what it does."""
        node, rng = self.node, self.node.rng
        for _ in range(ENGINES):
            node.send(f"r{len(node.prompts)}", rng.randrange(1, 50), rng.randrange(10, 40))
        for _ in range(rng.randrange(8 * ENGINES)):
            node.step()
        for _ in range(rng.randrange(4)):
            if engine in node.agents:
                node.turn_agent(engine)
        for unit in node.backends[engine].cores:
            held = node.hold_outputs(*unit.engines, keep=rng.randrange(3))
            self._late += held if rng.random() < 0.5 else []
        node.kill(engine)

    def bury(self) -> frozenset[int]:
        """End what the controller has given up, as the supervisor would; return the dead."""
        dead = self.node.controller.books.engines.in_state(EngineState.DEAD)
        for engine in dead:
            self.node.agents.pop(engine, None)
        return dead

    def finish(self) -> None:
        """Wake everyone who lives, then give every unit its turn until every request has ended."""
        node = self.node
        node.deliver(self._late)
        node.hung.clear()
        self.decide()
        node.run_for(2 * node.config.prepare_timeout_seconds, tick=1.0)
        dead = self.bury()
        for _ in range(20):
            for layout in reversed(node.config.layouts):
                node.switch(*without(units_of(ENGINES, layout), dead))
                node.run_for(0.2)
            if not node.missing:
                return

    def check(self) -> None:
        """Assert that each request has ended once, with the right tokens, and no book was wrong."""
        node = self.node
        assert sum(node.outcomes.values()) == len(node.prompts)
        assert node.missing == []
        node.assert_exact()
        assert set(node.finish.values()) <= {FinishReason.LENGTH, FinishReason.ERROR}
        problems = [problem for audit in self.audits for problem in audit.problems]
        assert [problem for problem in problems if "did not answer" not in problem] == []


def without(partition: Partition, dead: frozenset[int]) -> Partition:
    """Take the groups apart that have a dead engine."""
    return tuple(
        unit
        for group in partition
        for unit in (
            [alone(engine) for engine in group.engines] if dead & set(group.engines) else [group]
        )
    )


@pytest.mark.parametrize("seed", range(6))
def test_survivors_go_on(seed: int) -> None:
    # Half of the nodes copy KV ahead of their switches.
    run = DeadlyRun(LoopbackNode(ENGINES, max_group=4, seed=seed, precopy_tokens=seed % 2))
    live(run)


@pytest.mark.parametrize(("seed", "tier"), [*((seed, 0) for seed in range(4)), (6, 30), (5, 300)])
def test_survivors_go_on_where_switches_are_late(
    monkeypatch: pytest.MonkeyPatch, seed: int, tier: int
) -> None:
    """Some nodes also have KV in the host's memory, and lose engines while it goes to and fro."""
    policy, wait = hasty(monkeypatch, seed), 0.03
    node = LoopbackNode(
        ENGINES,
        max_group=4,
        seed=seed,
        policy=policy,
        settings=msgspec.structs.replace(SMALL, tier_blocks=tier),
        switch_wait_seconds=wait,
        precopy_tokens=seed % 2,
    )
    live(DeadlyRun(node, decided=True))
    assert node.value("shoal_late_switches_total") > 0
    assert (node.value("shoal_tier_requests_total", outcome="hit") > 0) == bool(tier)


def live(run: DeadlyRun) -> None:
    """Act at random to the end, and check what must hold of survivors."""
    for _ in range(ACTIONS):
        run.act()
    run.finish()
    node = run.node

    assert node.deaths == {}
    assert node.controller.books.requests.interrupted == {}
    run.check()
    assert node.audit() == []
    alive = set(node.agents)
    assert len(alive) >= 1
    assert all(node.backends[engine].own.lent == frozenset() for engine in alive)
