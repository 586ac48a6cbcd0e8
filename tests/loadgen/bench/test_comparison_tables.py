"""Comparisons, memory and agreement, computed from results that are made up."""

from typing import Any

import msgspec
import pytest

from shoal.loadgen.bench import comparison_tables
from shoal.loadgen.bench.agreement import agreements, compare
from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.memory import by_kind, gpu_memory
from shoal.loadgen.bench.systems import SHOAL, STOCK_DP, STOCK_EP, STOCK_TP, Settings

SETTINGS = Settings("llama-3-8b", 2, "bfloat16", None, 32768, 256, 8192, 0.9, False, 1, ())
KV_GIB_PER_TOKEN = 2 * 32 * 8 * 128 * 2 / (1 << 30)


def start(seconds: float, **figures: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"kv_tokens": [], "model_gib": [], "graph_gib_by_process": {}}
    return {"seconds": seconds, "phases": {}, **nothing, **figures}


def made_up() -> Results:
    def decode(seconds: float) -> dict[str, Any]:
        return {"1": {"tpot": seconds}}

    dp = SystemResults(
        [],
        starts=[
            start(
                60.0, kv_tokens=[800_000.0] * 2, model_gib=[15.0], graph_gib_by_process={"1": 0.5}
            )
        ],
        memory={"ready": [120.0, 119.0]},
        measures={"decode": {"dp": decode(0.005)}},
    )
    tp = SystemResults(
        [],
        starts=[
            start(80.0, kv_tokens=[1_700_000.0], model_gib=[7.5], graph_gib_by_process={"2": 0.7})
        ],
        memory={"ready": [120.0, 120.0]},
        measures={"decode": {"tp2": decode(0.0035)}},
    )
    both = [800_000.0, 1_600_000.0, 800_000.0]
    shoal = SystemResults(
        [],
        starts=[
            start(90.0, kv_tokens=both, model_gib=[15.0, 0.0], graph_gib_by_process={"3": 1.1})
        ],
        memory={"ready": [122.0, 121.0]},
        measures={"decode": {"dp": decode(0.00505), "tp2": decode(0.0036)}},
    )
    sizes = Sizes(batches=(1, 8), prompts=())
    systems = {STOCK_DP: dp, STOCK_TP: tp, SHOAL: shoal}
    return Results(SETTINGS, sizes, read_shape("llama-3-8b"), {}, systems=systems)


def cells(results: Results) -> dict[str, list[str]]:
    return {row.name: row.cells[1:] for row in comparison_tables.stock_rows(results)}


def test_what_vllm_chose_is_a_table_of_the_systems_that_tell() -> None:
    results = made_up()
    assert "What vLLM chose" not in comparison_tables.markdown(results)
    for name, ways in ((STOCK_TP, ["CUSTOM"]), (SHOAL, ["CUSTOM, PYNCCL", "PYNCCL"])):
        choices = {"all-reduce": ways, "attention": []}
        results.systems[name].starts[-1]["choices"] = choices
    report = comparison_tables.markdown(results)
    section = report.split("## What vLLM chose\n\n")[1].split("\n\n")[0].splitlines()
    assert section[0] == "|  | all-reduce | attention |"
    assert section[2:] == [
        "| stock-tp | CUSTOM | - |",
        "| shoal | CUSTOM, PYNCCL; PYNCCL | - |",
    ]


def test_each_layout_is_compared_with_the_stock_system_of_its_kind() -> None:
    found = cells(made_up())
    compared = ["1.0 % slower", "2.9 % slower"]
    assert found["TPOT, 1 per unit, ms"] == ["5.00", "3.50", "5.05", "3.60", *compared]
    assert found["TPOT, 8 per unit, ms"] == ["-"] * 6
    assert found["KV cache of the node, tokens"][:4] == [
        *("1,600,000", "1,700,000", "1,600,000", "1,600,000"),
    ]
    assert found["longest context of a unit, tokens"][-1] == "5.9 % less"
    assert found["start-up, s (Shoal: of all layouts)"][-2:] == ["50.0 % slower", "12.5 % slower"]
    assert found["start-up again, s (Shoal: of all layouts)"] == ["-"] * 6


def test_a_start_with_the_caches_of_the_first_is_compared_with_one_of_its_kind() -> None:
    results = made_up()
    results.systems[STOCK_TP].starts.append(start(50.0))
    results.systems[SHOAL].starts += [start(70.0), start(60.0)]
    found = cells(results)
    assert found["start-up, s (Shoal: of all layouts)"][-2:] == ["50.0 % slower", "12.5 % slower"]
    again = found["start-up again, s (Shoal: of all layouts)"]
    assert again == ["-", "50", "60", "60", "-", "20.0 % slower"]


def test_degrees_between_are_compared_with_replicas_of_that_degree() -> None:
    results = made_up()
    assert "by degree of TP" not in comparison_tables.markdown(results)
    settings = msgspec.structs.replace(results.settings, engines=4, degrees=(2,))
    results = msgspec.structs.replace(results, settings=settings)
    replicas = SystemResults([], measures={"decode": {"tp2": {"1": {"tpot": 0.003}}}})
    results.systems["stock-tp2"] = replicas
    report = comparison_tables.markdown(results)
    assert "| TP2: TPOT, 1 per unit, ms | 3.00 | 3.60 | 20.0 % slower |" in report


