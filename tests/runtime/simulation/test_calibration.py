"""A hardware file fitted to times predicts those times, and others."""

import functools
from dataclasses import replace

import msgspec
import pytest

from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Layout
from shoal.runtime.simulation.calibration import (
    FLOPS,
    START,
    Sample,
    fit,
    fit_sp_host,
    mean_error,
    predicted,
)
from shoal.runtime.simulation.shape_files import HardwareFile, read_hardware, read_shape

SHAPE = read_shape("llama-3-8b-bf16")
TRUTH = read_hardware("h200")


def samples(*batches: Batch, sizes: tuple[int, ...] = (1, 2)) -> list[Sample]:
    """Return what a node of H200s takes: decodes alone, prompts until their first token."""
    made = [
        Sample(Layout(tp=size), (batch,), 0.0, 3 if batch.prefill_tokens else 0)
        for size in sizes
        for batch in batches
    ]
    return [replace(s, seconds=predicted(SHAPE, TRUTH, s)) for s in made]


MEASURED = samples(
    *(Batch(count, count * context) for count in (1, 8, 64) for context in (100, 2000)),
    *(Batch(prefill_tokens=tokens, prefill_context=tokens // 2) for tokens in (32, 512, 8192)),
)


@functools.cache
def fitted_once() -> HardwareFile:
    """Return the fit to what was measured, which takes seconds."""
    return fit(SHAPE, MEASURED)


def test_a_fit_predicts_what_was_measured_and_what_was_not() -> None:
    fitted = fitted_once()
    others = samples(Batch(16, 16_000), Batch(prefill_tokens=2048, prefill_context=1024))
    for sample in (*MEASURED, *others):
        assert predicted(SHAPE, fitted, sample) == pytest.approx(sample.seconds, rel=0.05)


def test_what_is_not_fitted_stays_as_it_was() -> None:
    start = msgspec.structs.replace(START, memory_bytes=1e11, flops_per_second={"fp8": 2e12})
    fitted = fit(SHAPE, MEASURED, start)
    assert fitted.memory_bytes == 1e11
    # Nothing was said of bf16: the search began with FLOPS, and fp8 keeps its distance from that.
    rates = fitted.flops_per_second
    assert rates["fp8"] / rates["bf16"] == pytest.approx(2e12 / FLOPS, rel=1e-3)


def test_a_fit_to_half_the_speed_is_no_fit() -> None:
    slower = [replace(s, seconds=2 * s.seconds) for s in MEASURED]
    fitted = fitted_once()
    assert mean_error(SHAPE, fitted, slower) > 100 * mean_error(SHAPE, fitted, MEASURED)


def test_a_fit_can_be_repeated() -> None:
    assert fit(SHAPE, MEASURED) == fitted_once()


def test_steps_one_after_the_other_take_the_sum() -> None:
    one, other = Batch(prefill_tokens=64), Batch(4, 400)
    apart = [predicted(SHAPE, TRUTH, Sample(Layout(tp=2), (batch,), 0.0)) for batch in (one, other)]
    assert predicted(SHAPE, TRUTH, Sample(Layout(tp=2), (one, other), 0.0)) == pytest.approx(
        sum(apart)
    )


# --- what a step by sequence takes of the host ---


def in_sp(*prompts: int, degree: int = 2) -> list[Sample]:
    made = [
        Sample(
            Layout(tp=degree), (Batch(prefill_tokens=n, prefill_context=n // 2),), 0.0, 3, sp=degree
        )
        for n in prompts
    ]
    return [replace(s, seconds=predicted(SHAPE, TRUTH, s)) for s in made]


def with_host(layer_seconds: float) -> HardwareFile:
    return msgspec.structs.replace(TRUTH, sp_layer_host_seconds=layer_seconds)


def test_a_sample_in_sp_is_predicted_in_sp() -> None:
    """One that the host is too slow for takes the same for any number of tokens; in TP not."""
    short, longer = in_sp(600, 1000)
    assert short.seconds == pytest.approx(longer.seconds)
    in_tp = [predicted(SHAPE, TRUTH, replace(s, sp=1)) for s in (short, longer)]
    assert in_tp[0] < in_tp[1] - 1e-3
    free = [predicted(SHAPE, with_host(0.0), s) for s in (short, longer)]
    assert free[0] < free[1] - 1e-3


@pytest.mark.parametrize("start", [0.0, 1e-6, 4e-4, 1e-2])
def test_short_steps_in_sp_tell_what_a_layer_takes_of_the_host(start: float) -> None:
    """Also where the file began with nothing, or so little that it does not count."""
    fitted = fit_sp_host(SHAPE, with_host(start), in_sp(600, 800, 1000))
    assert fitted == with_host(pytest.approx(TRUTH.sp_layer_host_seconds, rel=1e-3))


def test_one_odd_measurement_does_not_decide_it() -> None:
    odd, *rest = in_sp(600, 800, 1000)
    fitted = fit_sp_host(SHAPE, TRUTH, [replace(odd, seconds=10.0), *rest])
    assert fitted.sp_layer_host_seconds == pytest.approx(TRUTH.sp_layer_host_seconds, rel=1e-3)


def test_steps_that_take_less_than_all_others_take_nothing_of_the_host() -> None:
    (sample,) = in_sp(600)
    hurried = replace(sample, seconds=TRUTH.step_seconds / 2)
    assert fit_sp_host(SHAPE, TRUTH, [hurried]).sp_layer_host_seconds == 0.0


def test_a_fit_of_other_times_leaves_it_as_it_was() -> None:
    assert fit(SHAPE, MEASURED, with_host(7e-4)).sp_layer_host_seconds == 7e-4
