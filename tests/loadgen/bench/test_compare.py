"""From arguments to systems, and which results may be taken up."""

from pathlib import Path

import msgspec
import pytest

from shoal.loadgen.bench import compare
from shoal.loadgen.bench.campaign import Campaign
from shoal.loadgen.bench.dummy_model import kv_bytes_per_token, read_shape
from shoal.loadgen.bench.systems import PORT, Settings, all_systems
from shoal.server.commands import bench
from shoal.server.errors import UserError

GPU = ("gpu", "--model-shape", "llama-3-8b", "--engines", "2", "--systems", "stock-dp")


def test_all_systems_get_the_same_settings() -> None:
    settings = Settings(
        shape="llama-3-8b",
        engines=4,
        dtype="bfloat16",
        quantization="fp8",
        max_model_len=8192,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.8,
        prefix_caching=False,
        api_servers=4,
        options=("--block-size", "32"),
        shoal_options=("--max-group", "2"),
    )
    dp, tp, shoal, check = all_systems(settings, "/m", "/c")
    common = (
        *("--dtype bfloat16", "--max-model-len 8192", "--max-num-seqs 128", "--block-size 32"),
        *("--max-num-batched-tokens 4096", "--gpu-memory-utilization 0.8", "--quantization fp8"),
        *("--load-format dummy", "--no-enable-prefix-caching", "--api-server-count 4"),
    )
    for system in (dp, tp, shoal):
        assert all(option in " ".join(system.command) for option in common), system.name
    assert "--data-parallel-size 4" in " ".join(dp.command)
    assert "--tensor-parallel-size 4" in " ".join(tp.command)
    assert "--engines 4" in " ".join(shoal.command)
    assert "--max-group" not in tp.command
    assert "/c" in check.command
    assert "dummy" not in check.command
    assert dp.argv(81, 82)[dp.command.index(PORT)] == "81"


def test_a_run_without_time_starts_nothing_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = bench.main([*GPU, "--out", str(tmp_path), "--budget-seconds", "0", "--enforce-eager"])
    assert code == compare.INCOMPLETE_EXIT_CODE
    assert "run again" in capsys.readouterr().err
    assert "--enforce-eager" in (tmp_path / "report.md").read_text()
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize("measures", ["breakdown", "first-step", "breakdown,first-step"])
def test_what_is_recorded_is_taken_alone_and_of_shoal_alone(tmp_path: Path, measures: str) -> None:
    arguments = [*GPU[:-2], "--out", str(tmp_path), "--budget-seconds", "0"]
    with pytest.raises(UserError, match=r"--measures .*: take no other with that"):
        bench.main([*arguments, "--measures", f"decode,{measures}"])
    assert bench.main([*arguments, "--measures", measures]) == compare.INCOMPLETE_EXIT_CODE
    assert list((tmp_path / "recordings").iterdir()) == []
    # The same directory goes on with other measures.
    assert bench.main([*arguments, "--measures", "decode"]) == compare.INCOMPLETE_EXIT_CODE
    stock = [*arguments, "--measures", measures, "--systems", "stock-dp"]
    assert bench.main(stock) == 0, "there is nothing to take"


