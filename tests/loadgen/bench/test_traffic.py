"""What users get, measured: which servers, which loads, and what is written of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.loadgen.bench import traffic, traffic_clients
from shoal.loadgen.bench.systems import SHOAL, STOCK_DP, STOCK_TP
from shoal.loadgen.bench.traffic import Way, made_up, replays, seed_of, systems, ways
from shoal.loadgen.bench.traffic_tables import Figures, SystemFigures, markdown
from shoal.loadgen.bench.traffic_workloads import TraceWriter, read_traffic
from shoal.server.errors import UserError

WORKLOAD = "--prompt-tokens 600 --output-tokens 2 --rate 4 --requests 4"
ROW = f"poisson {WORKLOAD} (seed 3)"


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


def test_layouts_of_shoal_can_be_left_out_and_stocks_cannot() -> None:
    stock, _, shoal = systems(2, "/model")
    assert [way.name for way in ways(stock, [], layouts=[])] == ["dp"]
    assert [way.name for way in ways(shoal, ["adaptive"], layouts=["tp2"])] == ["tp2", "adaptive"]
    assert [way.name for way in ways(shoal, ["adaptive"], layouts=[])] == ["adaptive"]


def test_there_are_as_many_requests_at_once_as_units_can_share() -> None:
    def at_once(units: int) -> list[str]:
        found = [load.arguments for load in made_up(units)]
        return [args[args.index("--max-concurrency") + 1] for args in found]

    assert at_once(1) == ["1", "8", "64", "1", "1"]
    assert at_once(2) == ["2", "16", "128", "1", "1"]


def test_no_two_loads_have_the_same_prompts() -> None:
    names = [f"{s.name} {w.name} {load.name}" for s in systems(2, "m") for w in ways(s, [])
             for load in made_up(2)]  # fmt: skip
    assert len({seed_of(name) for name in names}) == len(names)


def test_each_client_gets_a_trace_of_its_own(tmp_path: Path) -> None:
    one = read_traffic(f"poisson {WORKLOAD}", 3)
    by_vllm, by_ours = replays([one], ["vllm", "shoal"], TraceWriter(tmp_path))
    assert (by_vllm.name, by_ours.name) == (ROW, f"{ROW} by shoal replay")
    assert by_vllm.arguments
    assert not by_ours.arguments
    assert by_vllm.trace is not None
    assert by_ours.trace is not None
    assert by_vllm.trace.read_text() != by_ours.trace.read_text()


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [
        *("--model-shape", "llama-3-8b", "--engines", "2", "--out", str(tmp_path / "out")),
        *("--workload", f"poisson {WORKLOAD}", "--seeds", "0", "3", "--no-made-up"),
    ]


def use_fake_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = systems

    def fake(engines: int, model: str) -> list[Any]:
        *_, shoal = made(engines, model)
        return [replace(shoal, command=(*shoal.command, "--fake-engine", "--fake-step-ms", "40"))]

    monkeypatch.setattr(traffic, "systems", fake)
    # A run is not valid if the load generator lags, by so much, or by a tenth of the TTFT.
    no_limit = (*traffic_clients.REPLAY, "--max-lag-ms", "60000")
    monkeypatch.setattr(traffic_clients, "REPLAY", no_limit)


@pytest.mark.usefixtures("preloaded_servers")
def test_a_node_is_measured_in_each_layout_and_not_twice(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By both clients with one seed: the next test has several."""
    use_fake_nodes(monkeypatch)
    asked = [*arguments, "--clients", "vllm", "shoal", "--simulated-shape", "llama-3-8b-bf16"]
    asked += ["--seeds", "3"]
    assert traffic.main(asked) == 0
    report = capsys.readouterr().out
    assert f"| of {ROW} | Shoal dp | Shoal tp2 |" in report
    assert "## The simulator beside these runs" in report
    out = Path(arguments[arguments.index("--out") + 1])
    kept = json.loads((out / "results.json").read_text())["systems"][SHOAL]
    assert kept["failure"] is None
    for way in ("dp", "tp2"):
        assert list(kept["ways"][way]) == [ROW, f"{ROW} by shoal replay"]
        assert list(kept["simulated"][way]) == [ROW]
        for figures in kept["ways"][way].values():
            assert (figures["completed"], figures["total_input_tokens"]) == (4, 2400)
            assert figures["mean_ttft_ms"] > 0
    assert len(list(out.glob("*.svg"))) == 2, "one picture for each workload and client"
    assert traffic.main(asked) == 0, "nothing is missing: no server is started"
    assert "ready after" not in capsys.readouterr().err


