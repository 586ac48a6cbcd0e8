"""All books of one controller, for its parts that need what it knows."""

from dataclasses import dataclass

from shoal.runtime.controller.books.carry_book import CarryBook
from shoal.runtime.controller.books.engine_book import EngineBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.leases import Leases
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.request_book import RequestBook
from shoal.runtime.controller.books.statistics import Statistics
from shoal.runtime.controller.books.unit_book import UnitBook


@dataclass(frozen=True)
class Books:
    """What the controller knows. Each book is changed only by its own methods."""

    engines: EngineBook
    units: UnitBook
    requests: RequestBook
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
    engines = EngineBook(config.engines, returns=config.restart_limit > 0)
    units = UnitBook(config.engines)
    return Books(
        engines,
        units,
        RequestBook(units, TaskPool(config.aging_seconds)),
        CarryBook(),
        Leases(engines, units, env.transport),
        Statistics(config.layouts),
    )