@pytest.mark.parametrize("measures", ["breakdown,first-step", "first-step,breakdown"])
def test_steps_are_timed_before_a_profiler_has_been_there(
    tmp_path: Path, measures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaigns: list[Campaign] = []
    monkeypatch.setattr(compare, "run", lambda one, _budget: campaigns.append(one))
    bench.main([*GPU[:-2], "--out", str(tmp_path), "--measures", measures])
    (campaign,) = campaigns
    assert campaign.measures == ("first-step", "breakdown")
    (shoal,) = campaign.systems
    assert list(campaign._missing(shoal)) == ["first-step", "breakdown"], "in one start"


@pytest.mark.parametrize("measure", ["first-step", "carry"])
def test_an_engine_that_is_alone_for_ever_binds_to_none(tmp_path: Path, measure: str) -> None:
    arguments = ["--engines", "1", "--out", str(tmp_path), "--budget-seconds", "0"]
    assert bench.main([*GPU[:3], *arguments, "--measures", measure]) == 0


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        ([], ((8, 4096), (8, 16384), (64, 1024))),
        (["--max-model-len", "16384"], ((8, 4096), (64, 1024))),
        (["--max-model-len", "1024", "--carry-tokens", "900"], ()),
        (["--carry-cases", "2x64,4x128"], ((2, 64), (4, 128))),
    ],
)
def test_what_is_carried_fits_the_longest_context(
    options: list[str],
    cases: tuple[tuple[int, int], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    campaigns: list[Campaign] = []
    monkeypatch.setattr(compare, "run", lambda one, _budget: campaigns.append(one))
    bench.main([*GPU[:-2], "--out", str(tmp_path), "--measures", "carry", *options])
    (campaign,) = campaigns
    assert campaign.results.sizes.carry_cases == cases
    steps = {name for system in campaign.systems for name in campaign._missing(system)}
    assert steps == {f"carry {requests}x{tokens}" for requests, tokens in cases}


def test_results_of_other_settings_are_not_taken_up(tmp_path: Path) -> None:
    arguments = [*GPU, "--out", str(tmp_path), "--budget-seconds", "0"]
    bench.main(arguments)
    bench.main(arguments)
    with pytest.raises(UserError, match="results of other settings"):
        bench.main([*arguments, "--max-num-seqs", "8"])
    with pytest.raises(UserError, match="results of other sizes"):
        bench.main([*arguments, "--switches", "8"])


def test_results_of_another_workload_are_not_mixed_in(tmp_path: Path) -> None:
    arguments = [*GPU, "--out", str(tmp_path), "--budget-seconds", "0", "--measures", "bursty"]
    bench.main(arguments)
    path = tmp_path / "results.json"
    found = msgspec.json.decode(path.read_bytes())
    found["systems"] = {"stock-dp": {"command": [], "measures": {"bursty": {}}}}
    path.write_bytes(msgspec.json.encode(found))
    with pytest.raises(UserError, match="another workload bursty"):
        bench.main([*arguments, "--rate-scale", "bursty=2"])


def test_rates_and_policies_may_be_added_but_not_other_arrivals(tmp_path: Path) -> None:
    arguments = [*GPU, "--out", str(tmp_path), "--budget-seconds", "0", "--measures", "rates"]
    arguments += ["--shoal-option=--target=0:2000:30"]
    assert bench.main([*arguments, "--rates", "2"]) == compare.INCOMPLETE_EXIT_CODE
    path = tmp_path / "results.json"
    found = msgspec.json.decode(path.read_bytes())
    assert found["workloads"]["rates 2"]["request"] == [8000, 250]
    cell: dict[str, object] = {"policy": None, "problems": [], "sp_above": None, "switching": None}
    found["systems"] = {"stock-dp": {"command": [], "measures": {"rates 2 dp": cell}}}
    path.write_bytes(msgspec.json.encode(found))
    # Of the system there is nothing to add to this rate, and all of the other.
    assert bench.main([*arguments, "--rates", "2", "--policies", "adaptive"]) == 0
    assert bench.main([*arguments, "--rates", "2,2.5"]) == compare.INCOMPLETE_EXIT_CODE
    for other in (["--rate-seconds", "30"], ["--rate-request", "7000:9000,250"]):
        with pytest.raises(UserError, match="another workload rates 2"):
            bench.main([*arguments, "--rates", "2", *other])


def test_requests_of_a_rate_may_differ_in_their_lengths(tmp_path: Path) -> None:
    arguments = [*GPU, "--out", str(tmp_path), "--budget-seconds", "0", "--measures", "rates"]
    bench.main([*arguments, "--rates", "9", "--rate-request", "2000:10000,50"])
    found = msgspec.json.decode((tmp_path / "results.json").read_bytes())
    assert found["workloads"]["rates 9"]["request"] == [[2000, 10000], 50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-shape", "gpt-5"], "--model-shape gpt-5: No such file"),
        (["--measures", "trace"], "needs --trace"),
        (["--saturation", "1,2"], "--saturation"),
        (["--degrees", "2"], "--degrees 2: .* less than --engines 2"),
        (["--throughput-repeats", "0"], "--throughput-repeats 0: it must be at least 1"),
        (["--shoal-option=--max-sp=auto"], "--max-sp=auto: say a number"),
        (["--shoal-option=--max-sp", "--shoal-option=auto"], "--max-sp=auto: say a number"),
        (["--shoal-option=--max-sp=some"], "--max-sp=some: say a number"),
        (["--carry-cases", "8x32768"], "32768 prompt tokens and --carry-tokens 8192 are more than"),
        (["--carry-switches", "0"], "--carry-switches 0: it must be at least 1"),
        (["--degrees", "3"], "--degrees 3: it must be one of 2, 4"),
        (["--policy", "fish"], "no policy 'fish'"),
        (["--trace", "none.csv"], "cannot read none.csv"),
        *(
            (["--measures", "rates", "--rate-request", text], f"{text}: .* PROMPT,OUTPUT")
            for text in ("8000", "8000,250,1", "8,x", "8:,2", "1:2:3,4", "9:8,2", "0,2")
        ),
        (["--measures", "rates", "--rate-request", "8:32000,8:1000"], "33000 tokens are more"),
        (["--measures", "rates", "--max-model-len", "8249"], "8250 tokens are more than"),
        (["--measures", "rates", "--rates", "1,0.001"], "--rates 0.001: no request comes"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        bench.main([*GPU, "--out", str(tmp_path), *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--measures", "fish"],
        ["--carry-cases", "8"],
        ["--carry-cases", "8x0"],
        ["--rate-scale", "fish=1"],
        ["--rate-scale", "0"],
        ["--duration", "bursty=long"],
        ["--rates", "1,0"],
        ["--rates", "inf"],
        ["--rate-seconds", "1,2"],
        ["--policies", "shift"],
    ],
)
def test_what_no_option_can_mean_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench.main([*GPU, "--out", str(tmp_path), *arguments])


def test_kv_bytes_are_those_of_all_layers() -> None:
    # Llama-3-8B: 32 layers, 8 KV heads of 128, keys and values of two bytes.
    assert kv_bytes_per_token(read_shape("llama-3-8b")) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(read_shape("qwen-2.5-32b")) == 2 * 64 * 8 * 128 * 2
