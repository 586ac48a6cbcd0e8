"""A policy of tests that moves requests between the units of a split of four engines."""

from collections.abc import Callable
from dataclasses import replace

from shoal.policies.static import dispatch_least_loaded
from shoal.policies.values.layouts import alone
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import Move, Snapshot
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

SOURCE, GROUP, OTHER = alone(2), tp(0, 1), alone(3)
PARTITION = (GROUP, SOURCE, OTHER)


class Script:
    """A policy that keeps the split, starts everything on one engine, and moves what it is told.

    Args:
        moves_while_dead: whether it also moves requests while an engine is dead.
        options: of the ``Policy``.
    """

    def __init__(self, *, moves_while_dead: bool = False, **options: bool) -> None:
        self.moves: Callable[[Snapshot], tuple[Move, ...]] = lambda _: ()
        self.moves_while_dead = moves_while_dead
        self.seen: list[Snapshot] = []
        self.policy = Policy("script", self.plan, decides_layout=True, **options)

    def plan(self, snapshot: Snapshot, /) -> Plan:
        self.seen.append(snapshot)
        if snapshot.dead:
            moves = self.moves(snapshot) if self.moves_while_dead else ()
            return Plan(dispatch_least_loaded(snapshot), moves=moves)
        if snapshot.partition != PARTITION:
            return Plan(target=None if snapshot.switching else PARTITION)
        only = (replace(u, serving=u.serving and u.unit == SOURCE) for u in snapshot.units)
        starts = dispatch_least_loaded(replace(snapshot, units=tuple(only)))
        return Plan(starts, moves=self.moves(snapshot))

    def always(self, *moves: Move) -> None:
        self.moves = lambda _: moves


def turns(node: LoopbackNode, count: int, seconds: float = 0.0) -> None:
    """Let so much time pass so often, and the controller and its engines do what is due."""
    for _ in range(count):
        node.clock.advance(seconds)
        node.controller.turn()
        for engine in sorted(set(node.agents) - node.hung):
            node.turn_agent(engine)
        node.collect()
