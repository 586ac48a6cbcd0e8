"""A hardware file fitted to times predicts those times, and others."""

from dataclasses import replace

import msgspec
import pytest

from policies.cost_model import Batch
from runtime.simulation.files import read_hardware, read_shape
from runtime.simulation.fit import FLOPS, START, Sample, fit, mean_error, predicted

SHAPE = read_shape("llama-3-8b-bf16")
TRUTH = read_hardware("h200")


def samples(*batches: Batch, degrees: tuple[int, ...] = (1, 2)) -> list[Sample]:
    """Return what a node of H200s takes: decodes alone, prompts until their first token."""
    made = [
        Sample(degree, (batch,), 0.0, 3 if batch.prefill_tokens else 0)
        for degree in degrees
        for batch in batches
    ]
    return [replace(s, seconds=predicted(SHAPE, TRUTH, s)) for s in made]


MEASURED = samples(
    *(Batch(count, count * context) for count in (1, 8, 64) for context in (100, 2000)),
    *(Batch(prefill_tokens=tokens, prefill_context=tokens // 2) for tokens in (32, 512, 8192)),
)


def test_a_fit_predicts_what_was_measured_and_what_was_not() -> None:
    fitted = fit(SHAPE, MEASURED)
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
    fitted = fit(SHAPE, MEASURED)
    assert mean_error(SHAPE, fitted, slower) > 100 * mean_error(SHAPE, fitted, MEASURED)


def test_a_fit_can_be_repeated() -> None:
    assert fit(SHAPE, MEASURED) == fit(SHAPE, MEASURED)


def test_steps_one_after_the_other_take_the_sum() -> None:
    one, other = Batch(prefill_tokens=64), Batch(4, 400)
    apart = [predicted(SHAPE, TRUTH, Sample(2, (batch,), 0.0)) for batch in (one, other)]
    assert predicted(SHAPE, TRUTH, Sample(2, (one, other), 0.0)) == pytest.approx(sum(apart))
