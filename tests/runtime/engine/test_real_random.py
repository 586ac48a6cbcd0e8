"""Random binds, releases, shifts and requests on four real engines; every token is checked.

The fake engine goes through far more of them in ``tests/runtime/controller``; this shows that what
holds there holds with real block pools, runners and collectives. ``SHOAL_RANDOM_OPERATIONS`` in the
environment says how many there are.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED
from tests.runtime.engine.real_node import RealNode, stock_tokens, unit_of
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp, tp_units

ENGINES = 4
OPERATIONS = int(os.environ.get("SHOAL_RANDOM_OPERATIONS", "500"))
TOKENS = 12
ALL = PROMPTS + SHARED

PARTITIONS: tuple[Partition, ...] = (
    singles(ENGINES),
    tp_units(ENGINES, 2),
    tp_units(ENGINES, 4),
    (tp(0, 1), alone(2), alone(3)),
    (alone(0), alone(1), tp(2, 3)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with two KV heads: of four members, two hold each."""
    path = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(path, CheckpointSpec(layers=2, kv_heads=2))
    return path


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    # 128 blocks an engine: leases, paused requests, pre-copies and prefix caches compete for them.
    sizes = {"precopy_tokens": 100, "kv_cache_memory_bytes": 4 << 20}
    with RealNode(model, ENGINES, max_sp=2, async_scheduling=True, **sizes) as node:
        node.script(Script.RANDOM)
        yield node


def switch_to(
    node: RealNode, partition: Partition, treatment: m.Treatment = m.Treatment.HARD
) -> None:
    view = node.switch(*partition, treatment=treatment)
    assert view.outcome == "done"
    assert node.partition == partition


def test_no_request_loses_or_repeats_a_token(node: RealNode, model: Path) -> None:
    expected = stock_tokens(model, ALL, TOKENS)
    draw = random.Random(20)
    asked: dict[str, int] = {}
    switches = 0
    for _ in range(OPERATIONS):
        if draw.random() < 0.4:
            treatment = draw.choice((m.Treatment.HARD, m.Treatment.SOFT, *[m.Treatment.CARRY] * 2))
            switch_to(node, draw.choice(PARTITIONS), treatment)
            switches += 1
        else:
            unit: Unit = draw.choice(node.partition)
            which = draw.randrange(len(ALL))
            (request,) = node.submit(unit, [ALL[which]], max_tokens=TOKENS)
            asked[request] = which
        for _ in range(draw.randrange(3)):
            node.turn(timeout=draw.choice((0.0, 0.01)))
    # Requests are paused, or wait in the pool, for units that come again now.
    for partition in PARTITIONS[:3]:
        switch_to(node, partition)
        node.wait([request for request in asked if unit_of(request) in partition])
    wrong = [request for request, which in asked.items() if node.tokens[request] != expected[which]]
    assert wrong == []
    assert len(asked) + switches == OPERATIONS
    assert min(len(asked), switches) > OPERATIONS // 4
    switch_to(node, singles(ENGINES))
    for ran in node.probe_all(probes.take_modes):
        assert min(ran.get(mode, 0) for mode in Mode) > OPERATIONS // 10, ran
    assert node.audit() == []
    # Random prompts are short, so most switches copy nothing ahead, but some do.
    assert node.controller.books.statistics.carries.precopies.total("copied") > 0
    assert all(blocks == 0 for blocks in node.controller.books.leases.opened.values())


def test_the_books_notice_a_lost_block(node: RealNode) -> None:
    """The audit above can fail."""
    with node.bound(tp(0, 1)):
        node.controller.books.leases.blocks_of(1)
        lent = node.controller.books.leases._lent[1][tp(0, 1)]
        lost = lent.pop()
        assert any("engine 1" in problem for problem in node.audit())
        lent.add(lost)
        assert node.audit() == []
