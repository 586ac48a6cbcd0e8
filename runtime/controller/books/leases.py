"""Which blocks each engine says that it has lent to which group, and how leases grow.

The engines hold the blocks. This book records what their state must be, and ``audit.py`` compares.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.audit import Audit
from shoal.runtime.controller.books.engine_book import EngineBook
from shoal.runtime.controller.books.unit_book import UnitBook
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import ControllerTransport


class Growth(msgspec.Struct):
    """A group's wish for blocks, while its members are answering it."""

    epoch: int
    lent: dict[int, list[int]] = {}
    left: int = 0
    """Blocks that its members are asked for when they have answered."""


class Leases:
    """The book of all leases; it also sends the messages that move blocks outside a switch.

    Args:
        engines: knows which engines are gone.
        units: has the epochs of bound units.
        transport: carries messages to the engines.
    """

    def __init__(
        self, engines: EngineBook, units: UnitBook, transport: ControllerTransport
    ) -> None:
        self.opened: dict[Unit, int] = {}
        """Virtual blocks that each group's leader has been given and has not returned."""
        self.problems: list[str] = []
        """Reports of engines that cannot be true."""
        self._audit: Audit | None = None
        self._engines = engines
        self._units = units
        self._transport = transport
        self._lent: list[dict[Unit, set[int]]] = [{} for _ in engines]
        self._growths: dict[Unit, Growth] = {}
        self._read_into: Counter[Unit] = Counter()
        """Readings into the blocks of each group that have not ended."""
        self._orphans: dict[Unit, dict[int, list[int]]] = {}
        """Blocks of groups whose leaders have died, by the member that has lent them, until nobody
        reads into them any more."""

    def follow(self, audit: Audit | None) -> None:
        """Tell a running audit of every change from now on; None: the audit is over."""
        self._audit = audit

    # --- books --------------------------------------------------------------------------------

    def lent_by(self, engine: int) -> dict[Unit, int]:
        """Return how many blocks an engine has lent, by group."""
        return {group: len(blocks) for group, blocks in self._lent[engine].items() if blocks}

    def holds(self, group: Unit) -> bool:
        """Return whether this book has any blocks of a group's lease, at its leader or a member."""
        return bool(self.opened.get(group)) or any(self._lent[e].get(group) for e in group.engines)

    def blocks_of(self, engine: int) -> set[int]:
        """Return the ids of all blocks that an engine has lent."""
        return set().union(*self._lent[engine].values())

    def add(self, engine: int, group: Unit, blocks: Sequence[int]) -> None:
        """Note that an engine lent blocks."""
        twice = [block for ids in self._lent[engine].values() for block in ids & set(blocks)]
        if twice or len(set(blocks)) != len(blocks):
            self.problems.append(f"engine {engine} lent blocks twice: {sorted(twice)[:8]}")
        self._lent[engine].setdefault(group, set()).update(blocks)
        if self._audit is not None:
            self._audit.lent(engine, blocks)

    def remove(self, engine: int, group: Unit, blocks: Sequence[int]) -> None:
        """Note that blocks go back to their engine."""
        lent = self._lent[engine].setdefault(group, set())
        unknown = set(blocks) - lent
        if unknown:
            self.problems.append(
                f"unit {list(group.engines)} returned blocks that engine {engine} had not lent: "
                f"{sorted(unknown)[:8]}"
            )
        lent.difference_update(blocks)

    def open(self, group: Unit, blocks: int) -> None:
        """Note that a leader was given virtual blocks."""
        self.opened[group] = self.opened.get(group, 0) + blocks

    def close(self, group: Unit, returned: Mapping[int, Sequence[int]]) -> None:
        """Note the blocks that a leader returned; the members have not got them yet."""
        blocks = len(returned.get(group.leader, ()))
        self.opened[group] = self.opened.get(group, 0) - blocks
        if self._audit is not None:
            self._audit.closed(group, blocks)
        for engine, ids in returned.items():
            self.remove(engine, group, ids)

    def lose(self, engines: Iterable[int]) -> None:
        """Forget dead engines; survivors take back the blocks that a dead leader held."""
        dead = set(engines)
        for engine in dead:
            self._lent[engine].clear()
        for group in {*self.opened, *self._growths}:
            if group.leader in dead:
                self.opened.pop(group, None)
                self._growths.pop(group, None)
                orphans = self._orphans.setdefault(group, {})
                for engine in set(group.engines) - dead:
                    orphans[engine] = sorted(self._lent[engine].get(group, ()))
        for orphans in self._orphans.values():
            for engine in dead & orphans.keys():
                del orphans[engine]
        self._give_back_orphans()

    def hold(self, group: Unit) -> None:
        """Note that a group's blocks are read, or read into, whoever dies meanwhile."""
        self._read_into[group] += 1

    def let_go(self, group: Unit) -> None:
        """Note that a reading that ``hold`` was told of has ended."""
        self._read_into[group] -= 1
        self._give_back_orphans()

    def _give_back_orphans(self) -> None:
        """Return the blocks of groups whose leaders have died, unless somebody still reads."""
        for group in [group for group in self._orphans if not self._read_into[group]]:
            for engine, blocks in self._orphans.pop(group).items():
                self.give_back(engine, group, blocks)

    def give_back(self, engine: int, group: Unit, blocks: Sequence[int]) -> None:
        """Return blocks to the engine that lent them."""
        if blocks:
            self.remove(engine, group, blocks)
            self._transport.to_engine(engine, m.TakeBack(list(blocks)))

    def _epoch(self, group: Unit) -> int:
        return self._units.bound.get(group, 0)

    # --- growth -------------------------------------------------------------------------------

    def need(self, wish: m.NeedBlocks) -> bool:
        """Ask a bound group's members for blocks; return False if the wish comes too early or late.

        A leader may want blocks before all of its members have committed, or while the members
        still answer a wish from before the bind. Such a leader is told that there are none now,
        because one that gets no answer never asks again. A leader that has been released since
        ignores the answer.
        """
        if self._units.bound.get(wish.unit) != wish.epoch or self.grows(wish.unit):
            self._transport.to_engine(wish.unit.leader, m.Grow(wish.epoch, wish.unit, {}))
            return False
        self._ask(m.Lend(wish.epoch, wish.unit, wish.blocks, wish.urgent))
        return True

    def grow_ahead(self, group: Unit, blocks: int) -> None:
        """Ask the members of a group that is not bound, and does not grow, for blocks.

        They are asked for one portion after the other, because their steps go on meanwhile.
        """
        portion = min(blocks, m.PORTION)
        self._ask(m.Lend(m.AHEAD, group, portion, urgent=False), blocks - portion)

    def _ask(self, lend: m.Lend, left: int = 0) -> None:
        self._growths[lend.unit] = Growth(lend.epoch, left=left)
        for engine in lend.unit.engines:
            self._transport.to_engine(engine, lend)

    def grows(self, group: Unit) -> bool:
        """Return whether members of a group have still to answer its wish."""
        return group in self._growths

    def lent(self, answer: m.Lent) -> None:
        """Take a member's answer; with the last answer the lease grows by what all members lent."""
        self.add(answer.engine, answer.unit, answer.blocks)
        growth = self._growths.get(answer.unit)
        if growth is None or growth.epoch != answer.epoch:
            self.give_back(answer.engine, answer.unit, answer.blocks)
            return
        # A member's answer to a wish that was given up may come first, if both are from before the
        # bind; what it has lent twice goes back with what others have not lent.
        growth.lent[answer.engine] = [*growth.lent.get(answer.engine, ()), *answer.blocks]
        if len(growth.lent) == answer.unit.size:
            del self._growths[answer.unit]
            lease = self.even_out(answer.unit, growth.lent)
            self.open(answer.unit, len(lease[answer.engine]))
            grow = m.Grow(answer.epoch, answer.unit, lease)
            self._transport.to_engine(answer.unit.leader, grow)
            if growth.left and lease[answer.engine]:
                self.grow_ahead(answer.unit, growth.left)

    def shrink(self, group: Unit, blocks: int) -> None:
        """Ask a bound group's leader for blocks that no request holds."""
        self._transport.to_engine(group.leader, m.Shrink(self._epoch(group), group, blocks))

    def returning(self, message: m.Returning) -> None:
        """Hand a leader's returned blocks to the members that are alive."""
        dead = self._engines.gone
        returned = {e: ids for e, ids in message.returned.items() if e not in dead}
        self.close(message.unit, returned)
        for engine, blocks in returned.items():
            take = m.TakeBack(blocks)
            self._transport.to_engine(engine, take)

    def cancel(self, group: Unit) -> None:
        """Give up a group's wish because the group ends; late answers go straight back."""
        growth = self._growths.pop(group, None)
        for engine, blocks in growth.lent.items() if growth is not None else ():
            if engine not in self._engines.gone:
                self.give_back(engine, group, blocks)

    def even_out(self, group: Unit, lent: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Return the lease that all members back, and give back what some lent beyond it."""
        rows = min(len(blocks) for blocks in lent.values())
        for engine, blocks in lent.items():
            self.give_back(engine, group, blocks[rows:])
        return {engine: blocks[:rows] for engine, blocks in lent.items()}

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant."""
        problems = list(self.problems)
        for group, opened in self.opened.items():
            if group in self._growths:
                continue
            lent = {engine: len(self._lent[engine].get(group, ())) for engine in group.engines}
            dead = self._engines.gone
            if any(blocks != opened for engine, blocks in lent.items() if engine not in dead):
                problems.append(
                    f"controller: unit {list(group.engines)} has {opened} blocks of {lent}"
                )
        return problems
