"""What the benchmark of the loop claims, in virtual time."""

import pytest

from runtime.config import QUEUED_AHEAD
from runtime.simulation import bench


@pytest.mark.parametrize("seats", [1, 16])
def test_a_unit_that_is_given_one_ahead_never_idles_between_two_steps(seats: int) -> None:
    assert bench.idle_seconds(seats, QUEUED_AHEAD) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seats", [1, 16])
def test_a_unit_that_is_given_none_ahead_idles_for_a_round_trip(seats: int) -> None:
    assert bench.idle_seconds(seats, 0) == pytest.approx(2 * bench.HARDWARE.message_seconds)


def test_the_controller_is_measured_with_every_seat_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WAITING", 300)
    monkeypatch.setattr(bench, "SEATS", 4)
    seconds = bench.controller_seconds()
    assert len(seconds) == 2
    assert all(value > 0 for value in seconds.values())
