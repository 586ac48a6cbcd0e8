"""What users get, measured: which servers, which loads, and what is written of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.loadgen.bench import defaults
from shoal.loadgen.bench.defaults import Way, loads, seed_of, systems, ways
from shoal.loadgen.bench.defaults_tables import Figures, SystemFigures, markdown
from shoal.loadgen.bench.systems import SHOAL, STOCK_DP, STOCK_TP
from shoal.server.errors import UserError

ROWS = [
    {"timestamp": 5000 + 1000 * n, "input_length": 600, "output_length": 2, "hash_ids": [n, 7]}
    for n in range(4)
]


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_servers_are_told_no_more_than_the_model_and_the_gpus() -> None:
    told = {"--load-format", "--served-model-name", "--port", "--admin-port", "--engines"}
    told |= {"--data-parallel-size", "--tensor-parallel-size"}
    found = systems(2, "/model")
    assert [system.name for system in found] == [STOCK_DP, STOCK_TP, SHOAL]
    for system in found:
        assert {word for word in system.command if word.startswith("--")} <= told


def test_of_shoal_each_layout_is_a_way_and_each_policy() -> None:
    stock, _, shoal = systems(2, "/model")
    assert [way.name for way in ways(stock, ["flying"])] == ["dp"]
    named = [(way.name, way.policy) for way in ways(shoal, ["flying"])]
    assert named == [("dp", None), ("tp2", None), ("flying", "flying")]


def test_there_are_as_many_requests_at_once_as_units_can_share() -> None:
    def at_once(units: int) -> list[str]:
        found = [load.arguments for load in loads(units, [], made_up=True)]
        return [args[args.index("--max-concurrency") + 1] for args in found]

    assert at_once(1) == ["1", "8", "64", "1", "1"]
    assert at_once(2) == ["2", "16", "128", "1", "1"]


def test_no_two_loads_have_the_same_prompts() -> None:
    names = [f"{s.name} {w.name} {load.name}" for s in systems(2, "m") for w in ways(s, [])
             for load in loads(2, [], made_up=True)]  # fmt: skip
    assert len({seed_of(name) for name in names}) == len(names)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    trace = write_rows(tmp_path / "rows.jsonl")
    return [
        *("--model-shape", "llama-3-8b", "--engines", "2", "--out", str(tmp_path / "out")),
        *("--trace", str(trace), "--seconds", "2", "--seeds", "0", "3", "--trace-only"),
    ]


def test_a_trace_is_cut_and_each_seed_has_other_prompts(arguments: list[str]) -> None:
    args = defaults._parser().parse_args(arguments)
    args.out.mkdir()
    for seed, first in ((0, 0), (3, 3 * defaults.NEW_PROMPTS)):
        path = defaults._write_trace(args, seed)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["hash_ids"][0] - first for row in rows] == [0, 1]
        assert [row["timestamp"] for row in rows] == [5000, 6000]


def test_no_way_finds_the_prompts_of_another_in_a_cache(arguments: list[str]) -> None:
    args = defaults._parser().parse_args([*arguments, "--policies", "flying"])
    args.out.mkdir()
    prompts = [path.read_text() for way in defaults._write_traces(args) for path in way]
    assert len(set(prompts)) == len(prompts) == 6


def test_a_node_is_measured_in_each_layout_and_not_twice(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = systems

    def fake(engines: int, model: str) -> list[Any]:
        *_, shoal = made(engines, model)
        return [replace(shoal, command=(*shoal.command, "--fake-engine", "--fake-step-ms", "1"))]

    monkeypatch.setattr(defaults, "systems", fake)
    assert defaults.main(arguments) == 0
    report = capsys.readouterr().out
    assert "| of trace-3 | Shoal dp | Shoal tp2 |" in report
    out = Path(arguments[arguments.index("--out") + 1])
    kept = json.loads((out / "results.json").read_text())["systems"][SHOAL]
    assert kept["failure"] is None
    for way in ("dp", "tp2"):
        assert list(kept["ways"][way]) == ["trace-0", "trace-3"]
        for figures in kept["ways"][way].values():
            assert (figures["completed"], figures["total_input_tokens"]) == (2, 1200)
            assert figures["mean_ttft_ms"] > 0
    assert defaults.main(arguments) == 0, "nothing is missing: no server is started"
    assert "ready after" not in capsys.readouterr().err


def test_results_of_another_comparison_are_not_mixed_in(arguments: list[str]) -> None:
    out = Path(arguments[arguments.index("--out") + 1])
    out.mkdir()
    other = Figures("llama-3-8b", 4, "rows.jsonl", {})
    (out / "results.json").write_bytes(defaults.msgspec.json.encode(other))
    with pytest.raises(UserError, match="of another comparison"):
        defaults.main(arguments)


def test_a_trace_that_is_not_there_is_named(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        defaults.main(arguments)


def test_ratios_are_to_the_best_of_stock() -> None:
    def system(way: str, ttft: float, rate: float) -> SystemFigures:
        return SystemFigures(
            [], 1.0, {way: {"x": {"mean_ttft_ms": ttft, "output_throughput": rate}}}
        )

    figures = Figures("llama-3-8b", 2, None, {}, {
        STOCK_DP: system("dp", 20.0, 90.0),
        STOCK_TP: system("tp2", 10.0, 80.0),
        SHOAL: system("tp2", 15.0, 45.0),
    })  # fmt: skip
    report = markdown(figures)
    assert "| TTFT mean, ms | 20 | 10 | 15 | 1.500 |" in report
    assert "| output tokens/s | 90 | 80 | 45 | 0.500 |" in report
    assert "| TPOT mean, ms | - | - | - | - |" in report


def test_a_way_is_a_layout_or_a_policy() -> None:
    assert defaults._units(Way("flying", policy="flying"), 4) == 4
    assert defaults._units(ways(systems(4, "m")[-1], [])[1], 4) == 1
