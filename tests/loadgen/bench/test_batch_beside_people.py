"""``shoal bench batch`` on fake engines, and what is written of its runs."""

import json
from pathlib import Path

import pytest
from openai.types import Batch

from shoal.loadgen.bench.batch_beside_people import (
    Measured,
    Results,
    WayFigures,
    check_in_work,
    main,
    percentile_90,
    report,
)
from shoal.loadgen.bench.token_client import RequestFailedError
from shoal.server.errors import UserError

FAKE = ("--fake-engine", "--fake-step-ms", "20", "--max-num-seqs", "8")
PEOPLE = "poisson --rate 8 --duration 1.5 --prompt-tokens 100:200 --output-tokens 5:20"


def arguments(out: Path, *more: str) -> list[str]:
    return [
        *("--model-shape", "llama-3-8b", "--engines", "2", "--out", str(out)),
        *("--workload", PEOPLE, "--batch", "50:100,5:30", *FAKE, *more),
    ]


@pytest.mark.usefixtures("preloaded_servers")
def test_people_are_measured_without_a_batch_and_beside_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "--ways", "tp2", "--runs", "2")) == 0
    said = capsys.readouterr()
    assert said.out.count("| tp2 |") == 1
    kept = json.loads((tmp_path / "results.json").read_text())["ways"]["tp2"]
    alone, beside = kept["alone"], kept["beside"]
    assert len(alone["ttft"]) == len(beside["ttft"]) > 0
    assert alone["layouts"] == beside["layouts"] == ["tp2"] * 2
    assert (alone["lines"], alone["line_tokens"]) == (0, 0)
    assert beside["lines"] > 0
    assert beside["line_tokens"] >= 5 * beside["lines"]
    order = [line.split(":")[0] for line in said.err.splitlines() if "requests in" in line]
    kinds = [f"tp2 {turn}" for turn in ("0 alone", "0 beside", "1 beside", "1 alone")]
    assert order == kinds, "in the opposite order, so that a drift is seen"


@pytest.mark.parametrize(
    ("status", "message"),
    [("completed", "too small: raise --lines-per-second"), ("failed", "has failed")],
)
def test_people_are_beside_no_batch_that_is_over(status: str, message: str) -> None:
    batch = Batch(
        id="1",
        input_file_id="2",
        endpoint="/v1/completions",
        object="batch",
        created_at=0,
        completion_window="24h",
        status="in_progress",
    )
    check_in_work(batch)
    with pytest.raises(RequestFailedError, match=message):
        check_in_work(batch.model_copy(update={"status": status}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ways", "tp4"], "--ways: no layout of dp, tp2, and no policy 'tp4'"),
        (["--batch", "100"], "--batch 100: it must be PROMPT,OUTPUT"),
        (["--runs", "0"], "--runs"),
        (["--workload", "chats"], "vLLM's client waits for no answers"),
    ],
)
def test_what_cannot_be_measured_is_named(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main([*arguments(tmp_path), *more])


def test_the_report_has_both_kinds_of_each_way_side_by_side() -> None:
    alone = Measured([0.1, 0.2], [0.01, 0.01], 10.0)
    beside = Measured([0.1, 0.22], [0.01, 0.0105], 10.0, lines=50, line_tokens=5000)
    results = Results(["python", "-m", "cli", "serve"], {}, PEOPLE, "1,2", 7.0, {})
    results.ways["dp"] = WayFigures(alone, beside)
    cells = [cell.strip() for cell in report(results).splitlines()[6].strip("|").split("|")]
    assert cells[:4] == ["dp", "190.00", "208.00", "9.5 % slower"]
    assert cells[4:7] == ["10.00", "10.45", "4.5 % slower"]
    assert cells[7:] == ["0.20", "0.20", "5", "500"]
    assert percentile_90([]) is None
    assert percentile_90([3.0]) == 3.0
