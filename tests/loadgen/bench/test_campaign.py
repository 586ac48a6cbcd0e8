"""A whole comparison over fake engines: three servers started, measured, ended; and cut short."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shoal.loadgen.bench import comparison_tables
from shoal.loadgen.bench.campaign import Campaign
from shoal.loadgen.bench.compare import run
from shoal.loadgen.bench.comparison_results import Results, ResultsFile
from shoal.loadgen.bench.dummy_model import read_shape
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.open_loop_workloads import bursty, priority
from shoal.loadgen.bench.rates import Sweep, arrivals
from shoal.loadgen.bench.systems import (
    SERVED_NAME,
    SHOAL,
    STOCK_DP,
    Settings,
    System,
    dp_layout,
    tp_layout,
)
from shoal.loadgen.shapes import Lengths

SIZES = Sizes(
    batches=(1, 2),
    decode_tokens=8,
    decode_repeats=1,
    prompts=(16,),
    prompt_repeats=1,
    repeated_tokens=0,
    saturation=(4, 16, 4),
    saturation_repeats=1,
    switches=2,
    load=2,
    load_tokens=500,
    pause_seconds=0.0,
    long_prompts=(32,),
    long_repeats=1,
    prompt_load=(2, 64, 1),
    combined_load=(2, 32, 4),
    scored=(1, 1 << 20, 1),
)
SETTINGS = Settings(
    shape="tiny",
    engines=2,
    dtype="float32",
    quantization=None,
    max_model_len=2048,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    gpu_memory_utilization=0.9,
    prefix_caching=False,
    api_servers=1,
    options=(),
)
FAKE = (
    sys.executable,
    "-m",
    "shoal.server.commands.cli",
    "serve",
    "--fake-engine",
    "--fake-step-ms",
    "1",
)
COMMAND = (
    *FAKE,
    "--port",
    "{port}",
    "--admin-port",
    "{admin_port}",
    "--served-model-name",
    SERVED_NAME,
)
APPLYING = (
    *("decode", "prefill", "saturation", "switch-idle", "switch-loaded", "modes"),
    *("bursty", "priority"),
)
CELLS = {f"rates 4 {way}" for way in ("dp", "tp2", "sp2", "shift", "flying")}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def fake_systems() -> list[System]:
    """A static system and Shoal, both of them over fake engines."""
    return [
        System(STOCK_DP, (*COMMAND, "--engines", "1"), (dp_layout(1, pinned=True),)),
        System(
            SHOAL,
            (*COMMAND, "--engines", "2", "--max-sp", "2"),
            (dp_layout(2, pinned=False), tp_layout(2)),
            switches=True,
        ),
    ]


def campaign(path: Path, systems: list[System], measures: tuple[str, ...]) -> Campaign:
    logs = path / "logs"
    logs.mkdir(exist_ok=True)
    file = ResultsFile(path / "results.json")
    return Campaign(
        systems=systems,
        measures=measures,
        workloads={"bursty": bursty(0, 1.0, 3.0), "priority": priority(0, 1.0, 3.0)},
        policy="flying",
        results=file.take_up(Results(SETTINGS, SIZES, read_shape("llama-3-8b"), {})),
        file=file,
        logs=logs,
        sweep=Sweep(
            {"rates 4": arrivals(4.0, 1.0, Lengths((64, 64), (4, 4)), 0)},
            ("flying",),
            lead_seconds=0.0,
        ),
    )


def still_running(path: Path) -> list[str]:
    """Return what runs still with its output in a file of this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "fd/1").readlink().is_relative_to(path):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it has ended
    return found


@pytest.mark.usefixtures("preloaded_servers")
@pytest.mark.timeout(1200)
def test_systems_are_measured_one_after_the_other(tmp_path: Path) -> None:
    one = campaign(tmp_path, fake_systems(), (*APPLYING, "rates", "numerics"))
    assert not run(one, 1100.0)
    systems = msgspec.json.decode((tmp_path / "results.json").read_bytes())["systems"]
    assert list(systems) == [STOCK_DP, SHOAL]
    # Too long a prompt is refused: that keeps nothing else from being measured.
    assert all(set(systems[name]["failures"]) == {"numerics"} for name in systems)
    assert set(systems[SHOAL]["measures"]) == set(APPLYING) | CELLS
    assert set(systems[STOCK_DP]["measures"]) == {
        *(set(APPLYING) - {"switch-idle", "switch-loaded"}),
        "rates 4 dp",
    }
    shoal = systems[SHOAL]["measures"]
    assert set(shoal["decode"]) == {"dp", "tp2"}
    assert sum(shoal["decode"]["dp"]["2"]["placed"].values()) == 4
    assert shoal["switch-loaded"]["running"] == {"0": 2, "1": 2}
    assert shoal["switch-loaded"]["switches"] == 2
    assert shoal["priority"]["groups"]["all"]["requests"] > 0
    assert len({shoal[name]["requests"] for name in CELLS}) == 1
    assert shoal["rates 4 shift"]["e2el"]["mean"] > 0
    assert still_running(tmp_path) == []
    report = comparison_tables.markdown(one.results)
    assert "TPOT, 2 per unit" in report
    assert "bind, every engine decoding" in report
    # What is there is not measured again: nothing is started.
    again = campaign(tmp_path, fake_systems(), (*APPLYING, "rates"))
    assert run(again, 0.0)
    assert len(again.results.systems[SHOAL].starts) == 1


def test_what_still_runs_is_seen(tmp_path: Path) -> None:
    waiting = (sys.executable, "-c", "input()")
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=log) as process,
    ):
        assert len(still_running(tmp_path)) == 1
        process.communicate(b"\n")
    assert still_running(tmp_path) == []


def test_a_spent_budget_leaves_no_process(tmp_path: Path) -> None:
    one = campaign(tmp_path, fake_systems()[1:], ("decode",))
    assert not run(one, 3.0)
    assert still_running(tmp_path) == []
    assert one.results.systems[SHOAL].measures == {}


def test_a_server_that_ends_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    one = campaign(tmp_path, [System(STOCK_DP, words, (dp_layout(1, pinned=False),))], ("decode",))
    assert not run(one, 60.0)
    failure = one.results.systems[STOCK_DP].failures["server"]
    assert "ended with 3" in failure
    assert failure.endswith("no such model")


def test_no_system_is_started_with_too_little_time(tmp_path: Path) -> None:
    one = replace(campaign(tmp_path, fake_systems(), ("decode",)), step_seconds=1000.0)
    assert not run(one, 100.0)
    assert one.results.systems == {}