class Ready:
    """A server that is ready at once, and that nobody asks for anything."""

    def __init__(self, *_: object) -> None:
        pass

    async def wait_until_ready(self, *_: object) -> float:
        return 0.0

    def stop(self) -> None:
        pass


def test_a_run_that_is_killed_has_kept_what_had_ended(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server: the test before this one has one."""
    use_fake_nodes(monkeypatch)
    seen: list[str] = []

    async def killed(_: Any, address: str, way: Way, load: Any) -> dict[str, float]:
        seen.append(load.name)
        if len(seen) > 2:  # the first is the warm-up
            raise KeyboardInterrupt
        return {"duration": 1.0}

    async def enter(*_: object) -> None:
        pass

    monkeypatch.setattr(traffic, "ServerProcess", Ready)
    monkeypatch.setattr(traffic, "enter", enter)
    monkeypatch.setattr(traffic._Taker, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        traffic.main([*arguments, "--layouts", "dp"])
    out = Path(arguments[arguments.index("--out") + 1])
    kept = json.loads((out / "results.json").read_text())["systems"][SHOAL]["ways"]
    assert seen[1:] == [f"poisson {WORKLOAD} (seed {seed})" for seed in (0, 3)]
    assert kept == {"dp": {seen[1]: {"duration": 1.0}}}


def test_results_of_another_comparison_are_not_mixed_in(arguments: list[str]) -> None:
    out = Path(arguments[arguments.index("--out") + 1])
    out.mkdir()
    (out / "results.json").write_bytes(msgspec.json.encode(Figures("llama-3-8b", 4, {})))
    with pytest.raises(UserError, match="of another comparison"):
        traffic.main(arguments)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--workload", "missing.csv"], r"missing\.csv"),
        (["--workload", "poisson --rat 3"], r"--workload 'poisson --rat 3': .*--rat"),
        (["--workload", "priority"], "no priorities"),
        (["--workload", "poisson '"], r"--workload .*No closing quotation"),
        (["--simulated-shape", "no-such-shape"], "no-such-shape"),
        (["--policies", "adaptive", "adaptve"], r"--policies: .*adaptve"),
        (["--layouts", "tp4"], r"--layouts tp4: .*dp, tp2"),
    ],
)
def test_what_cannot_be_measured_is_named(
    arguments: list[str], extra: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        traffic.main([*arguments, *extra])


def test_nothing_to_measure_is_an_error(tmp_path: Path) -> None:
    asked = ["--model-shape", "llama-3-8b", "--engines", "2", "--out", str(tmp_path)]
    with pytest.raises(UserError, match="nothing to measure"):
        traffic.main([*asked, "--no-made-up"])


def test_shoal_is_compared_with_the_best_of_stock() -> None:
    def system(way: str, ttft: float, rate: float) -> SystemFigures:
        return SystemFigures(
            [], 1.0, {way: {"x": {"mean_ttft_ms": ttft, "output_throughput": rate}}}
        )

    figures = Figures("llama-3-8b", 2, {}, {
        STOCK_DP: system("dp", 20.0, 90.0),
        STOCK_TP: system("tp2", 10.0, 80.0),
        SHOAL: system("tp2", 15.0, 45.0),
    })  # fmt: skip
    report = markdown(figures)
    assert "| TTFT mean, ms | 20 | 10 | 15 | 50.0 % slower |" in report
    assert "| output tokens/s | 90 | 80 | 45 | 50.0 % less |" in report
    assert "| TPOT mean, ms | - | - | - | - |" in report
    assert "simulator" not in report


def test_the_report_says_how_far_the_simulator_is_off() -> None:
    measured = {"dp": {"x": {"mean_ttft_ms": 20.0, "mean_e2el_ms": 400.0}}}
    said = {"dp": {"x": {"mean_ttft_ms": 22.0, "mean_e2el_ms": 300.0}}}
    figures = Figures("llama-3-8b", 2, {}, {SHOAL: SystemFigures([], 1.0, measured)})
    figures.systems[SHOAL].simulated = said
    row = "| x | Shoal dp | 22 ms (+10.0%) | - | - | 300 ms (-25.0%) | - |"
    assert row in markdown(figures)


def test_a_way_is_a_layout_or_a_policy() -> None:
    assert traffic._units(Way("flying", policy="flying"), 4) == 4
    assert traffic._units(ways(systems(4, "m")[-1], [])[1], 4) == 1
