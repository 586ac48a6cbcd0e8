"""What a system's command says of it."""

import pytest

from policies.shift import DEFAULT_THRESHOLD
from server.bench.systems import SHOAL, System, dp_layout


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        ((), DEFAULT_THRESHOLD),
        (("--shift-threshold", "512", "--max-sp", "2"), 512),
        (("--shift-threshold=off", "--shift-threshold=auto"), "auto"),
        (("--shift-threshold", "fish"), "fish"),
        (("--shift-thresholds", "1"), DEFAULT_THRESHOLD),
    ],
)
def test_the_threshold_as_served_is_read_from_the_command(
    options: tuple[str, ...], threshold: int | str
) -> None:
    system = System(SHOAL, ("serve", *options), (dp_layout(2, pinned=False),), switches=True)
    assert system.shift_threshold == threshold


@pytest.mark.parametrize(
    ("options", "max_sp"),
    [((), 1), (("--max-sp=1",), 1), (("--max-sp=4",), 4), (("--max-sp", "2", "--x"), 2)],
)
def test_the_degree_of_sp_as_served_is_read_from_the_command(
    options: tuple[str, ...], max_sp: int
) -> None:
    system = System(SHOAL, ("serve", *options), ())
    assert (system.max_sp, system.shifts) == (max_sp, max_sp > 1)
