"""A hardware file fitted to times predicts those times, and others."""

import pytest

from policies.cost_model import Batch
from runtime.simulation.files import read_hardware, read_shape
from runtime.simulation.fit import Sample, fit, mean_error, predicted

SHAPE = read_shape("llama-3-8b-bf16")
TRUTH = read_hardware("h200")


def samples(*batches: Batch, degrees: tuple[int, ...] = (1, 2)) -> list[Sample]:
    """Return what a node of H200s takes: decodes alone, prompts until their first token."""
    made = [
        Sample(degree, batch, 0.0, 3 if batch.prefill_tokens else 0)
        for degree in degrees
        for batch in batches
    ]
    return [Sample(s.degree, s.batch, predicted(SHAPE, TRUTH, s), s.messages) for s in made]


MEASURED = samples(
    *(Batch(count, count * context) for count in (1, 8, 64) for context in (100, 2000)),
    *(Batch(prefill_tokens=tokens, prefill_context=tokens // 2) for tokens in (32, 512, 8192)),
)


def test_a_fit_predicts_what_was_measured_and_what_was_not() -> None:
    fitted = fit(SHAPE, MEASURED, memory_bytes=1e11)
    others = samples(Batch(16, 16_000), Batch(prefill_tokens=2048, prefill_context=1024))
    for sample in (*MEASURED, *others):
        assert predicted(SHAPE, fitted, sample) == pytest.approx(sample.seconds, rel=0.05)
    assert fitted.memory_bytes == 1e11


def test_a_fit_to_half_the_speed_is_no_fit() -> None:
    slower = [Sample(s.degree, s.batch, 2 * s.seconds, s.messages) for s in MEASURED]
    fitted = fit(SHAPE, MEASURED, memory_bytes=1e11)
    assert mean_error(SHAPE, fitted, slower) > 100 * mean_error(SHAPE, fitted, MEASURED)


def test_a_fit_can_be_repeated() -> None:
    assert fit(SHAPE, MEASURED, memory_bytes=1.0) == fit(SHAPE, MEASURED, memory_bytes=1.0)
