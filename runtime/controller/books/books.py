"""All books of one controller, for its parts that need what it knows."""

from dataclasses import dataclass

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.level import Level
from shoal.runtime.controller.books.carry_book import CarryBook
from shoal.runtime.controller.books.engine_book import EngineBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.leases import Leases
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.prefix_book import PrefixBook
from shoal.runtime.controller.books.request_book import RequestBook
from shoal.runtime.controller.books.statistics import Statistics
from shoal.runtime.controller.books.unit_book import UnitBook


@dataclass(frozen=True)
class Books:
    """What the controller knows. Each book is changed only by its own methods."""

    engines: EngineBook
    units: UnitBook
    requests: RequestBook
    prefixes: PrefixBook
    carries: CarryBook
    leases: Leases
    statistics: Statistics

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant."""
        return [
            *self.units.check_integrity(len(self.engines)),
            *self.requests.check_integrity(),
            *self.leases.check_integrity(),
        ]


def open_books(env: Environment) -> Books:
    """Return the books of a node whose engines have not started yet."""
    config = env.config
    returns, level = config.restart_limit > 0, Level(config.share_weights)
    engines = EngineBook(config.engines, returns=returns, level=level)
    units = UnitBook(config.engines)
    leases = Leases(engines, units, env.transport)
    prefixes = PrefixBook(lambda unit: _tokens_of(books, unit))
    books = Books(
        engines,
        units,
        RequestBook(units, TaskPool(config.aging_seconds), prefixes),
        prefixes,
        CarryBook(),
        leases,
        Statistics(config.layouts),
    )
    return books


def _tokens_of(books: Books, unit: Unit) -> int:
    """Return how many tokens the blocks hold that a unit has, or gets before it evicts anything.

    A bound group is lent all blocks that its members have free. It is 0 if an engine is gone, or if
    groups still have more of its blocks than it will keep (``MemoryChanges``).
    """
    engines, leases = books.engines, books.leases
    if engines.gone.intersection(unit.engines):
        return 0
    if unit.is_group:
        blocks = leases.opened.get(unit, 0)
    else:
        blocks = engines.num_blocks(unit.leader) - sum(leases.lent_by(unit.leader).values())
    if unit in books.units.bound:
        loads = [books.requests.core(alone(engine)).load for engine in unit.engines]
        blocks += min(0 if load is None else load.free_blocks for load in loads)
    return engines.limits(unit).tokens(max(0, blocks))