def test_shoal_is_compared_with_the_better_of_shares_and_ranges_of_experts() -> None:
    results = made_up()
    assert "whole experts" not in comparison_tables.markdown(results)
    figures = {
        "decode": {"tp2": {"1": {"tpot": 0.002}, "8": {"tpot": 0.009}}},
        "saturation": {"tp2": {"output_tokens_per_second": 10.0}},
    }
    results.systems[STOCK_EP] = SystemResults([], measures=figures)
    report = comparison_tables.markdown(results).split("## Beside stock vLLM with whole experts")[1]
    assert "| TPOT, 1 per unit, ms | 3.50 | 2.00 | 3.60 | 80.0 % slower |" in report
    tokens = next(line for line in report.splitlines() if line.startswith("| output tokens/s"))
    assert tokens.split(" | ")[2] == "10", tokens


def test_nothing_measured_is_no_figure() -> None:
    empty = Results(SETTINGS, Sizes(), read_shape("llama-3-8b"), {})
    assert "| " not in comparison_tables.markdown(empty)


def test_memory_of_one_gpu_is_told_apart() -> None:
    results = made_up()
    memory = gpu_memory(results, SHOAL)
    assert memory is not None
    assert memory.kv == pytest.approx(800_000 * KV_GIB_PER_TOKEN)
    assert memory.weights == 15.0
    assert memory.graphs == pytest.approx(1.1)
    assert memory.overhead == pytest.approx(122.0 - 15.0 - 800_000 * KV_GIB_PER_TOKEN)
    stock_tp = gpu_memory(results, STOCK_TP)
    assert stock_tp is not None
    assert stock_tp.kv == pytest.approx(1_700_000 * KV_GIB_PER_TOKEN / 2)
    assert stock_tp.graphs == 0.7


def test_memory_is_told_by_kind_where_phases_tell_what_they_took() -> None:
    results = made_up()
    assert by_kind(results, SHOAL) == {}, "nothing told it"
    phases = {"context": 0.5, "communicators": 0.7, "workers": 0.2, "weights": 15.25}
    cores = {"tp2 views": 0.3, "dp core": 99.0, "tp2 core": 0.75}
    results.systems[SHOAL].starts[-1]["phases_gib"] = {"0": {"context": 0.5}, "1": phases | cores}
    kinds = by_kind(results, SHOAL)
    assert kinds["communicators"] == pytest.approx(1.0)
    assert (kinds["weights"], kinds["graphs"]) == (15.25, 1.1)
    assert sum(kinds.values()) == pytest.approx(sum((phases | cores).values())), "nothing is lost"
    assert "| runners' buffers |" in comparison_tables.markdown(results)


def scores(shift: float, best: int) -> dict[str, Any]:
    return {
        "logprobs": [[-1.0 + shift, -2.0], [-3.0, -4.0]],
        "best": [[5, 6], [7, best]],
        "generated": [[1, 2], [3, best]],
    }


def test_agreement_sees_what_differs() -> None:
    same = compare("a", scores(0.0, 8), "b", scores(0.0, 8))
    assert (same.largest, same.same_best, same.same_generated) == (0.0, 1.0, 1.0)
    other = compare("a", scores(0.0, 8), "b", scores(0.25, 9))
    assert (other.largest, other.same_best, other.same_generated) == (0.25, 0.75, 0.5)


def test_layouts_of_shoal_are_compared_with_each_other_and_with_stock_dp() -> None:
    results = made_up()
    results.systems[SHOAL].measures["numerics"] = {"dp": scores(0, 8), "tp2": scores(0, 8)}
    results.systems[STOCK_DP].measures["numerics"] = {"dp": scores(0, 8)}
    pairs = [(one.first, one.second) for one in agreements(results)]
    assert pairs == [("shoal dp", "shoal tp2"), ("stock-dp dp", "shoal dp")]


def served(ttft: float) -> dict[str, Any]:
    spread = {"mean": ttft, "p50": ttft, "p90": ttft, "p99": ttft}
    group = {"requests": 3, "ttft": spread, "tpot": None}
    return {
        "groups": {"all": group, "priority -10": group},
        "peak_throughput": 1000.0,
        "seconds": 60.0,
        "latest_request": 0.001,
        "client_lag": None,
        "switching": None,
    }


def test_the_priority_workload_stands_beside_the_papers() -> None:
    results = made_up()
    results.systems[STOCK_TP].measures["priority"] = served(0.1)
    results.systems[SHOAL].measures["priority"] = served(0.105)
    lines = comparison_tables.markdown(results).splitlines()
    (urgent,) = [line for line in lines if line.startswith("| TTFT, urgent")]
    assert [cell.strip() for cell in urgent.split("|")[2:-1]] == [
        *("100.00", "-", "105.00", "5.0 % slower"),
        *("63", "166", "74", "17.5 % slower"),
    ]


def test_failures_are_listed() -> None:
    results = made_up()
    results.systems[SHOAL].failures["prefill"] = "no way"
    assert "- shoal, prefill: no way" in comparison_tables.markdown(results)
