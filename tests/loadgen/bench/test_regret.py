"""``shoal bench regret``: what it finds behind, what it takes up again, and what it refuses."""

import json
from pathlib import Path

import pytest

from shoal.loadgen.bench import regret
from shoal.loadgen.bench.regret import fixed_ways, judge, main
from shoal.loadgen.bench.regret_tables import Load
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_hardware, read_shape
from shoal.server.errors import UserError

QUIET = "--engines 2 --model-shape llama-3-8b-bf16 --trace poisson --rate 1 --duration 4"
"""A group of both engines is much faster under it than either alone."""


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.txt"
    path.write_text(f"# quiet traffic\n{QUIET}  # a note\n\n{QUIET} --target 0:10000:4.5\n")
    return path


def run(tmp_path: Path, *arguments: str) -> int:
    return main(["--out", str(tmp_path / "out"), "--jobs", "1", *arguments])


def results(tmp_path: Path) -> dict[str, object]:
    return dict(json.loads((tmp_path / "out" / "results.json").read_text()))


def node(engines: int, max_sp: int) -> Node:
    shape, hardware = read_shape("llama-3-8b-bf16"), read_hardware("h200")
    return Node(shape, hardware, engines, max_group=engines, max_sp=max_sp)


def test_every_layout_of_a_node_is_a_fixed_way() -> None:
    assert fixed_ways(node(2, 2)) == {"dp": ("static-dp",), "tp2": ("shift",)}
    assert fixed_ways(node(2, 1)) == {"dp": ("static-dp",), "tp2": ("static-tp",)}
    assert [*fixed_ways(node(8, 8))] == ["dp", "tp2", "tp4", "tp8"]
    assert fixed_ways(node(1, 1)) == {"dp": ("static-dp",)}


def test_a_policy_that_holds_the_wrong_layout_is_behind(
    tmp_path: Path, loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--loads", str(loads), "--policy", "static-dp") == 0
    report = capsys.readouterr().out
    assert report == (tmp_path / "out" / "report.md").read_text()
    assert "| mean request at most 2 % longer | 0 |" in report
    assert "| at most 2 points fewer kept | 0 |" in report


def test_the_policy_that_adapts_is_not(
    tmp_path: Path, loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--loads", str(loads)) == 0
    report = capsys.readouterr().out
    assert "| mean request at most 2 % longer | 1 |" in report
    assert "| at most 2 points fewer kept | 1 |" in report


def test_a_second_run_goes_on_where_the_first_one_stopped(
    tmp_path: Path, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = []

    def once(options: tuple[str, ...], policy: str) -> Load:
        simulated.append(options)
        if len(simulated) == 2:
            raise KeyboardInterrupt
        return judge(options, policy)

    monkeypatch.setattr(regret, "judge", once)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--loads", str(loads))
    assert run(tmp_path, "--loads", str(loads)) == 0
    first, second, again = simulated
    assert second == again != first


def test_results_of_another_policy_are_not_taken_up(tmp_path: Path, loads: Path) -> None:
    assert run(tmp_path, "--loads", str(loads), "--policy", "static-tp") == 0
    with pytest.raises(UserError, match="results of the policy static-tp"):
        run(tmp_path, "--loads", str(loads))


def test_a_load_that_cannot_be_simulated_is_told_and_the_others_go_on(
    tmp_path: Path, loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads.write_text(f"--engines 3 --trace poisson\n--trace missing.csv\n{QUIET}\n")
    assert run(tmp_path, "--loads", str(loads), "--policy", "static-dp") == 3
    report = capsys.readouterr().out
    assert "Not simulated: `--engines 3 --trace poisson`: argument --engines" in report
    assert "Not simulated: `--trace missing.csv`" in report
    assert f"`{QUIET}`" in report
    loads.write_text(f"{QUIET}\n")
    assert run(tmp_path, "--loads", str(loads), "--policy", "static-dp") == 0, "they are forgotten"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a file of loads"),
        (("--loads", "missing.txt"), "missing.txt: cannot read it"),
        (("--random", "1", "--traces", "missing.csv"), "--traces: .*missing.csv"),
        (("--random", "-1"), "--random"),
        (("--random", "1", "--policy", "nonsense"), "--policy: no policy 'nonsense'"),
        (("--random", "1", "--jobs", "0"), "--jobs"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, *arguments)


def test_a_line_that_is_no_list_of_options_is_named(tmp_path: Path, loads: Path) -> None:
    loads.write_text(f"{QUIET}\n--trace 'poisson\n")
    with pytest.raises(UserError, match="line 2"):
        run(tmp_path, "--loads", str(loads))


def test_loads_are_simulated_side_by_side_with_the_same_results(
    tmp_path: Path, loads: Path
) -> None:
    out = str(tmp_path / "out")
    assert main(["--out", out, "--jobs", "2", "--loads", str(loads), "--policy", "static-dp"]) == 0
    together = results(tmp_path)
    (tmp_path / "out" / "results.json").unlink()
    assert run(tmp_path, "--loads", str(loads), "--policy", "static-dp") == 0
    alone = results(tmp_path)
    assert sorted(map(str, together["loads"])) == sorted(map(str, alone["loads"]))  # type: ignore[call-overload]
