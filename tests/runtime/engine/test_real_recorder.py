"""What runners write of real engines' binds: when each group's first step began."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol.messages.views import SwitchView
from shoal.runtime.protocol.recording import BoundPhase, read_phases
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.units import tp

GROUP = tp(0, 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def node(llama: Path, directory: Path) -> Iterator[RealNode]:
    with RealNode(llama, 2, recording_dir=directory) as node:
        yield node


def phases(
    node: RealNode, directory: Path, bound: SwitchView, released: SwitchView
) -> list[BoundPhase]:
    """Return what both members wrote of one bind, once they have."""

    def between() -> list[BoundPhase]:
        read = [phase for engine in GROUP.engines for phase in read_phases(directory, engine)]
        return [phase for phase in read if bound.epoch < phase.epoch < released.epoch]

    node.until(lambda: len(between()) >= GROUP.size, "phases")
    return between()


def test_a_group_s_first_step_begins_after_the_decision_and_its_members_own_steps(
    node: RealNode, directory: Path
) -> None:
    paused = node.submit(alone(0), random_prompts((40,), 1), max_tokens=200)
    paused += node.submit(alone(1), random_prompts((30,), 2), max_tokens=200)
    node.wait_for_tokens(paused, 5)
    waiting = node.submit(GROUP, random_prompts((20,), 3), max_tokens=4)
    bound = node.switch(GROUP)
    node.wait(waiting)
    released = node.switch()
    found = phases(node, directory, bound, released)
    assert len(found) == GROUP.size
    assert len({phase.epoch for phase in found}) == 1
    for phase in found:
        assert phase.freed is not None
        assert phase.taken is not None
        assert phase.began is not None
        assert phase.freed <= phase.taken <= phase.began
        assert bound.at < phase.taken
        assert phase.began < released.at
    node.wait(paused)


def test_a_group_that_has_nothing_to_run_began_no_step(node: RealNode, directory: Path) -> None:
    found = phases(node, directory, node.switch(GROUP), node.switch())
    assert [(phase.taken, phase.began) for phase in found] == [(None, None)] * GROUP.size
