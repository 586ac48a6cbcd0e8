"""What a switch does with running requests: one row for each treatment.

While a switch waits for requests, their engines start no others, so the wait is bounded. At the end
of the wait an operator's switch gives up. A policy's switch goes on without waiting: it is *late*.
"""

from collections.abc import Callable, Mapping

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.unit_book import UnitBook
from shoal.runtime.controller.switching.moves import Node, Tell, Told, always
from shoal.runtime.protocol.messages import Treatment

WAIT = Told(Treatment.SEQUENTIAL, waits=True)
PAUSE = Told(Treatment.HARD)
BESIDE = Told(Treatment.INTERLEAVE, interleaves=True)


class Rules(msgspec.Struct, frozen=True):
    """One row: a treatment. The cells of type ``Tell`` are called for every unit."""

    release: Tell
    """What the leader of a dissolved unit is told."""
    bind: Tell
    """What the members of a new unit are told."""
    late_bind: Tell
    """What they are told if the switch does not, or no longer, wait for requests."""
    waits_for: Callable[[UnitBook, CoreBook], bool]
    """Whether the switch waits for the requests of this core, whose unit the target lacks."""
    late_release: Tell = always(PAUSE)
    """What a leader is told if the switch does not, or no longer, wait for requests."""
    moves_first: bool = False
    """Whether the switch begins by moving all movable requests on its engines, including those that
    are paused for another unit."""
    moves_late: bool = False
    """Whether the switch moves requests of dissolved units when it no longer waits for them."""
    lasts: bool = False
    """Whether a switch takes as long as requests run."""


def beside_or_pause(node: Node, unit: Unit) -> Told:
    """Let requests go on beside the unit if they leave it enough blocks, otherwise pause them."""
    return BESIDE if node.capacity.leaves_room(unit) else PAUSE


def nobody(_: UnitBook, __: CoreBook) -> bool:
    """Wait for no request."""
    return False


def everybody(_: UnitBook, __: CoreBook) -> bool:
    """Wait for all requests."""
    return True


def who_runs(units: UnitBook, core: CoreBook) -> bool:
    """Wait for all requests that are not paused."""
    return units.runs(core.unit)


def groups_that_run(units: UnitBook, core: CoreBook) -> bool:
    """Wait for requests of groups that are not paused."""
    return core.unit.is_group and units.runs(core.unit)


TREATMENTS: Mapping[Treatment, Rules] = {
    Treatment.SEQUENTIAL: Rules(
        release=always(WAIT),
        bind=always(WAIT),
        late_bind=beside_or_pause,
        waits_for=who_runs,
        moves_late=True,
        lasts=True,
    ),
    # The switch waits for the requests that cannot be moved.
    Treatment.SOFT: Rules(
        release=always(WAIT),
        bind=always(WAIT),
        late_bind=beside_or_pause,
        waits_for=everybody,
        moves_first=True,
    ),
    Treatment.HARD: Rules(
        release=always(PAUSE),
        bind=always(PAUSE),
        late_bind=always(PAUSE),
        waits_for=nobody,
    ),
    Treatment.INTERLEAVE: Rules(
        release=always(WAIT),
        bind=always(BESIDE),
        late_bind=beside_or_pause,
        waits_for=groups_that_run,
        moves_late=True,
        lasts=True,
    ),
}
