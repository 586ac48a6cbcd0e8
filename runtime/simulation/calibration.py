"""Finds a hardware file whose predictions come close to measured times."""

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
"""Where the search begins for arithmetic if the start has no rate for the dtype."""
PULL = 1e-4
"""Weight of a figure's distance from the start. A figure that samples do not decide stays near it.
"""
FITTED = (
    "memory_bytes_per_second",
    "link_bytes_per_second",
    "allreduce_seconds",
    "step_seconds",
    "request_seconds",
    "message_seconds",
)
"""Figures that times of steps and first tokens decide, in addition to the rate of arithmetic."""
DISTINCT = 2.0
"""How many times as large as the smallest copy the largest must be, so that copies tell a rate."""
_ABOVE_ANY = 1.0
"""Host seconds per layer that are so high that every step in SP waits for the host."""
_WIDEST, _FINEST = 4.0, 1.001
"""The first and the last factor by which figures are changed."""
_LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured time."""

    layout: Layout
    batches: tuple[Batch, ...]
    """The work of each of its steps, in order."""
    seconds: float
    messages: int = 0
    """Messages between processes that the time includes; 0 if it is no first token's."""
    sp: int = 1
    """Degree of SP in which its steps ran; 1: they ran in TP."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A measured copy of KV over one link, or the mean of some."""

    bytes: float
    seconds: float


def predicted(shape: ShapeFile, hardware: HardwareFile, sample: Sample) -> float:
    """Return the simulator's prediction of a sample's time, in seconds."""
    step_seconds = step_times(shape, hardware, sample.sp)
    mode = Mode.SP if sample.sp > 1 else Mode.TP
    steps = sum(step_seconds(sample.layout, batch, mode) for batch in sample.batches)
    front = hardware.front_seconds if sample.messages else 0.0
    return steps + sample.messages * hardware.message_seconds + front


def fit(
    shape: ShapeFile,
    samples: Sequence[Sample],
    start: HardwareFile = START,
    fitted: Sequence[str] = FITTED,
) -> HardwareFile:
    """Return the hardware file with the least mean squared logarithmic error over the samples.

    The search changes one figure after the other by a factor as long as that helps, and then goes
    on with smaller factors.

    Args:
        shape: the model that was measured.
        samples: at least one sample.
        start: where the search begins. Other figures, such as memory, stay as they are there. Rates
            of arithmetic on other dtypes stay in proportion.
        fitted: names of the figures to fit; none may be zero at the start.
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
    """Return the file with the median of the host time per layer in SP, over the samples.

    Each sample gives this time by itself, because the rest of such a step takes the same time for
    any number of tokens. The search of ``fit`` could not find it: while the figure is too low to
    matter, changing it does not change the error.

    Args:
        shape: the model that was measured.
        hardware: the other figures of the devices.
        samples: at least one sample, all of steps in SP that waited for the host.
    """
    above = msgspec.structs.replace(hardware, sp_layer_host_seconds=_ABOVE_ANY)

    def layer_seconds(sample: Sample) -> float:
        layers = len(sample.batches) * shape.layers
        rest = predicted(shape, above, sample) - layers * _ABOVE_ANY
        return max(0.0, (sample.seconds - rest) / layers)

    found = _rounded(statistics.median(map(layer_seconds, samples)))
    return msgspec.structs.replace(hardware, sp_layer_host_seconds=found)


def fit_copies(hardware: HardwareFile, copies: Sequence[Copy]) -> HardwareFile:
    """Return the file with the constant and the rate of a copy that come closest to these.

    The sum of squares of the relative errors is the least. Copies of about one size do not decide
    both: then the rate stays as it is.

    Args:
        hardware: the other figures of the devices.
        copies: at least one copy.
    """
    # Of seconds = constant + bytes * slope, divided by the seconds.
    ones, sizes = [1 / copy.seconds for copy in copies], [c.bytes / c.seconds for c in copies]
    one, mixed, square = (
        _sum_of_products(x, y) for x, y in ((ones, ones), (ones, sizes), (sizes, sizes))
    )
    slope, of_bytes = 0.0, [copy.bytes for copy in copies]
    if max(of_bytes) > DISTINCT * min(of_bytes):
        slope = (one * sum(sizes) - mixed * sum(ones)) / (one * square - mixed * mixed)
    if slope <= 0:
        slope = 1 / hardware.peer_bytes_per_second
    constant = max(0.0, (sum(ones) - slope * mixed) / one)
    return msgspec.structs.replace(
        hardware, copy_seconds=_rounded(constant), peer_bytes_per_second=_rounded(1 / slope)
    )


def copy_seconds(hardware: HardwareFile, copy: Copy) -> float:
    """Return the simulator's prediction of a copy's time, in seconds."""
    return hardware.copy_seconds + copy.bytes / hardware.peer_bytes_per_second


def mean_error(shape: ShapeFile, hardware: HardwareFile, samples: Sequence[Sample]) -> float:
    """Return the mean squared logarithm of predicted time over measured time."""
    logs = [math.log(predicted(shape, hardware, s) / s.seconds) for s in samples]
    return sum(log * log for log in logs) / len(logs)


def _improve(rates: dict[str, float], error: Callable[[], float], factor: float) -> bool:
    """Change each rate by the factor or its inverse if that helps; return whether any did."""
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


def _sum_of_products(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
