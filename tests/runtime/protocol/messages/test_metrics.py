"""What a process counts, and that it travels."""

import msgspec
import pytest

from shoal.runtime.protocol.messages import NodeMetrics, decode_from_controller, encode
from shoal.runtime.protocol.messages.metrics import (
    Counter,
    EngineGauges,
    Family,
    Histogram,
    Kind,
    Sample,
    gauge,
    priority_class,
)


@pytest.mark.parametrize(
    ("priority", "name"),
    [(-(2**31), "urgent"), (-1, "urgent"), (0, "normal"), (1, "background"), (99, "background")],
)
def test_the_class_of_a_priority_is_its_sign(priority: int, name: str) -> None:
    assert priority_class(priority) == name


def test_a_counter_counts_by_label() -> None:
    counter = Counter("x_total", "X.", {"a": ("1", "2"), "b": ("3",)})
    counter.add("2", "3")
    counter.add("2", "3", amount=4)
    counter.add("5", "6")
    assert counter.family() == Family(
        "x_total",
        Kind.COUNTER,
        "X.",
        ("a", "b"),
        [Sample(("1", "3"), 0), Sample(("2", "3"), 5), Sample(("5", "6"), 1)],
    )
    assert (counter.total("2"), counter.total()) == (5, 6)


def test_without_labels_there_is_a_series_from_the_start() -> None:
    assert Counter("x_total", "X.").family().samples == [Sample((), 0)]
    assert Histogram("x_seconds", "X.", (1, 2)).family().samples == [Sample((), 0, (0, 0, 0))]


def test_a_histogram_counts_a_bound_into_its_bucket() -> None:
    histogram = Histogram("x_seconds", "X.", (1, 2), {"a": ("y", "z")})
    for value in (0.5, 1, 1.5, 2, 2.5, 99):
        histogram.observe(value, "z")
    family = histogram.family()
    assert family.bounds == (1, 2)
    assert family.samples == [Sample(("y",), 0, (0, 0, 0)), Sample(("z",), 106.5, (2, 2, 2))]


def test_a_family_is_a_picture_and_does_not_change() -> None:
    histogram = Histogram("x_seconds", "X.", (1,))
    before = histogram.family()
    histogram.observe(0.5)
    assert before.samples == [Sample((), 0, (0, 0))]


def test_families_travel() -> None:
    histogram = Histogram("x_seconds", "X.", (1, 2), {"a": ()})
    histogram.observe(1.5, "z")
    families = [histogram.family(), gauge("y", "Y.", ("b",), {("1",): 2.5})]
    message = NodeMetrics(3, families, [EngineGauges(0, 1, 2, 3, 0.5)])
    assert decode_from_controller(encode(message)) == message
    assert msgspec.json.decode(msgspec.json.encode(message), type=NodeMetrics) == message
