"""A random life in which engines hang, die and come back: in the end nothing is missing."""

import pytest

from shoal.policies.values.partition import singles, units_of
from shoal.runtime.controller.books.engine_book import Engine, EngineState
from shoal.runtime.controller.failures.rejoin import FORM_SECONDS, RETRY_SECONDS
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults, Seam
from tests.runtime.loopback_node import LoopbackNode
from tests.runtime.test_random_deaths import ENGINES, DeadlyRun

ACTIONS = 600
FAULTS = [
    Faults(fail_form=True),
    *(Faults(die_at=seam) for seam in Seam),
    *[NO_FAULTS] * len(Seam),
]
"""What may be wrong with an engine that starts again."""


class RestartingRun(DeadlyRun):
    """Starts dead engines again, at any time, some of which cannot make their part of a group."""

    def act(self) -> None:
        super().act()
        rng = self.node.rng
        for engine in sorted(self.bury()):
            if rng.random() < 0.03:
                self.node.restart(engine, faults=rng.choice(FAULTS))
        if rng.random() < 0.005:
            self.node.clock.advance(RETRY_SECONDS)

    def bury(self) -> frozenset[int]:
        """End what the controller has given up; return the dead, but for those restarted since."""
        node = self.node
        known = {e.number for e in node.controller.books.engines if not self._is_news(e)}
        dead = node.controller.books.engines.in_state(EngineState.DEAD) & known
        for engine in dead:
            node.agents.pop(engine, None)
        return dead

    def _is_news(self, engine: Engine) -> bool:
        return engine.incarnation < self.node.incarnations[engine.number]

    def finish(self) -> None:
        """Bring everybody back, and end those who cannot make their part of a group."""
        node = self.node
        node.deliver(self._late)
        self._late = []
        node.hung.clear()
        for _ in range(5):
            node.run_for(FORM_SECONDS, tick=RETRY_SECONDS)
            for engine in sorted(self.bury()):
                node.restart(engine)
            for engine in [e for e, made in node.backends.items() if made.faults != NO_FAULTS]:
                node.kill(engine)
        node.switch(*singles(ENGINES))  # wide groups are formed again when narrow ones are released
        super().finish()


@pytest.mark.parametrize("seed", range(6))
def test_everybody_comes_back(seed: int) -> None:
    # Half of the nodes copy KV ahead of their switches.
    node = LoopbackNode(ENGINES, max_group=4, seed=seed, restart_limit=1, precopy_tokens=seed % 2)
    run = RestartingRun(node)
    for _ in range(ACTIONS):
        run.act()
    run.finish()

    assert {type(error) for error in node.deaths.values()} <= {RunnerDied}
    assert node.value("shoal_engine_restarts_total") > 0
    run.check()
    assert node.view().unavailable == []
    assert node.controller.books.engines.in_state(EngineState.SERVING) == set(range(ENGINES))
    for layout in node.config.layouts:
        node.switch(*units_of(ENGINES, layout))
    assert node.audit() == []
