"""A random life of a node of four real engines: requests, and all that regroups or moves them.

``test_real_random`` leads it with the V1 model runner, ``v2_main`` with V2. Every token is
compared with stock vLLM's. ``SHOAL_RANDOM_OPERATIONS`` in the environment says how many operations
there are, and ``SHOAL_RANDOM_SEED`` what they are drawn from.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit, alone, tier_of
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import how_many
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED
from tests.runtime.engine.real_node import RealNode, unit_of
from tests.runtime.engine.scripted_shift import steps_ahead
from tests.units import tp, tp_units

ENGINES = 4
SPEC = CheckpointSpec(layers=2, kv_heads=2)
OPERATIONS = how_many("SHOAL_RANDOM_OPERATIONS", few=500, many=2000)
SEED = int(os.environ.get("SHOAL_RANDOM_SEED", "20"))
TOKENS = 12
ALL = PROMPTS + SHARED

PARTITIONS: tuple[Partition, ...] = (
    singles(ENGINES),
    tp_units(ENGINES, 2),
    tp_units(ENGINES, 4),
    (tp(0, 1), alone(2), alone(3)),
    (alone(0), alone(1), tp(2, 3)),
)
DIRECTIONS = {
    f"{source} to {target}"
    for source in ("dp", "tp2", "tp4")
    for target in ("dp", "tp2", "tp4")
    if (source, target) != ("tp4", "tp4")
}
"""From which layout to which requests are carried; there are no two groups of four."""

# 128 blocks an engine: leases, paused requests, pre-copies and prefix caches compete for them.
NODE: dict[str, Any] = {
    "max_sp": 2,
    "async_scheduling": True,
    "precopy_tokens": 100,
    "kv_cache_memory_bytes": 4 << 20,
    "tier_bytes": 1 << 20,
}
"""What a node is started with."""


MOST_TIMES = 4
"""How many times as long a life may be, if it has not seen everything before."""


class Lived(msgspec.Struct):
    """What a life has seen, once all of its requests have ended."""

    counts: dict[str, int]
    """Requests, switches, drains, moves because of uneven load, and moves from tiers or to them."""
    wrong: list[str]
    """Requests whose tokens are not stock's."""
    directions: dict[str, int]
    """Requests that were carried, by the layouts that they came from and went to."""
    computed_twice: int
    """Requests that were carried without their KV."""
    precopies: int
    """Carries of which something was copied ahead."""
    parked: int
    """Requests whose KV has waited in the host's memory."""
    modes: list[dict[str, int]]
    """Steps of each engine, by how they ran."""
    seated: int
    """Requests that got a row of a V2 model runner before their step, in all runners."""
    steps_ahead: bool
    """Whether steps were scheduled ahead of an older one's outcome."""
    problems: list[str]
    """What audits found."""
    lent: int
    """Blocks that groups still have, though all engines are alone."""


def make_model(directory: Path) -> Path:
    """Write a model with two KV heads: of four members, two hold each."""
    path = directory / "two-kv-heads"
    write_checkpoint(path, SPEC)
    return path


def switch_to(
    node: RealNode, partition: Partition, treatment: m.Treatment = m.Treatment.HARD
) -> None:
    """Switch, and see that the node is in this partition then."""
    view = node.switch(*partition, treatment=treatment)
    assert view.outcome == "done"
    assert node.partition == partition


def moves(node: RealNode) -> list[tuple[Unit, Unit]]:
    """Return the units that have requests, each with every other one of its layout."""
    cores = node.controller.books.requests.cores
    return [
        (one, other)
        for one, other in itertools.permutations(node.partition, 2)
        if one.layout == other.layout and one in cores and cores[one].requests
    ]


def ways_of_tiers(node: RealNode) -> list[tuple[Unit, Unit]]:
    """Return the ways on which requests can go to tiers now, or leave them."""
    cores, units = node.controller.books.requests.cores, node.partition
    tiers = [tier_of(engine) for engine in range(ENGINES)]
    there = [(alone(tier.leader), tier) for tier in tiers if alone(tier.leader) in units]
    back = [(tier, unit) for tier in tiers for unit in units]
    return [way for way in there + back if way[0] in cores and cores[way[0]].requests]


