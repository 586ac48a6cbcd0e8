"""``shoal bench fit``: what it takes from results, and that the file predicts them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.loadgen.bench import fit
from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.dummy_model import read_shape as read_config
from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.systems import SHOAL, Settings
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation import calibration
from shoal.runtime.simulation.calibration import Copy, Sample, predicted
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import HardwareFile, read_hardware, read_shape
from shoal.server.errors import UserError

SHAPE, TRUTH = read_shape("llama-3-8b-bf16"), read_hardware("h200")
SETTINGS = Settings("llama-3-8b", 2, "bfloat16", None, 32768, 256, 8192, 0.9, False, 1, ())


def results(measures: dict[str, Any], config: str = "llama-3-8b") -> Results:
    systems = {SHOAL: SystemResults(["serve", "--max-sp=2"], measures=measures)}
    return Results(SETTINGS, Sizes(), read_config(config), {}, systems=systems)


def published(name: str) -> Results:
    path = Path(__file__).parents[3] / "docs" / "benchmarks" / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Results)


def measured() -> Results:
    """Return the results of a node that is exactly as the hardware file says."""
    decode = {layout: {n: {"tpot": 1.0} for n in ("1", "8", "64")} for layout in ("dp", "tp2")}
    prefill = {layout: {n: {"ttft": 1.0} for n in ("512", "16384")} for layout in ("dp", "tp2")}
    made = results({"decode": decode, "prefill": prefill})
    samples = fit.samples_of(made)
    for figures, key in ((decode, "tpot"), (prefill, "ttft")):
        for found in figures.values():
            for figure in found.values():
                figure[key] = predicted(SHAPE, TRUTH, next(samples))
    return made


def test_a_prompt_is_computed_in_chunks() -> None:
    made = results({"prefill": {"tp2": {"10000": {"ttft": 0.25}}}})
    steps = (
        Batch(prefill_tokens=8192, prefill_context=4096),
        Batch(prefill_tokens=1808, prefill_context=8192 + 904),
    )
    assert list(fit.samples_of(made)) == [Sample(Layout(tp=2), steps, 0.25, 3)]


def test_the_fitted_file_predicts_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "results.json", tmp_path / "fitted.json"
    source.write_bytes(msgspec.json.encode(measured()))
    argv = [str(source), "--output", str(output), "--model-shape", "llama-3-8b-bf16"]
    assert fit.main(argv) == 0
    fitted = read_hardware(str(output))
    for sample in fit.samples_of(measured()):
        assert predicted(SHAPE, fitted, sample) == pytest.approx(sample.seconds, rel=0.02)
    assert fitted.message_seconds == TRUTH.message_seconds
    assert "error: mean 0." in capsys.readouterr().out


def test_without_an_output_the_file_there_is_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "results.json"
    source.write_bytes(msgspec.json.encode(measured()))
    argv = [str(source), "--model-shape", "llama-3-8b-bf16", "--start"]
    assert fit.main([*argv, "h200"]) == 0
    assert "error: mean 0.0%, largest 0.0%" in capsys.readouterr().out
    slower = msgspec.structs.replace(TRUTH, memory_bytes_per_second=1e12)
    other = tmp_path / "slower.json"
    other.write_bytes(msgspec.json.encode(slower))
    assert fit.main([*argv, str(other)]) == 0
    assert "error: mean 0.0%" not in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "slower.json"}


def test_h200_predicts_a_run_that_it_was_not_fitted_to() -> None:
    samples = list(fit.samples_of(published("llama-3-8b-2xh200-c")))
    errors = [abs(predicted(SHAPE, TRUTH, s) / s.seconds - 1) for s in samples]
    assert len(errors) == 24
    assert sum(errors) / len(errors) < 0.032
    assert max(errors) < 0.15


def test_h200_is_as_far_from_a_node_with_a_slow_host_as_the_docs_say() -> None:
    samples = list(fit.samples_of(published("llama-3-8b-4xh200-b")))
    errors = [predicted(SHAPE, TRUTH, s) / s.seconds - 1 for s in samples]
    alone = [error for s, error in zip(samples, errors, strict=True) if s.layout == DP]
    assert (len(errors), len(alone)) == (18, 6)
    assert sum(map(abs, errors)) / len(errors) == pytest.approx(0.12, abs=0.005)
    assert max(map(abs, errors)) == pytest.approx(0.60, abs=0.005)
    assert max(map(abs, alone)) < 0.02
    assert max(errors) < 0.02, "what waits for the host is predicted too short, never too long"


def test_h200_is_as_near_to_the_published_results_as_the_docs_say() -> None:
    samples = [
        sample
        for name in ("2xh200", "2xh200-b", "4xh200")
        for sample in fit.samples_of(published(f"llama-3-8b-{name}"))
    ]
    errors = [abs(predicted(SHAPE, TRUTH, s) / s.seconds - 1) for s in samples]
    assert len(errors) == 66
    assert sum(errors) / len(errors) < 0.036
    assert max(errors) < 0.22


# --- what a step by sequence takes of the host ---


def modes(tp: dict[str, float], sp: dict[str, float]) -> dict[str, Any]:
    return {"modes": {"dp": {"ttft": tp}, "tp2": {"ttft": tp}, "sp2": {"ttft": sp}}}


def test_first_tokens_in_sp_that_are_no_faster_than_in_tp_tell_of_the_host() -> None:
    made = results(modes({"1536": 0.030, "4096": 0.068}, {"1536": 0.034, "4096": 0.065}))
    batch = Batch(prefill_tokens=1536, prefill_context=768)
    assert list(fit.sp_host_samples_of(made)) == [Sample(Layout(tp=2), (batch,), 0.034, 3, sp=2)]
    assert list(fit.samples_of(made)) == []


@pytest.mark.parametrize("prompt", ["512", "1024", "16384"])
def test_prompts_of_graphs_or_of_several_steps_tell_nothing_of_it(prompt: str) -> None:
    """No graph's step was run in SP; and of several, one may have been the device's."""
    made = results(modes({prompt: 0.020}, {prompt: 0.024}))
    assert list(fit.sp_host_samples_of(made)) == []


def test_a_group_wider_than_its_sp_degree_is_predicted_as_such() -> None:
    made = results({"modes": {"tp4": {"ttft": {"1536": 0.02}}, "sp4": {"ttft": {"1536": 0.03}}}})
    (sample,) = fit.sp_host_samples_of(made)
    assert (sample.layout, sample.sp) == (Layout(tp=4), 2)


@pytest.mark.parametrize("name", ["2xh200-c", "4xh200", "4xh200-b"])
def test_the_published_runs_have_no_prompt_that_tells_of_it(name: str) -> None:
    """So what H200 says of the host is from another benchmark, and a fit to them leaves it.

    In 4xh200-b prompts are short enough, but TP waited for the host as well, and longer.
    """
    assert list(fit.sp_host_samples_of(published(f"llama-3-8b-{name}"))) == []


@pytest.mark.parametrize(("measured_too", "layer_seconds"), [(True, 9e-4), (False, None)])
def test_a_fit_takes_it_from_results_that_tell_and_leaves_it_with_others(
    tmp_path: Path, measured_too: bool, layer_seconds: float | None
) -> None:
    made = measured()
    slow = msgspec.structs.replace(TRUTH, sp_layer_host_seconds=9e-4)
    batch = Batch(prefill_tokens=1536, prefill_context=768)
    in_tp, in_sp = (
        predicted(SHAPE, slow, Sample(Layout(tp=2), (batch,), 0.0, 3, sp=n)) for n in (1, 2)
    )
    if measured_too:
        made.systems[SHOAL].measures |= modes({"1536": in_tp}, {"1536": in_sp})
    source, output = tmp_path / "results.json", tmp_path / "fitted.json"
    source.write_bytes(msgspec.json.encode(made))
    argv = [str(source), "--output", str(output), "--model-shape", "llama-3-8b-bf16"]
    assert fit.main(argv) == 0
    found = read_hardware(str(output)).sp_layer_host_seconds
    if layer_seconds is None:
        assert found == TRUTH.sp_layer_host_seconds
    else:
        assert found == pytest.approx(layer_seconds, rel=0.02)


def test_results_of_another_model_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "results.json"
    source.write_bytes(msgspec.json.encode(results({}, "qwen-2.5-32b")))
    argv = [str(source), "--output", "unused", "--model-shape", "llama-3-8b-bf16"]
    with pytest.raises(UserError, match="another model than the shape"):
        fit.main(argv)


def test_results_without_times_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "results.json"
    source.write_bytes(msgspec.json.encode(results({})))
    argv = [str(source), "--output", "unused", "--model-shape", "llama-3-8b-bf16"]
    with pytest.raises(UserError, match="no time of a step"):
        fit.main(argv)


# --- copies of KV ---


def copied(hardware: HardwareFile, *sizes: float) -> dict[str, Any]:
    """Return what carries of one copy each, of so many bytes, measure on such hardware."""
    found: dict[str, Any] = {"carry bystanders": {"bind": {}}}
    for size in sizes:
        seconds = calibration.copy_seconds(hardware, Copy(size, 0.0))
        copies = {"count": 3, "bytes": 3 * size, "seconds": 3 * seconds}
        found[f"carry 8x{size:g}"] = {"copies": copies}
    return found


SLOW = msgspec.structs.replace(TRUTH, copy_seconds=0.0004, peer_bytes_per_second=55e9)


@pytest.mark.parametrize(
    ("sizes", "constant", "rate"),
    [
        ((1e6, 5e8, 4e9), 0.0004, 55e9),
        # Of one size: what the file's rate does not explain is the constant.
        ((5e8,), 0.0004 + 5e8 / 55e9 - 5e8 / TRUTH.peer_bytes_per_second, None),
        ((), None, None),
    ],
    ids=["several sizes", "one size", "none"],
)
def test_copies_tell_their_constant_and_their_rate(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[float, ...],
    constant: float | None,
    rate: float | None,
) -> None:
    made = measured()
    made.systems[SHOAL].measures |= copied(SLOW, *sizes)
    source, output = tmp_path / "results.json", tmp_path / "fitted.json"
    source.write_bytes(msgspec.json.encode(made))
    argv = [str(source), "--output", str(output), "--model-shape", "llama-3-8b-bf16"]
    assert fit.main(argv) == 0
    found = read_hardware(str(output))
    assert found.copy_seconds == pytest.approx(constant or TRUTH.copy_seconds, rel=1e-3)
    wanted = rate or TRUTH.peer_bytes_per_second
    assert found.peer_bytes_per_second == pytest.approx(wanted, rel=1e-3)
    assert capsys.readouterr().out.count("a copy of ") == len(sizes)


def test_copies_that_larger_ones_overtake_tell_no_rate() -> None:
    """Noise must not make a rate below zero."""
    found = calibration.fit_copies(TRUTH, [Copy(1e6, 0.002), Copy(5e6, 0.001)])
    assert found.peer_bytes_per_second == TRUTH.peer_bytes_per_second
    assert 0.001 < found.copy_seconds < 0.002


def test_the_simulator_takes_as_long_for_a_copy_as_the_file_says() -> None:
    settings = Node(SHAPE, SLOW).config("manual").fake
    assert settings is not None
    assert (settings.copy_seconds, settings.peer_bytes_per_second) == (0.0004, 55e9)
