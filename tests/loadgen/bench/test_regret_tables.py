"""Which fixed layout counts as the best one, and what the report of a policy says beside it."""

import pytest

from shoal.loadgen.bench.regret_tables import Load, Way, describe, markdown, shown


def way(mean: float, *, kept: float | None = None, switches: int = 0, p90: float = 1.0) -> Way:
    return Way(e2el=(mean, p90), ttft=(0.1, 0.2), tpot=(0.01, 0.02), kept=kept, switches=switches)


def load(policy: Way, **fixed: Way) -> Load:
    return Load(["--trace", "poisson"], 10, policy, fixed)


def test_the_best_layout_has_the_fastest_mean_request() -> None:
    one = load(way(1.1), dp=way(2.0), tp2=way(1.0))
    assert one.best == "tp2"
    assert one.lost == pytest.approx(0.1)


def test_where_targets_are_given_the_best_layout_keeps_most_promises() -> None:
    one = load(way(1.1, kept=0.7), dp=way(2.0, kept=0.8), tp2=way(1.0, kept=0.6))
    assert one.best == "dp"
    assert one.lost == pytest.approx(0.1)
    even = load(way(1.1, kept=1.0), dp=way(2.0, kept=1.0), tp2=way(1.0, kept=1.0))
    assert even.best == "tp2"


def test_the_report_counts_what_holds_and_shows_the_worst_load_first() -> None:
    ahead = load(way(0.8, switches=2), dp=way(1.0))
    behind = load(way(1.5, p90=1.5), dp=way(1.0))
    report = markdown("adaptive", [ahead, behind])
    assert "| mean request: mean excess, worst | +15.0 %, +50.0 % |" in report
    assert "| mean request at most 2 % longer | 1 |" in report
    assert "| mean request at least 10 % shorter | 1 |" in report
    assert "| P90 of the request time at most 2 % longer | 1 |" in report
    assert "| switches | 2 |" in report
    assert report.index("+50.0 % | +50.0 %") < report.index("-20.0 %")
    assert "points" not in report


def test_promises_have_a_table_of_their_own() -> None:
    kept = load(way(1.0, kept=0.95), dp=way(1.0, kept=0.96))
    report = markdown("adaptive", [kept, load(way(1.0), dp=way(1.0))])
    assert "| loads without targets | 1 |" in report
    assert "| loads with targets | 1 |" in report
    assert "| share of promises kept: mean, worst | -1.0 points, -1.0 points |" in report
    assert "1,000 ms (dp), 96.0 % kept | -1.0 points (0.0 %)" in report


def test_a_load_that_failed_is_named_with_its_reason() -> None:
    failed = Load(["--trace", "/a/b.csv"], error="no such file")
    assert describe(failed) == "--trace b.csv: no such file"
    report = markdown("adaptive", [failed])
    assert "Not simulated: `--trace b.csv`: no such file" in report
    assert "| load |" not in report


def test_a_line_says_how_far_the_policy_is_behind() -> None:
    one = load(way(1.1), dp=way(1.0))
    assert describe(one) == "+10.0 % beside dp: --trace poisson"
    assert shown(one) == "--trace poisson"


def test_a_load_is_shown_as_one_types_it_with_the_names_of_files() -> None:
    beside = "--trace /b/x.csv --start 3"
    one = Load(["--trace", "/a/it's a.csv", "--beside", beside, "--rate", "2"])
    assert shown(one) == "--trace it's a.csv --beside '--trace x.csv --start 3' --rate 2"
