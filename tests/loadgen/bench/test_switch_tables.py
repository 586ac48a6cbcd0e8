"""The table of switches and its notes, from figures that are made up."""

from typing import Any

from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.switch_tables import START, switch_table
from shoal.loadgen.bench.systems import SHOAL, Settings

SETTINGS = Settings("llama-3-8b", 2, "bfloat16", None, 32768, 256, 8192, 0.9, False, 1, ())
BOUND = "The first TP step began at most the fifth row after the decision"
RUNNING = {"0": 64, "1": 64}
DECODE = {"dp": {"64": {"tpot": 0.006}}}


def spread(p50: float, p99: float | None = None) -> dict[str, float]:
    return {"p50": p50, "p99": p99 or p50, "max": p99 or p50}


LOADED: dict[str, Any] = {
    "switches": 200,
    "running": RUNNING,
    "bind": spread(0.0014),
    "release": spread(0.001),
    "decision_to_first_token": spread(0.016),
    "first_token_when_idle": spread(0.010),
    "served_by_the_group": 199,
}


def first_step(without: int = 0) -> dict[str, Any]:
    leader = {
        "start": spread(0.0041, 0.0072),
        "host": spread(0.0015),
        "in_flight": spread(0.0033),
        "after": spread(0.0008),
    }
    slowest = {"start": spread(0.0051), "in_flight": spread(0.0048), "after": spread(0.0003)}
    figures = {"switches": 200, "running": RUNNING, "without_step": without}
    return {**figures, "leader": leader, "slowest": slowest}


def lines(**measures: Any) -> list[str]:
    results = Results(SETTINGS, Sizes(), read_shape("llama-3-8b"), {})
    assert switch_table(results) == []
    named = {name.replace("_", "-"): figures for name, figures in measures.items()}
    results.systems[SHOAL] = SystemResults([], measures=named)
    return switch_table(results)


def test_where_the_start_of_the_first_step_was_measured_it_stands_in_rows() -> None:
    found = lines(switch_loaded=LOADED, first_step=first_step(), decode=DECODE)
    assert f"| {START}: leader | 4.10 | 7.20 | 7.20 |" in found
    assert "| of this, until its runner took the step up (host) | 1.50 | 1.50 | 1.50 |" in found
    assert "| of this, its own steps in flight | 3.30 | 3.30 | 3.30 |" in found
    assert f"| {START}: slowest member | 5.10 | 5.10 | 5.10 |" in found
    *_, loaded, _, first = found
    assert "199 of 200 groups ran the request that waited" in loaded
    assert BOUND not in loaded
    assert "on a node started to record" in first
    assert "200 of 200 groups ran a step." in first
    assert "took 6.00 ms (TPOT of the DP layout" in first


def test_where_it_was_not_it_is_bounded() -> None:
    found = lines(switch_loaded=LOADED, decode=DECODE)
    assert not any(START in line for line in found)
    assert BOUND in found[-1]
    assert "took 6.00 ms (TPOT of the DP layout" in found[-1]


def test_groups_that_ran_no_step_are_told() -> None:
    found = lines(first_step=first_step(without=3))
    assert "197 of 200 groups ran a step, and the rows are of these." in found[-1]
    assert "took - ms" in found[-1], "nobody has measured it"
    assert BOUND not in found[-1]


def test_figures_of_no_round_have_no_row() -> None:
    nothing = dict.fromkeys(("start", "host", "in_flight", "after"))
    figures = first_step(without=200) | {"leader": nothing, "slowest": nothing}
    found = lines(switch_idle={"bind": spread(0.001)}, first_step=figures)
    assert [line for line in found if START in line] == []
    assert "0 of 200 groups ran a step" in found[-1]
