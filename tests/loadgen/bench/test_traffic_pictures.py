"""Requests of both clients become pictures over time."""

from pathlib import Path

import pytest

from shoal.loadgen.bench.traffic_pictures import (
    Requests,
    draw_all,
    keep_requests,
    kept_requests,
    timeline,
)

RESULT = {
    "start_times": [100.0, 101.0],
    "ttfts": [0.5, 0.0],
    "itls": [[0.25, 1.0], []],
    "output_lens": [6, 0],
    "errors": ["", "refused"],
}


def test_times_are_counted_from_the_first_request() -> None:
    run = timeline(Requests("w", "stock-dp", *(RESULT[k] for k in list(RESULT)[:4])))  # type: ignore[arg-type]
    served, refused = run.records
    assert (served.arrived, served.ttft, served.ended) == (0.0, 0.5, 1.75)
    assert (refused.arrived, refused.ttft, refused.finished) == (1.0, None, False)
    assert run.tokens == {0: pytest.approx(4.0), 1: pytest.approx(2.0)}


def test_a_picture_has_a_curve_for_each_system(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    for column in ("stock-dp", "Shoal tp2"):
        keep_requests(folder, "poisson --rate 2 (seed 0)", column, RESULT)
    (picture,) = draw_all(kept_requests(folder), tmp_path)
    drawn = picture.read_text()
    assert picture.parent == tmp_path
    assert "stock-dp" in drawn
    assert "Shoal tp2" in drawn
