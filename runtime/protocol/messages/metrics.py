"""Counters and histograms without ``prometheus_client``, and the form in which they are sent.

Recording one value is a dictionary look-up and an addition. A front end turns families into
Prometheus' text (``server/operator/metrics_page.py``); ``docs/metrics.md`` lists their names.
"""

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TypeVar

import msgspec

from shoal.policies.values.snapshot import NORMAL_PRIORITY

PRIORITY_CLASSES = ("urgent", "normal", "background")
"""The values of the label ``priority``, most urgent first."""

Labels = tuple[str, ...]
"""The values of a family's labels, in their order."""
NO_LABELS: Mapping[str, Iterable[str]] = {}
L = TypeVar("L", bound=Labels)


def priority_class(priority: int) -> str:
    """Return the class of a request's priority, one of ``PRIORITY_CLASSES``."""
    if priority == NORMAL_PRIORITY:
        return "normal"
    return "urgent" if priority < NORMAL_PRIORITY else "background"


class Kind(enum.StrEnum):
    """A metric's type, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sample(msgspec.Struct, frozen=True):
    """One series of a family."""

    labels: Labels
    value: float
    """The value; for a histogram, the sum of its observations."""
    counts: tuple[int, ...] = ()
    """For a histogram: the number of observations in each bucket, the one without bound last."""


class Family(msgspec.Struct, frozen=True):
    """All series of one metric."""

    name: str
    """The name as on the metrics page, without the endings of a histogram's series."""
    kind: Kind
    documentation: str
    labels: Labels
    """Names of the labels."""
    samples: list[Sample]
    bounds: tuple[float, ...] = ()
    """For a histogram: inclusive upper bounds of its buckets, ascending."""


class EngineGauges(msgspec.Struct, frozen=True):
    """What vLLM's gauges show for one engine (``docs/metrics.md``, vLLM's metrics)."""

    engine: int
    running: int
    waiting: int
    """Requests that wait for capacity: those in the engine's queue, and its share of the pool's."""
    deferred: int
    """Paused requests."""
    kv_cache_usage: float
    """Fraction of the engine's KV blocks that requests hold, from 0 to 1."""


class Counter:
    """A counter with labels.

    Args:
        name: its name, which ends in ``_total``.
        documentation: one sentence.
        labels: the values of each label, by its name. Every combination has a series from the
            start. Further values may be counted.
    """

    def __init__(
        self, name: str, documentation: str, labels: Mapping[str, Iterable[str]] = NO_LABELS
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._values: dict[Labels, float] = dict.fromkeys(product(*labels.values()), 0)

    def add(self, *labels: str, amount: float = 1) -> None:
        """Add ``amount`` to the series with these label values."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def total(self, *labels: str) -> float:
        """Return the sum of the series whose first labels have these values."""
        return sum(v for known, v in self._values.items() if known[: len(labels)] == labels)

    def family(self) -> Family:
        """Return the counter as it is now."""
        samples = [Sample(labels, value) for labels, value in sorted(self._values.items())]
        return Family(self._name, Kind.COUNTER, self._documentation, self._labels, samples)


class Histogram:
    """A histogram with labels and fixed buckets.

    Args:
        name: its name, which ends in a base unit, such as ``_seconds``.
        documentation: one sentence.
        bounds: inclusive upper bounds of the buckets, ascending, without infinity.
        labels: as for a ``Counter``.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        labels: Mapping[str, Iterable[str]] = NO_LABELS,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._labels = tuple(labels)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        for values in product(*labels.values()):
            self._series(values)

    def observe(self, value: float, *labels: str) -> None:
        """Count a value."""
        self._series(labels)[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def _series(self, labels: Labels) -> list[int]:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        return counts

    def family(self) -> Family:
        """Return the histogram as it is now."""
        samples = [
            Sample(labels, self._sums[labels], tuple(counts))
            for labels, counts in sorted(self._counts.items())
        ]
        return Family(
            self._name,
            Kind.HISTOGRAM,
            self._documentation,
            self._labels,
            samples,
            self._bounds,
        )


def gauge(
    name: str, documentation: str, labels: Sequence[str], values: Mapping[L, float]
) -> Family:
    """Return a gauge; ``values`` are its values by the values of its labels."""
    return _family(name, Kind.GAUGE, documentation, labels, values)


def counter(
    name: str, documentation: str, labels: Sequence[str], values: Mapping[L, float]
) -> Family:
    """Return a counter whose current values are kept elsewhere; see ``gauge``."""
    return _family(name, Kind.COUNTER, documentation, labels, values)


def _family(
    name: str,
    kind: Kind,
    documentation: str,
    labels: Sequence[str],
    values: Mapping[L, float],
) -> Family:
    samples = [Sample(key, value) for key, value in sorted(values.items())]
    return Family(name, kind, documentation, tuple(labels), samples)
