"""The tables of requests that switches carry, from figures that are made up."""

from typing import Any

from shoal.loadgen.bench.carry_tables import carry_table
from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.comparison_tables import markdown
from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.systems import SHOAL, Settings

SETTINGS = Settings("llama-3-8b", 2, "bfloat16", None, 32768, 256, 8192, 0.9, False, 1, ())


def spread(p50: float) -> dict[str, float]:
    return {"p50": p50, "p99": 2 * p50, "max": 3 * p50}


def direction(beyond: float | None, recomputed: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "switches": 0 if beyond is None else 100,
        "gap": None if beyond is None else spread(beyond + 0.005),
        "step": None if beyond is None else 0.005,
        "beyond_step": None if beyond is None else spread(beyond),
        "without": None if beyond is None else spread(0.001),
        "duration": None if beyond is None else spread(0.004),
        "carry": None if beyond is None else spread(0.0035),
        "carried": 800,
        "carried_bytes": 100 * 4_000_000_000,
        "recomputed": recomputed or {},
        "moved": 1,
        "paused": 0,
    }


def case(bind: dict[str, Any], release: dict[str, Any], **figures: Any) -> dict[str, Any]:
    return {
        "requests": 8,
        "bind": bind,
        "release": release,
        "prefilled_again": 0,
        "compared_tokens": 20000,
        "distinct_tokens": 900,
        "differing": 0,
        "differing_without_switch": 0,
        **figures,
    }


def results(**measures: Any) -> Results:
    found = Results(SETTINGS, Sizes(), read_shape("llama-3-8b"), {})
    found.systems[SHOAL] = SystemResults([], measures=measures)
    return found


def test_every_direction_of_every_case_has_a_row() -> None:
    short = case(direction(0.006), direction(0.007))
    found = carry_table(results(**{"carry 8x4096": short}))
    shown = "12.00 | 18.00 | 1.00 | 11.00 | 5.00 | 4.00 | 8.00 | 3.50 |"
    assert f"| 8 x 4,096: bind | 6.00 | {shown}" in found
    assert any(line.startswith("| 8 x 4,096: release | 7.00 | 14.00 |") for line in found)
    assert (
        "| 8 x 4,096 | 200 | 1,600 | 4.00 | 0 | 2 | 0 | 0 | 0 of 8 | 0 of 8 | 20,000 | 900 |"
        in found
    )


def test_what_longer_contexts_cost_is_said_where_both_were_measured() -> None:
    measures = {"carry 8x4096": case(direction(0.006), direction(0.007))}
    assert not any("16,384" in line for line in carry_table(results(**measures)))
    measures["carry 8x16384"] = case(direction(0.0105), direction(0.0068))
    (line,) = [one for one in carry_table(results(**measures)) if "above that with 4,096" in one]
    assert line.endswith(": bind 4.50 ms, release -0.20 ms.")


def test_recomputed_requests_are_told_with_their_reasons() -> None:
    figures = case(
        direction(0.006, {"no_room": 2}),
        direction(0.006, {"no_room": 1, "unreadable": 4}),
        differing=3,
        prefilled_again=8192,
    )
    (row,) = [
        line for line in carry_table(results(**{"carry 64x1024": figures})) if "no_room" in line
    ]
    assert "| 4.00 | 3 no_room, 4 unreadable | 2 | 0 | 8,192 | 3 of 8 |" in row


def test_a_case_that_ended_before_a_switch_has_no_figures() -> None:
    found = carry_table(results(**{"carry 8x4096": case(direction(None), direction(None))}))
    assert "| 8 x 4,096: bind | - | - | - | - | - | - | - | - | - |" in found


def test_bystanders_and_prefix_hits_have_tables_of_their_own() -> None:
    found = carry_table(
        results(
            **{
                "carry bystanders": {"bind": {"ordinary": 0.005, "during": spread(0.0055)}},
                "carry prefix-hit": {
                    "prompt_tokens": 4096,
                    "carried": 0.02,
                    "repeated": 0.019,
                    "new": 0.2,
                },
            }
        )
    )
    assert "| bind | 5.00 | 5.50 | 11.00 | 16.50 |" in found
    assert "| in the cache since a request was carried | 20.00 |" in found
    assert "| in the cache since a request before | 19.00 |" in found
    assert "| not in the cache | 200.00 |" in found


def test_the_report_states_the_targets_only_where_something_was_measured() -> None:
    assert "targets" not in markdown(results())
    report = markdown(results(**{"carry 8x4096": case(direction(0.006), direction(0.007))}))
    assert "## Running requests carried (targets: gap less a step 10 ms p50, 15 ms p99" in report
