"""What a switch does with running requests: one row for each treatment.

While requests are waited for, their engines start no others. So the wait is bounded. At its end an
operator's switch is given up. A policy's switch waits no longer: it is *late*.
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
    """One row: a treatment. Cells that say what is told are asked for every unit."""

    release: Tell
    """What the leader of a unit that is dissolved is told."""
    bind: Tell
    """What the members of a new unit are told."""
    late_bind: Tell
    """The same if the switch does not wait for requests, or no longer."""
    waits_for: Callable[[UnitBook, CoreBook], bool]
    """Whether it is the requests of this core that are waited for, if it is not in the target."""
    late_release: Tell = always(PAUSE)
    """What a leader is told if the switch does not wait for requests, or no longer."""
    moves_first: bool = False
    """Whether requests on the engines of the switch are moved at its start, as far as they can go
    on elsewhere: those that are paused for another unit, too."""
    moves_late: bool = False
    """Whether requests of dissolved units are moved when the switch waits no longer."""
    lasts: bool = False
    """Whether a switch takes as long as requests run."""


def beside_or_pause(node: Node, unit: Unit) -> Told:
    """Let requests go on beside the unit if they leave it blocks to work with."""
    return BESIDE if node.capacity.leaves_room(unit) else PAUSE


def nobody(_: UnitBook, __: CoreBook) -> bool:
    """Wait for no request."""
    return False


def everybody(_: UnitBook, __: CoreBook) -> bool:
    """Wait for all requests."""
    return True


def who_runs(units: UnitBook, core: CoreBook) -> bool:
    """Wait for requests that are not paused."""
    return units.runs(core.unit)


def groups_that_run(units: UnitBook, core: CoreBook) -> bool:
    """Wait for requests of several engines that are not paused."""
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
    # What cannot be moved is waited for.
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
