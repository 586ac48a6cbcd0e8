"""``shoal simulate`` from its arguments to its files."""

import json
from pathlib import Path

import pytest

from shoal.policies.cost.correction import Correction
from shoal.policies.values.batch import StepKind
from shoal.policies.values.layouts import Layout
from shoal.runtime.fit_file import write_fit
from shoal.server.commands import cli


def run(*arguments: str) -> int:
    return cli.main(["simulate", *arguments])


def test_policies_are_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    code = run(
        *("--trace", "priority", "--requests", "60", "--rate-scale", "2"),
        *("--policy", "static-dp,static-tp", "--engines", "2"),
        *("--model-shape", "llama-3-8b-bf16", "--target=-10:500:20", "--target=0:1000:50"),
        *("--json", str(figures), "--plot", str(picture)),
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "static-dp" in out
    assert "priority -10" in out
    content = json.loads(figures.read_text())
    assert [one["run"] for one in content["reports"]] == ["static-dp", "static-tp"]
    assert content["requests"] == 60
    for one in content["reports"]:
        assert one["groups"]["all"]["finished"] == 60
        assert one["groups"]["all"]["attainment"] is not None
    assert picture.read_text().startswith("<svg")


def test_groups_run_by_sequence_as_those_of_a_node_that_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a dense model on GPUs do; without SP the policy ``shift`` has nothing to decide."""
    figures = tmp_path / "figures.json"
    one = ("--trace", "poisson", "--rate", "1", "--requests", "1", "--prompt-tokens", "4000")
    common = (*one, "--engines", "2", "--policy", "shift", "--json", str(figures))
    first_tokens = []
    for degree in ((), ("--max-sp", "2"), ("--max-sp", "2", "--shift-threshold", "off")):
        assert run(*common, "--model-shape", "llama-3-8b-bf16", *degree) == 0
        (report,) = json.loads(figures.read_text())["reports"]
        first_tokens.append(report["groups"]["all"]["ttft"]["mean"])
    assert first_tokens[0] == first_tokens[1] < first_tokens[2]
    for model in (("qwen3-30b-a3b-bf16",), ("shoal-demo", "--hardware", "cpu-2core")):
        assert run(*common, "--model-shape", *model) == 2
        assert "--policy shift needs --max-sp" in capsys.readouterr().err


def test_engines_share_weights_as_a_node_that_starts_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an H100 whole weights of a 32B model leave little KV, and single engines keep them."""
    figures = tmp_path / "figures.json"
    few = ("--trace", "poisson", "--rate", "1", "--requests", "3", "--json", str(figures))
    model = ("--model-shape", "qwen-2.5-32b-bf16", "--hardware", "h100", "--engines", "2")

    def times(*arguments: str) -> list[float]:
        assert run(*few, *model, "--policy", "static-dp,static-tp", *arguments) == 0
        reports = json.loads(figures.read_text())["reports"]
        return [one["groups"]["all"]["tpot"]["mean"] for one in reports]

    found = times()
    chosen = [line for line in capsys.readouterr().err.splitlines() if "--share-weights" in line]
    assert chosen == ["static-tp: --share-weights 2"]
    whole, shared = times("--share-weights", "1"), times("--share-weights", "2")
    assert "--share-weights" not in capsys.readouterr().err
    assert found == [whole[0], shared[1]]
    assert shared[0] > whole[0], "single engines that share read weights in each step"


def test_sp_is_compared_with_the_rest(tmp_path: Path) -> None:
    """In prompts SP is faster than TP and DP, in outputs much slower where it runs alone."""
    figures = tmp_path / "figures.json"
    workload = ("--trace", "poisson", "--rate", "1", "--requests", "30", "--prompt-tokens", "4000")
    common = (*workload, "--output-tokens", "50", "--max-sp", "8", "--json", str(figures))

    def means(*arguments: str) -> dict[str, tuple[float, float]]:
        assert run(*common, *arguments) == 0
        return {
            one["run"]: tuple(one["groups"]["all"][of]["mean"] for of in ("ttft", "tpot"))
            for one in json.loads(figures.read_text())["reports"]
        }

    found = means("--policy", "static-dp,static-tp,shift")
    only = means("--policy", "shift", "--shift-threshold", "0", "--captured-tokens", "0")
    dp, tp, shift, sp = (*(found[n] for n in ("static-dp", "static-tp", "shift")), only["shift"])
    assert shift[0] < tp[0] < dp[0]
    assert shift[0] < sp[0] < dp[0]  # a prompt waits for the slower outputs of those before it
    assert shift[1] <= tp[1] < 0.5 * sp[1]
    off = means("--policy", "static-tp,shift", "--shift-threshold", "off")
    assert off["shift"] == off["static-tp"]


def test_steps_take_the_times_that_a_fit_has_found(tmp_path: Path) -> None:
    """The fit says that all steps with prompts take 40 ms longer than the roofline says."""
    fit, figures = tmp_path / "fit.json", tmp_path / "figures.json"
    slow = Correction(Layout(), StepKind.PREFILL).fit([(0.03, 0.07)])
    write_fit(fit, {"gpu": "mine"}, (slow,))
    workload = ("--trace", "poisson", "--rate", "0.5", "--requests", "20", "--output-tokens", "20")
    common = (*workload, "--engines", "1", "--model-shape", "llama-3-8b-bf16")

    def means(*more: str) -> tuple[float, float]:
        assert run(*common, "--policy", "static-dp", "--json", str(figures), *more) == 0
        group = json.loads(figures.read_text())["reports"][0]["groups"]["all"]
        return group["ttft"]["mean"], group["tpot"]["mean"]

    (ttft, tpot), (fitted, same) = means(), means("--fit-file", str(fit))
    assert fitted - ttft == pytest.approx(0.04, abs=0.005)
    assert same == pytest.approx(tpot, rel=0.1)


def test_all_turns_of_chats_are_counted(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    chats = ("--trace", "chats", "--requests", "5", "--turns", "3:3", "--shared-tokens", "500")
    assert run(*chats, "--policy", "static-dp,static-tp", "--json", str(figures)) == 0
    content = json.loads(figures.read_text())
    assert content["requests"] == 15
    for one in content["reports"]:
        assert one["groups"]["all"]["finished"] == 15
        assert one["groups"]["all"]["hit_rate"] > 0.4


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,100,10\n"
    )
    assert run("--trace", str(trace), "--policy", "static-dp", "--engines", "1") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "none.csv", "--policy", "static-dp"), "cannot read none.csv"),
        (("--trace", "bursty", "--policy", "static"), "no policy 'static'"),
        (("--trace", "bursty", "--policy", "static-dp", "--rate-scale", "0"), "--rate-scale"),
        (("--trace", "bursty", "--policy", "static-dp", "--requests", "0"), "--requests 0"),
        (("--trace", "bursty", "--policy", "static-dp", "--model-shape", "x"), "cannot read x"),
        (("--trace", "bursty", "--policy", "static-dp", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--trace", "bursty", "--policy", "static-dp", "--fit-file", "no"), "no: no such file"),
        (("--trace", "bursty", "--policy", "static-dp", "--fit-file", __file__), "Expected"),
        (("--trace", "bursty", "--policy", "shift", "--max-sp", "1"), "needs --max-sp"),
        (("--trace", "bursty", "--policy", "shift", "--max-sp", "5"), "--max-sp 5"),
        (
            ("--trace", "bursty", "--policy", "static-dp", "--captured-tokens", "-1"),
            "--captured-tokens",
        ),
        (
            ("--trace", "bursty", "--policy", "static-dp", "--engines", "2", "--max-group", "4"),
            "--max-group 4: there are only 2 engines",
        ),
        (
            ("--trace", "bursty", "--policy", "manual", "--engines", "2", "--max-pp", "4"),
            "--max-pp 4: a group has at most 2 engines",
        ),
        (("--trace", "bursty", "--policy", "manual", "--layout", "pp2"), "no layout 'pp2'"),
        (("--trace", "bursty", "--policy", "static-dp", "--layout", "tp2"), "--policy manual"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("target", ["0:1", "a:1:1", "0:0:1"])
def test_a_target_has_three_parts(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--trace", "bursty", "--policy", "static-dp", "--target", target) == 2
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize(("hardware", "seats"), [("h200", 1024), ("l40s", 256)])
def test_a_node_has_the_seats_that_vllm_gives_it_on_that_hardware(
    hardware: str, seats: int, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    common = (
        *("--trace", "poisson", "--rate", "2000", "--requests", "500", "--policy", "static-dp"),
        *("--prompt-tokens", "16", "--output-tokens", "200", "--engines", "1"),
        *("--hardware", hardware, "--model-shape", "llama-3-8b-bf16", "--json", str(figures)),
    )

    def mean(*options: str) -> float:
        assert run(*common, *options) == 0
        (report,) = json.loads(figures.read_text())["reports"]
        return float(report["groups"]["all"]["e2el"]["mean"])

    assert mean() == mean("--max-num-seqs", str(seats))
    assert mean() != mean("--max-num-seqs", str(1280 - seats))
