"""One long random life of a node: switches, requests, aborts and audits in any order of arrival."""

import random
from collections.abc import Sequence
from typing import get_args

import pytest

from shoal.policies import registry
from shoal.policies.shift import ShiftRule
from shoal.policies.static import dispatch_least_loaded, with_singles
from shoal.policies.values.layouts import Unit, alone, layouts_up_to, unit_of
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Plan, Policy, TreatmentName
from shoal.policies.values.snapshot import Move, Snapshot
from shoal.runtime.controller.books.demand import SwitchBudget
from shoal.runtime.controller.requests import pauses
from shoal.runtime.protocol.messages import (
    AuditDone,
    AuditNode,
    CallFailed,
    SetPolicy,
    SetShiftThreshold,
    SwitchDone,
    Treatment,
)
from tests.runtime.loopback_node import LoopbackNode

MOST_MISSING = 40
"""Requests under way at once: enough to fill every batch and the pool."""

KINDS: list[dict[str, int]] = [{}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}]
"""What requests ask for beside tokens."""


def random_partition(
    rng: random.Random, engines: int, max_group: int, max_pp: int = 1
) -> Partition:
    """Draw an aligned partition: each aligned run is taken whole or split in halves."""

    def split(first: int, size: int) -> list[Unit]:
        if size == 1 or (size <= max_group and rng.random() < 0.4):
            layouts = [of for of in layouts_up_to(size, max_pp) if of.world_size == size]
            layout = layouts[0] if len(layouts) == 1 else rng.choice(layouts)
            return [unit_of(first, layout)]
        return split(first, size // 2) + split(first + size // 2, size // 2)

    return tuple(split(0, engines))


def random_moves(rng: random.Random, seen: Snapshot) -> tuple[Move, ...]:
    """Draw up to three moves between units, most often none; also from tiers and to them."""
    units, tiers = seen.partition, [state.unit for state in seen.tiers]
    if len(units) < 2 and not tiers:
        return ()
    count = rng.choice([0, 0, 0, 1, 3])
    return tuple(Move(*_way(rng, units, tiers), rng.randrange(1, 4)) for _ in range(count))


def _way(rng: random.Random, units: Partition, tiers: Sequence[Unit]) -> tuple[Unit, Unit]:
    """Draw a source and a destination."""
    there = [(alone(tier.leader), tier) for tier in tiers if alone(tier.leader) in units]
    back = [(tier, unit) for tier in tiers for unit in units]
    if tiers and (len(units) < 2 or rng.random() < 0.7):
        return rng.choice(there if there and rng.random() < 0.5 else back)
    source, destination = rng.sample(units, 2)
    return source, destination


def hasty(monkeypatch: pytest.MonkeyPatch, seed: int) -> str:
    """Register a policy of random switches and moves; return its name.

    It waits for nobody for long. Requests that it pauses are soon carried to units that are there,
    and it has no budget.
    """
    rng = random.Random(seed)

    def plan(seen: Snapshot, /) -> Plan:
        dispatches = dispatch_least_loaded(seen)
        if seen.switching or rng.random() > 0.1:
            return Plan(dispatches, moves=random_moves(rng, seen))
        target = with_singles(seen, random_partition(rng, seen.engines, seen.max_group))
        return Plan(dispatches, target, rng.choice(get_args(TreatmentName)))

    monkeypatch.setattr(SwitchBudget, "allows", lambda *_: True)
    monkeypatch.setattr(pauses, "PAUSE_SECONDS", 0.3)
    monkeypatch.setitem(registry.POLICIES, "hasty", Policy("hasty", plan, decides_layout=True))
    return "hasty"


class RandomRun:
    """Acts at random on a node, and brings everything to its end.

    Args:
        node: whose ``rng`` decides what happens.
        decided: whether a policy decides the layout: else it is drawn here.
        treatments: what is drawn for switches.
    """

    def __init__(
        self,
        node: LoopbackNode,
        *,
        decided: bool = False,
        treatments: Sequence[Treatment] = tuple(Treatment),
    ) -> None:
        self.node = node
        self._treatments = treatments
        self._decided = decided
        self.switches: list[SwitchDone | CallFailed] = []
        self.audits: list[AuditDone] = []
        self.shifts = 0
        """Changes of the threshold between TP and SP."""
        self.changes = 0
        """Groups bound or released, and thresholds changed, so far."""
        self._switch: int | None = None
        self._audit: int | None = None
        node.settle()

    @property
    def operations(self) -> int:
        """Requests sent, and changes, so far."""
        return len(self.node.prompts) + self.changes

    def act(self) -> None:
        """Do one thing, and let some processes have some turns."""
        node, rng = self.node, self.node.rng
        draw = rng.random()
        if draw < 0.45 and len(node.missing) < MOST_MISSING:
            number = len(node.prompts)
            prompt = rng.randrange(200, 380) if rng.random() < 0.05 else rng.randrange(1, 50)
            tokens, priority = rng.randrange(1, 20), rng.randrange(3)
            kind = rng.choice(KINDS)
            node.send(f"r{number}", prompt, tokens, priority=priority, **kind)
        elif draw < 0.5 and node.missing:
            node.abort(rng.choice(node.missing))
        elif draw < 0.55 and self._audit is None:
            self._audit = node.call(AuditNode)
        elif draw < 0.6 and node.config.max_sp > 1:
            node.call(SetShiftThreshold, rng.choice([ShiftRule.OFF, 0, 10, 100]))
            self.shifts += 1
            self.changes += 1
        elif self._switch is None and not self._decided:
            units = random_partition(
                rng, node.config.engines, node.config.max_group, node.config.max_pp
            )
            treatment = rng.choice(self._treatments)
            self._switch = node.set_layout(*units, treatment=treatment, timeout=0.2)
        for _ in range(rng.randrange(12)):
            node.step()
        node.clock.advance(rng.choice([0.0, 0.0, 0.01, 0.02]))
        node.collect()
        self._read_replies()

    def finish(self) -> None:
        """Give every unit its turn until every request has ended, then leave all engines alone."""
        self.decide()
        node, engines = self.node, self.node.config.engines
        node.run_for(2.0)
        self._read_replies()
        for _ in range(20):
            for layout in reversed(node.config.layouts):
                node.switch(*units_of(engines, layout))
                node.run_for(0.2)
            if not node.missing:
                break
        node.run_for(2.0)

    def decide(self) -> None:
        """Leave the layout to the test from now on."""
        self.node.call(SetPolicy, "manual")
        self.node.settle()

    def _read_replies(self) -> None:
        if self._switch is not None and (reply := self.node.reply(self._switch)) is not None:
            assert isinstance(reply, SwitchDone | CallFailed)
            self.switches.append(reply)
            if isinstance(reply, SwitchDone):
                changed = set(reply.switch.before) ^ set(reply.switch.after)
                self.changes += sum(len(engines) > 1 for engines in changed)
            self._switch = None
        if self._audit is not None and (reply := self.node.reply(self._audit)) is not None:
            assert isinstance(reply, AuditDone)
            self.audits.append(reply)
            self._audit = None
        # The log of replies would make every look-up slower than the one before.
        for replies in self.node.network.control_replies.values():
            replies.clear()
