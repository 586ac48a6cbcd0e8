"""The benchmark's arithmetic and its table; what it measures is no test's business."""

import pytest

from shoal.loadgen.bench import idle_switch
from shoal.server.errors import UserError


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert idle_switch.quantiles(values) == {"p50": 100.0, "p99": 198.0}


def test_the_only_value_is_every_quantile() -> None:
    assert idle_switch.quantiles([3.0]) == {"p50": 3.0, "p99": 3.0}


def test_the_table_shows_milliseconds_beside_the_decode_step() -> None:
    figures = idle_switch.Figures(
        system="fake",
        engines=2,
        switches=5,
        bind={"p50": 0.001, "p99": 0.0025},
        release={"p50": 0.0005, "p99": 0.002},
        decode_step={"dp": 0.004, "tp2": 0.003},
    )
    row = idle_switch.table([figures]).splitlines()[1]
    assert " ".join(row.split()) == "fake 2 5 1.00 2.50 0.50 2.00 dp 4.00, tp2 3.00"


def test_a_run_needs_a_switch() -> None:
    with pytest.raises(UserError, match="--switches 0"):
        idle_switch.main(["--switches", "0"])
