"""The arithmetic of reports, on requests small enough to do it by hand."""

from dataclasses import replace

import pytest

from shoal.loadgen.summary import (
    Distribution,
    Objective,
    Record,
    Switching,
    as_json,
    peak,
    quantile,
    report,
)
from shoal.loadgen.text_tables import side_by_side, summary
from shoal.loadgen.workload import Phase

NONE = Switching(0, 0, 0.0, 0, 0, 0)


def record(
    arrived: float = 0.0,
    *,
    ttft: float = 1.0,
    tpot: float = 0.5,
    tokens: int = 5,
    priority: int = 0,
    phase: Phase = Phase.QUIET,
) -> Record:
    first = arrived + ttft
    return Record(
        arrived=arrived,
        started=arrived + ttft / 2,
        first_token=first,
        ended=first + tpot * (tokens - 1),
        output_tokens=tokens,
        finished=True,
        priority=priority,
        phase=phase,
    )


def test_times_of_one_request() -> None:
    one = record(10.0, ttft=2.0, tpot=0.25, tokens=9)
    assert (one.queue_time, one.ttft, one.tpot) == (1.0, 2.0, 0.25)
    assert record(tokens=1).tpot is None


def test_a_request_without_tokens_has_no_times() -> None:
    failed = Record(1.0, None, None, 2.0, 0, finished=False)
    assert (failed.queue_time, failed.ttft, failed.tpot) == (None, None, None)
    figures = report("p", [failed], {}, switching=NONE, objectives=[Objective(0, 9, 9)])
    everything = figures.groups["all"]
    assert (everything.finished, everything.ttft, everything.attainment) == (0, None, 0.0)
    assert "1 did not finish" in side_by_side([figures])


def test_quantiles_are_interpolated() -> None:
    values = [float(k) for k in range(1, 12)]
    assert [quantile(values, q) for q in (0.0, 0.05, 0.5, 0.9, 1.0)] == [1, 1.5, 6, 10, 11]
    both = Distribution.of([3.0, 1.0])
    assert both is not None
    assert (both.mean, both.std, both.p50) == (2.0, 1.0, 2.0)
    assert (both.p90, both.p99) == pytest.approx((2.8, 2.98))
    assert Distribution.of([]) is None


def test_groups_are_phases_and_priorities() -> None:
    records = [
        record(ttft=1.0, priority=-5, phase=Phase.QUIET),
        record(ttft=3.0, priority=0, phase=Phase.BURST),
    ]
    groups = report("p", records, {}, switching=NONE).groups
    assert list(groups) == ["all", "quiet", "burst", "priority -5", "priority 0"]
    means = {name: group.ttft.mean for name, group in groups.items() if group.ttft}
    assert means == {"all": 2.0, "quiet": 1.0, "burst": 3.0, "priority -5": 1.0, "priority 0": 3.0}
    alike = report("p", [record(), record()], {}, switching=NONE).groups
    assert list(alike) == ["all"]


def test_every_priority_is_owed_what_its_class_is() -> None:
    objectives = [Objective(-5, ttft=1.0, tpot=0.5), Objective(0, ttft=4.0, tpot=0.5)]
    records = [
        record(ttft=2.0, priority=-7),  # too late for its class
        record(ttft=2.0, priority=-1),
        record(ttft=2.0, priority=8),  # owed what the last class is
        record(ttft=2.0, tpot=0.6, priority=0),  # too slow
    ]
    figures = report("p", records, {}, switching=NONE, objectives=objectives)
    assert figures.groups["all"].attainment == 0.5
    assert report("p", records, {}, switching=NONE).groups["all"].attainment is None


def test_throughput() -> None:
    records = [
        replace(record(0.0, tokens=5), prompt_tokens=100),
        replace(record(7.0, ttft=1.0, tpot=0.5, tokens=5), prompt_tokens=50),
        replace(record(1.0, tokens=3), finished=False, prompt_tokens=50),
    ]
    figures = report("p", records, {0: 10.0, 1: 30.0, 9: 5.0}, switching=NONE)
    assert figures.peak_throughput == 40.0 / 5
    assert figures.duration == 10.0
    # Only of the requests that finished.
    assert (figures.prompt_tokens, figures.output_tokens) == (150, 10)
    assert figures.request_throughput == 2 / 10.0
    assert figures.output_throughput == 10 / 10.0
    assert figures.total_throughput == 160 / 10.0
    assert report("p", records, {}, duration=20.0).output_throughput == 10 / 20.0


def test_the_best_window_need_not_start_with_the_clocks_own_fives() -> None:
    assert peak({}) == 0.0
    assert peak({3: 10.0, 4: 10.0, 8: 5.0}) == 4.0
    assert peak({3: 10.0, 7: 10.0}) == 4.0


def test_times_are_those_of_requests_that_finished() -> None:
    records = [record(ttft=1.0), replace(record(ttft=9.0), finished=False)]
    everything = report("p", records, {}).groups["all"]
    assert everything.ttft is not None
    assert everything.ttft.mean == 1.0
    assert everything.e2el is not None
    assert everything.e2el.mean == 3.0


def test_itls_of_all_requests_are_one_distribution() -> None:
    records = [replace(record(), itls=[0.1, 0.2]), replace(record(), itls=[0.9])]
    itl = report("p", records, {}).groups["all"].itl
    assert itl is not None
    assert itl.mean == pytest.approx(0.4)
    assert itl.p50 == pytest.approx(0.2)


def test_goodput_is_attainment_as_a_rate() -> None:
    records = [record(ttft=1.0), record(ttft=9.0)]
    figures = report("p", records, {}, objectives=[Objective(0, 2.0, 9.0)], duration=4.0)
    assert figures.groups["all"].attainment == 0.5
    assert figures.groups["all"].goodput == 0.25


def test_a_summary_names_what_failed() -> None:
    records = [record(), replace(record(), finished=False)]
    text = summary(report("p", records, {}), {"ok": 1, "expired_504": 1})
    assert "Successful requests:                     1" in text
    assert "Failed requests:                         1" in text
    assert "  expired_504:                           1" in text
    assert "P90 E2EL (ms):                           3000.00" in text
    assert "goodput" not in text


def test_json_and_table_show_the_same_report() -> None:
    switching = Switching(switches=4, failed=1, seconds=0.1, paused=7, moved=9, carried=5)
    one = report("flying", [record()], {0: 5.0}, switching=switching, step_errors={"dp": 0.25})
    content = as_json([one], trace="t")
    assert content["trace"] == "t"
    assert content["reports"][0]["groups"]["all"]["ttft"]["p90"] == 1.0
    assert content["reports"][0]["switching"]["moved"] == 9
    assert content["reports"][0]["switching"]["carried"] == 5
    text = side_by_side([one])
    assert "flying" in text
    assert "dp 25.0%" in text
    assert "25.0" in text  # 0.1 s over 4 switches, in ms


def test_nothing_served_is_no_error() -> None:
    empty = report("p", [], {}, switching=NONE)
    assert empty.output_throughput == 0.0
    assert empty.groups["all"].requests == 0
    assert side_by_side([empty])


@pytest.mark.parametrize("late", [True, False])
def test_objective_needs_both_times(late: bool) -> None:
    owed = Objective(0, ttft=1.0, tpot=0.5)
    assert owed.met_by(record(ttft=1.5 if late else 1.0)) is not late
