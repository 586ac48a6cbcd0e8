"""The figures of the failure benchmark, and a whole run on fake engines."""

import json
from pathlib import Path

import pytest

from shoal.loadgen.bench.engine_failures import (
    FAULTS,
    Failure,
    Failures,
    longest_gap,
    longest_pause,
    main,
    report,
)
from shoal.loadgen.bench.token_client import Answer
from shoal.server.errors import UserError


def test_a_gap_counts_if_it_ends_after_the_fault() -> None:
    stream = Answer(0.0, 9.0, [(1.0, 1), (4.0, 2), (5.0, 3), (7.0, 4), (8.0, 5)])
    assert longest_gap(stream, since=4.5) == 2.0
    assert longest_gap(stream, since=3.9) == 3.0
    assert longest_gap(stream, since=8.0) == 0.0


def test_a_pause_is_between_moments_or_at_an_end_of_the_time() -> None:
    assert longest_pause([3.0, 2.0, 5.0, 99.0], start=1.0, end=6.0) == 2.0
    assert longest_pause([], start=1.0, end=6.0) == 5.0
    assert longest_pause([1.5], start=1.0, end=6.0) == 4.5


def failure(fault: str, detection: float, gaps: list[float]) -> Failure:
    return Failure(fault, detection, 4, gaps, 3, 1, 2.0, 2.5, 0.25, 0.75)


def test_the_report_has_every_figure() -> None:
    failures = [failure("kill -9", 0.1, [0.2]), failure("kill -9", 0.3, [0.4])]
    result = Failures(["serve"], {}, 8, 300, 0.06, [*failures, failure("SIGSTOP", 1.0, [])])
    text = report(result)
    times = "2000.00 / 2000.00 | 2500.00 / 2500.00 | 250.00 / 250.00 | 750.00 / 750.00 |"
    assert f"| kill -9 | 2 | 200.00 / 300.00 | 300.00 / 400.00 | 8 | 6 | 2 | {times}" in text
    assert f"| SIGSTOP | 1 | 1000.00 / 1000.00 | - | 4 | 3 | 1 | {times}" in text
    assert "at most 60.00 ms" in text


@pytest.mark.parametrize("option", ["--times", "--streams", "--output-tokens"])
def test_what_cannot_be_is_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} 0: it must be at least 1"):
        main([option, "0"])


@pytest.mark.usefixtures("preloaded_servers")
def test_no_stream_of_a_failing_engine_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "failures.json"
    few = ("--streams", "4", "--output-tokens", "240")
    assert main(["--times", "1", *few, "--json", str(out)]) == 0
    failures = json.loads(out.read_bytes())["failures"]
    assert [each["fault"] for each in failures] == list(FAULTS)
    for each in failures:
        assert each["failed"] == 0
        assert each["interrupted"] == len(each["gaps"]) > 0
        assert each["migrated"] >= each["interrupted"]
        assert each["detection"] <= each["restart"] <= each["whole"]
