"""Random lives in which memory moves between weights and KV: no block and no request is lost."""

from typing import Any

import msgspec
import pytest

from shoal.policies.values.level import Level
from shoal.policies.values.partition import singles
from shoal.runtime.controller.memory_changes import RETRY_SECONDS
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.protocol import messages as m
from tests.depth import among
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.runtime.random_run import RandomRun
from tests.runtime.test_random_deaths import ENGINES as DEADLY
from tests.runtime.test_random_rejoin import RestartingRun

ENGINES, LEFT = 4, 40
ACTIONS = 500
SETTINGS = msgspec.structs.replace(SMALL, whole_blocks=LEFT, stage_blocks={2: LEFT + 10})
LEVELS = {Level(1): LEFT, Level(2, 2): LEFT + 10, Level(2): SETTINGS.num_blocks}


class MemoryMoves:
    """Asks for one level after another, whatever else goes on."""

    def __init__(self, node: LoopbackNode) -> None:
        self._node = node
        self._call: int | None = None
        self.answers: list[m.MemoryChanged | m.CallFailed] = []

    def act(self) -> None:
        if self._call is None and self._node.rng.random() < 0.3:
            self._call = self._node.call(m.ChangeMemory, *self._node.rng.choice([*LEVELS]))

    def read(self) -> None:
        if self._call is not None and (reply := self._node.reply(self._call)) is not None:
            assert isinstance(reply, m.MemoryChanged | m.CallFailed)
            self.answers.append(reply)
            self._call = None

    def check(self) -> None:
        """Give all blocks back, when all requests have ended; all must be there."""
        node = self._node
        for level, blocks in LEVELS.items():
            call = node.call(m.ChangeMemory, *level)
            node.settle()
            assert isinstance(node.reply(call), m.MemoryChanged), node.reply(call)
            assert node.audit() == []
            for engine in node.view().engines:
                assert (engine.share_weights, engine.share_stages) == level
                assert engine.num_blocks == blocks
                assert node.backends[engine.engine].own.load.free_blocks == blocks

    @property
    def done(self) -> list[m.MemoryChanged]:
        """Changes that changed something."""
        found = [answer for answer in self.answers if isinstance(answer, m.MemoryChanged)]
        return [answer for answer in found if answer.change.engines]


def node_of(engines: int, seed: int, **limits: Any) -> LoopbackNode:
    return LoopbackNode(engines, seed=seed, settings=SETTINGS, share_weights=2, max_pp=2, **limits)


class MovingRun(RandomRun):
    """Also moves memory."""

    def __init__(self, node: LoopbackNode) -> None:
        super().__init__(node)
        self.memory = MemoryMoves(node)

    def act(self) -> None:
        super().act()
        self.memory.act()

    def _read_replies(self) -> None:
        self.memory.read()
        super()._read_replies()


@pytest.mark.parametrize("seed", among(range(4), *range(4, 8)))
def test_memory_moves_beside_switches(seed: int) -> None:
    run = MovingRun(node_of(ENGINES, seed, precopy_tokens=seed % 2))
    for _ in range(ACTIONS):
        run.act()
    run.finish()
    node = run.node
    assert node.deaths == {}
    assert node.missing == []
    node.assert_exact()
    assert [problem for audit in run.audits for problem in audit.problems] == []
    run.memory.check()
    assert run.memory.done


class DyingRun(MovingRun, RestartingRun):
    """Moves memory while engines hang, die and come back."""


@pytest.mark.parametrize("seed", among(range(4), *range(4, 8)))
def test_memory_moves_while_engines_die_and_come_back(seed: int) -> None:
    node = node_of(DEADLY, seed, max_group=4, restart_limit=1)
    run = DyingRun(node)
    for _ in range(ACTIONS):
        run.act()
    run.finish()
    assert {type(error) for error in node.deaths.values()} <= {RunnerDied}
    run.check()
    assert run.memory.done
    node.switch(*singles(DEADLY))
    node.run_for(2 * RETRY_SECONDS, tick=1.0)
    run.memory.check()
