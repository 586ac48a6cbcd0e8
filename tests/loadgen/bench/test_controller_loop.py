"""What the benchmark of the loop claims, in virtual time."""

import pytest

from shoal.loadgen.bench import controller_loop
from shoal.runtime.config import QUEUED_AHEAD


@pytest.mark.parametrize("seats", [1, 16])
def test_a_unit_that_is_given_one_ahead_never_idles_between_two_steps(seats: int) -> None:
    assert controller_loop.idle_seconds(seats, QUEUED_AHEAD) == pytest.approx(0.0, abs=1e-9)


def test_a_unit_that_is_given_none_ahead_idles_for_a_round_trip() -> None:
    round_trip = 2 * controller_loop.HARDWARE.message_seconds
    assert controller_loop.idle_seconds(1, 0) == pytest.approx(round_trip)
    # A request that comes late waits for a step of the others, so not all seats end together.
    assert 0 < controller_loop.idle_seconds(16, 0) < round_trip


def test_the_controller_is_measured_with_every_seat_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_loop, "WAITING", 300)
    monkeypatch.setattr(controller_loop, "SEATS", 4)
    seconds = controller_loop.controller_seconds()
    assert len(seconds) == 2
    assert all(value > 0 for value in seconds.values())