class _Life:
    """One life of a node: what was asked of it, and what was seen."""

    def __init__(self, node: RealNode, seed: int, partitions: Sequence[Partition]) -> None:
        self.node, self.partitions = node, partitions
        self.draw, self.counts = random.Random(seed), Counter[str]()
        self.carries = node.controller.books.statistics.carries
        self.asked: dict[str, int] = {}
        self.directions, self.problems = Counter[str](), list[str]()

    def note(self, _engine: int, message: m.Message) -> None:
        """See which ways requests go."""
        if isinstance(message, m.Import) and message.requests:
            way = f"{message.source.layout.name} to {message.unit.layout.name}"
            self.directions[way] += len(message.requests)

    @property
    def saw_tiers_and_precopies(self) -> bool:
        return (
            self.carries.tier_requests.total("parked") > 0
            and self.carries.precopies.total("copied") > 0
        )

    def operate(self) -> None:
        """Do one thing at random, and let the controller take some turns."""
        chance, draw, node = self.draw.random(), self.draw, self.node
        if chance < 0.4:
            treatment = draw.choice((m.Treatment.HARD, m.Treatment.SOFT, *[m.Treatment.CARRY] * 2))
            switch_to(node, draw.choice(self.partitions), treatment)
            self.counts["switches"] += 1
        elif chance < 0.45:
            self._drain(draw.randrange(ENGINES))
        elif chance < 0.55 and (pairs := moves(node)):
            node.even_out(*draw.choice(pairs))
            self.counts["moves"] += 1
        elif chance < 0.61 and (ways := ways_of_tiers(node)):
            source, destination = draw.choice(ways)
            if source in node.partition:  # what runs there may end before the tier has room
                node.wait_for_tokens(self._submit(source), 1)
            node.move(source, destination, 3)
            self.counts["tiers"] += 1
        else:
            self._submit(draw.choice(node.partition))
            self.counts["requests"] += 1
        for _ in range(draw.randrange(3)):
            node.turn(timeout=draw.choice((0.0, 0.01)))

    def _submit(self, unit: Unit) -> list[str]:
        which = self.draw.randrange(len(ALL))
        requests = self.node.submit(unit, [ALL[which]], max_tokens=TOKENS)
        self.asked |= dict.fromkeys(requests, which)
        return requests

    def _drain(self, engine: int) -> None:
        self.node.drain(engine, drained=True)
        if self.draw.random() < 0.5:
            self.node.until(lambda: not self.node.drain(engine, drained=True), "an empty engine")
        self.node.drain(engine, drained=False)
        self.problems += self.node.audit()  # which waits until the engine's groups are released
        self.counts["drains"] += 1

    def end(self) -> None:
        """Let all requests end: they are paused, parked or wait in the pool for their units."""
        while left := sorted(self.asked.keys() - self.node.finished.keys()):
            units = {request: self._unit_now(request) for request in left}
            first = units[left[0]]
            partition = next(one for one in self.partitions if first in one)
            switch_to(self.node, partition)
            for tier in map(tier_of, range(ENGINES)):
                if alone(tier.leader) in partition and self._held(tier):
                    self.node.move(tier, alone(tier.leader), len(self._held(tier)))
            self.node.wait([request for request in left if units[request] in partition])
        switch_to(self.node, singles(ENGINES))

    def _unit_now(self, request: str) -> Unit:
        """Return the unit that has a request, or that it wants; an engine for its tier."""
        cores = self.node.controller.books.requests.cores
        unit = next((unit for unit in cores if request in self._held(unit)), unit_of(request))
        return alone(unit.leader) if unit.tier else unit

    def _held(self, unit: Unit) -> Collection[str]:
        core = self.node.controller.books.requests.cores.get(unit)
        return core.requests if core else ()


def live(
    node: RealNode,
    expected: list[list[int]],
    operations: int,
    seed: int = SEED,
    partitions: Sequence[Partition] = PARTITIONS,
    enough: Callable[[Collection[str]], bool] = lambda _: True,
    everything: bool = False,
) -> Lived:
    """Do so many things at random, and bring all requests to their end.

    What requests meet depends on how fast the engines are. So a life goes on, up to ``MOST_TIMES``
    as long, until it has seen what it is to see.

    Args:
        node: a node as ``NODE`` says.
        expected: what stock vLLM generates for ``ALL``.
        operations: requests, switches, drains and moves together.
        seed: of what is drawn.
        partitions: what the node switches to.
        enough: whether the directions in which requests have gone are all that it is to see.
        everything: whether requests are to go to tiers, too, and with blocks that were copied
            ahead.
    """
    life = _Life(node, seed, partitions)
    node.transport.before_send = life.note
    for done in range(operations * MOST_TIMES):
        saw = enough(life.directions) and (life.saw_tiers_and_precopies or not everything)
        if done >= operations and saw:
            break
        life.operate()
    life.end()
    node.transport.before_send = lambda _engine, _message: None
    return Lived(
        counts=dict(life.counts),
        wrong=[name for name, which in life.asked.items() if node.tokens[name] != expected[which]],
        directions=dict(life.directions),
        computed_twice=life.carries.fallbacks.total(),
        precopies=life.carries.precopies.total("copied"),
        parked=life.carries.tier_requests.total("parked"),
        modes=[
            {mode: ran.get(mode, 0) for mode in Mode} for ran in node.probe_all(probes.take_modes)
        ],
        seated=sum(node.probe_all(probes.seated)),
        steps_ahead=any(steps_ahead(node.config, engine) for engine in range(ENGINES)),
        problems=life.problems + node.audit(),
        lent=sum(node.controller.books.leases.opened.values()),
    )
