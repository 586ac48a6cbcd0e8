"""A hardware file whose predictions come near measured times."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.runtime.simulation.shape_files import HardwareFile, ShapeFile, step_times

START = HardwareFile(
    memory_bytes=0.0,
    memory_bytes_per_second=1e11,
    flops_per_second={},
    link_bytes_per_second=1e10,
    allreduce_seconds=1e-4,
    step_seconds=1e-3,
    request_seconds=1e-4,
    message_seconds=1e-3,
    reserved_bytes=0.0,
)
"""Where the search begins: between a CPU and a GPU."""
FLOPS = 1e12
"""The same for arithmetic, where it begins with none."""
PULL = 1e-4
"""Weight of a figure's own distance from the start: what the samples do not tell stays near it."""
FITTED = (
    "memory_bytes_per_second",
    "link_bytes_per_second",
    "allreduce_seconds",
    "step_seconds",
    "request_seconds",
    "message_seconds",
)
"""Figures that times of steps and first tokens tell, beside the rate of arithmetic."""
_ABOVE_ANY = 1.0
"""Seconds of the host for one layer that make every step by sequence wait for it."""
_WIDEST, _FINEST = 4.0, 1.001
"""Factors by which a figure is changed, at first and at last."""
_LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured time."""

    layout: Layout
    batches: tuple[Batch, ...]
    """The work of each of its steps, one after the other."""
    seconds: float
    messages: int = 0
    """Messages from process to process that are part of it."""
    sp: int = 1
    """Degree of SP in which its steps were run; 1: in TP."""


def predicted(shape: ShapeFile, hardware: HardwareFile, sample: Sample) -> float:
    """Return what the simulator takes a sample's time for, seconds."""
    step_seconds = step_times(shape, hardware, sample.sp)
    mode = Mode.SP if sample.sp > 1 else Mode.TP
    steps = sum(step_seconds(sample.layout, batch, mode) for batch in sample.batches)
    return steps + sample.messages * hardware.message_seconds


def fit(
    shape: ShapeFile,
    samples: Sequence[Sample],
    start: HardwareFile = START,
    fitted: Sequence[str] = FITTED,
) -> HardwareFile:
    """Return the hardware file with the least mean squared logarithmic error over the samples.

    Changes one figure after the other by a factor, as long as that helps, by ever smaller factors.

    Args:
        shape: the model that was measured.
        samples: at least one.
        start: where the search begins. What is not fitted, such as memory, stays as it is there;
            so do the rates of arithmetic on other dtypes, in proportion.
        fitted: names of the figures that are; none may be zero at the start.
    """
    flops = start.flops_per_second.get(shape.weight_dtype, FLOPS)
    begin = {name: getattr(start, name) for name in fitted} | {"flops_per_second": flops}
    rates: dict[str, float] = dict(begin)

    def hardware() -> HardwareFile:
        return _with_rates(shape, rates, start)

    def error() -> float:
        pull = sum(math.log(rates[name] / begin[name]) ** 2 for name in begin)
        return mean_error(shape, hardware(), samples) + PULL * pull

    factor = _WIDEST
    while factor > _FINEST:
        if not _improve(rates, error, factor):
            factor = math.sqrt(factor)
    return hardware()


def fit_sp_host(
    shape: ShapeFile, hardware: HardwareFile, samples: Sequence[Sample]
) -> HardwareFile:
    """Return the file with the median of what samples say a layer in SP takes of the host.

    Each says it alone: what else such a step takes is the same whatever its tokens. So the search
    of ``fit`` is not for it, nor could it be: a figure that is too low to count has no error.

    Args:
        shape: the model that was measured.
        hardware: what else there is to know of the devices.
        samples: at least one, all of steps by sequence that waited for the host.
    """
    above = msgspec.structs.replace(hardware, sp_layer_host_seconds=_ABOVE_ANY)

    def layer_seconds(sample: Sample) -> float:
        layers = len(sample.batches) * shape.layers
        rest = predicted(shape, above, sample) - layers * _ABOVE_ANY
        return max(0.0, (sample.seconds - rest) / layers)

    found = _rounded(statistics.median(map(layer_seconds, samples)))
    return msgspec.structs.replace(hardware, sp_layer_host_seconds=found)


def mean_error(shape: ShapeFile, hardware: HardwareFile, samples: Sequence[Sample]) -> float:
    """Return the mean squared logarithm of predicted over measured."""
    logs = [math.log(predicted(shape, hardware, s) / s.seconds) for s in samples]
    return sum(log * log for log in logs) / len(logs)


def _improve(rates: dict[str, float], error: Callable[[], float], factor: float) -> bool:
    """Change each rate by the factor or its inverse where that helps; return whether any did."""
    best, improved = error(), False
    for name in rates:
        for change in (factor, 1 / factor):
            before = rates[name]
            rates[name] = before * change
            now = error()
            if now < best - _LEAST_GAIN:
                best, improved = now, True
                break
            rates[name] = before
    return improved


def _with_rates(shape: ShapeFile, rates: Mapping[str, float], start: HardwareFile) -> HardwareFile:
    rates = {name: _rounded(rate) for name, rate in rates.items()}
    before = {shape.weight_dtype: FLOPS, **start.flops_per_second}
    change = rates["flops_per_second"] / before[shape.weight_dtype]
    flops = {dtype: _rounded(rate * change) for dtype, rate in before.items()}
    return msgspec.structs.replace(start, **{**rates, "flops_per_second": flops})


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
