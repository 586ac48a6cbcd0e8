"""Short names for units, for tests that write many of them."""

from shoal.policies.values.layouts import Layout, Unit, tensor_parallel
from shoal.policies.values.partition import Partition, units_of


def tp(*engines: int) -> Unit:
    """Return the TP unit of these engines: ``tp(0, 1)``."""
    return tensor_parallel(engines)


def pp(*engines: int, stages: int | None = None) -> Unit:
    """Return the unit of these engines with a stage for each of them, or with so many stages."""
    count = stages or len(engines)
    return Unit(engines, Layout(tp=len(engines) // count, pp=count))


def tp_units(engines: int, size: int) -> Partition:
    """Return the TP units of a size among so many engines: ``tp_units(4, 2)``."""
    return units_of(engines, Layout(tp=size))
