"""The tables of the sweep, from results that are made up."""

from typing import Any

from shoal.loadgen.bench import comparison_tables
from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.rates_tables import rates_table
from shoal.loadgen.bench.systems import SHOAL, STOCK_TP, Settings

SETTINGS = Settings("llama-3-8b", 2, "bfloat16", None, 32768, 256, 8192, 0.9, False, 1, ())


def cell(seconds: float, *, policy: str | None = None, **fields: Any) -> dict[str, Any]:
    spread = {"mean": seconds, "p50": seconds, "p90": seconds}
    found = {"e2el": spread, "ttft": spread, "tpot": None, "peak_throughput": 100 / seconds}
    switching = {"switches": 2, "seconds": 0.01, "paused": 3, "moved": 1}
    return {
        **found,
        "policy": policy,
        "seconds": 25.0,
        "sp_above": None,
        "switching": switching,
        "layouts": {"tp2": 39, "dp": 1},
        "problems": [],
        **fields,
    }


def made_up() -> Results:
    def about(rate: float) -> dict[str, Any]:
        request = {"request": [8000, 250], "requests": int(20 * rate), "seed": 0}
        return {"rate": rate, "seconds": 20.0, **request}

    stock = SystemResults([], measures={"rates 2 tp2": cell(2.0), "rates 10 tp2": cell(9.0)})
    shoal = SystemResults(
        [],
        measures={
            "rates 10 dp": cell(4.0, problems=["sending lagged"]),
            "rates 10 flying": cell(5.0, policy="flying"),
            "rates 2 dp": cell(3.0, sp_above={"tp2": 512}),
            "rates 2 flying": cell(1.0, policy="flying", sp_above={"tp2": 512}),
        },
    )
    workloads = {"rates 10": about(10.0), "rates 2": about(2.0), "bursty": {"seed": 0}}
    systems = {STOCK_TP: stock, SHOAL: shoal}
    config = read_shape("llama-3-8b")
    return Results(SETTINGS, Sizes(), config, {}, workloads=workloads, systems=systems)


def row(lines: list[str], title: str, rate: str) -> list[str]:
    """Return the cells of a rate in the table of this title."""
    (start,) = [k for k, line in enumerate(lines) if line.startswith(f"| {title}")]
    (found,) = [line for line in lines[start : start + 4] if line.startswith(f"| {rate} |")]
    return [part.strip() for part in found.split("|")[2:-1]]


def test_a_table_has_all_ways_of_all_systems_and_policies_beside_the_best() -> None:
    lines = rates_table(made_up())
    head = "| completion time, mean, ms, by requests/s | stock-tp tp2 | shoal dp | shoal flying |"
    assert f"{head} shoal flying beside the best |" in lines
    mean = "completion time, mean"
    assert row(lines, mean, "2") == ["**2000.00**", "3000.00", "1000.00", "50.0 % faster"]
    assert row(lines, mean, "10") == ["9000.00", "**4000.00** (!)", "5000.00", "25.0 % slower"]
    # More tokens per second are better; what was not measured is no figure.
    assert row(lines, "peak output", "2") == ["**50**", "33.33", "100", "100.0 % more"]
    assert row(lines, "TPOT", "2") == ["-"] * 4
    assert row(lines, "switches", "2") == ["2 (5.00; 3, 1), dp 1, tp2 39"]
    rates = [line.split("|")[1].strip() for line in lines if line.startswith(("| 2 ", "| 10 "))]
    assert rates == ["2", "10"] * 9


def test_lengths_are_said_once_for_all_rates_that_share_them() -> None:
    results = made_up()
    results.workloads["rates 10"]["request"] = [[2000, 10000], 50]
    lines = "\n".join(rates_table(results))
    assert "8000 tokens in and 250 out" in lines
    assert "2000 to 10000 tokens in and 50 out, 20 s of Poisson arrivals, seed 0" in lines


def test_what_speaks_against_a_cell_is_said() -> None:
    lines = rates_table(made_up())
    assert "- Not valid, 10 requests/s, shoal dp: sending lagged." in lines
    assert any("requests: 40 at 2/s, 200 at 10/s" in line for line in lines)
    (above,) = [line for line in lines if line.startswith("Steps that are SP")]
    assert "shoal dp above 512 tokens in tp2; shoal flying above 512 tokens in tp2" in above


def test_a_rate_that_lacks_cells_is_shown_without_them() -> None:
    results = made_up()
    del results.systems[SHOAL].measures["rates 2 dp"]
    del results.systems[STOCK_TP]
    assert row(rates_table(results), "completion time, mean", "2") == ["-", "1000.00", "-"]


def test_the_report_has_the_tables_only_where_there_are_cells() -> None:
    assert "## Arrival rates\n" in comparison_tables.markdown(made_up())
    results = made_up()
    results.systems.clear()
    assert "## Arrival rates" not in comparison_tables.markdown(results)
