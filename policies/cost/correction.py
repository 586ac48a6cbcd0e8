"""How measured steps correct the roofline."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from shoal.policies.values.batch import Mode, StepKind
from shoal.policies.values.layouts import Layout

SMOOTHING = 0.1
"""Weight of a new measurement among those of steps of its length."""
SPREAD = 0.1
"""Relative standard deviation of lengths from which on they tell a proportional error from a
constant one."""
OCTAVE = 4
"""How many lengths of steps are told apart between one and its double."""
FEW = 5
"""Fewer measurements of a length count less."""
KEPT = 0.99
"""What a length's share is multiplied by at each measurement of another length."""
LEAST_WEIGHT = 0.02
"""Least weight of a length that was measured often."""
MAX_CORRECTION = 10.0
"""Upper bound of the factor of a correction; its inverse is the lower bound. So a single absurd
measurement has little effect."""
OUTLIER = 1.5
"""Once enough steps are known, of these or of similar ones, a measurement counts as at most this
factor times the prediction, or its inverse: the first step after a switch also waits for what its
devices still compute."""
KNOWN = 20
"""Number of measurements after which predictions are that good."""


@dataclass(frozen=True, slots=True)
class Alike:
    """What is known of steps of about one length."""

    length: int
    """Logarithm of their seconds by the roofline, in parts of an octave."""
    roofline: float
    """Smoothed seconds by the roofline."""
    missed: float
    """Smoothed difference of the measured seconds and the roofline's."""
    samples: int = 1
    at: int = 0
    """How many steps the correction had seen when it saw the latest of these."""
    share: float = 1 - KEPT
    """Their share of the steps that were measured lately, then."""

    def share_at(self, now: int) -> float:
        """Return their share after so many steps of all lengths."""
        return self.share * KEPT ** max(0, now - self.at)

    def weight(self, now: int) -> float:
        """Return how much they count after so many steps of all lengths."""
        often = min(1.0, self.samples / FEW)
        return often * max(LEAST_WEIGHT, self.share_at(now))


@dataclass(frozen=True, slots=True)
class Correction:
    """How measured times of one layout's steps, of one kind and mode, differ from the roofline.

    A line is fitted to them by least squares of relative errors. A part of the error is
    proportional to the roofline, such as arithmetic below peak speed, and the rest is the same in
    every step, such as launches. Steps of about equal length cannot separate the two; until lengths
    differ, the error counts as constant. Steps of other lengths are not forgotten while the node
    has none such. Otherwise what a layout's long steps have missed would be added to its short
    ones, when nobody measures them any more because the node has another layout.
    """

    layout: Layout
    kind: StepKind
    mode: Mode = Mode.TP
    error: float = 0.0
    """Smoothed relative error of the predictions, each made before its measurement was learned."""
    samples: int = 0
    alike: tuple[Alike, ...] = ()
    """What is known of the steps of each length."""
    line: tuple[float, float] = (1.0, 0.0)
    """By which factor the roofline's seconds are multiplied, and what is added to them."""
    streams: bool = False
    """Whether the steps read weights from other engines. Then what counts as their roofline is the
    longer of the corrected computing and the reading."""

    def apply(self, roofline: float) -> float:
        """Return the corrected seconds of a step to which the roofline gives ``roofline``."""
        slope, offset = self.line
        return _bounded(slope * roofline + offset, roofline)

    def learn(self, roofline: float, seconds: float, expected: float | None = None) -> "Correction":
        """Return the correction after one more measurement.

        Args:
            roofline: the step's seconds by the roofline.
            seconds: those that were measured.
            expected: those that corrections predict which are known well; None: none is.
        """
        weight = max(SMOOTHING, 1 / (self.samples + 1))
        error = abs(self.apply(roofline) - seconds) / seconds
        if expected is not None:
            seconds = min(OUTLIER * expected, max(expected / OUTLIER, seconds))
        missed, samples = _bounded(seconds, roofline) - roofline, self.samples + 1
        length = _length(roofline)
        rest = tuple(one for one in self.alike if one.length != length)
        old = next((one for one in self.alike if one.length == length), None)
        if old is None:
            new = Alike(length, roofline, missed, 1, samples)
        else:
            part = max(SMOOTHING, 1 / (old.samples + 1))
            new = Alike(
                length,
                old.roofline + part * (roofline - old.roofline),
                old.missed + part * (missed - old.missed),
                old.samples + 1,
                samples,
                old.share_at(samples) + 1 - KEPT,
            )
        return self._with((*rest, new), samples, self.error + weight * (error - self.error))

    def fit(self, measured: Sequence[tuple[float, float]]) -> "Correction":
        """Return the correction that steps give which were all measured at once.

        They count as many, because each stands for the median of several.

        Args:
            measured: seconds by the roofline, and those that were measured; at least one pair.
        """
        samples = max(KNOWN, len(measured))
        missed = defaultdict[int, list[tuple[float, float]]](list)
        for roofline, seconds in measured:
            pair = roofline, _bounded(seconds, roofline) - roofline
            missed[_length(roofline)].append(pair)
        alike = [
            Alike(
                length,
                fmean(roofline for roofline, _ in pairs),
                fmean(more for _, more in pairs),
                FEW,
                samples,
                1 / len(missed),
            )
            for length, pairs in missed.items()
        ]
        new = self._with(tuple(alike), samples, 0.0)
        errors = (abs(new.apply(one) - seconds) / seconds for one, seconds in measured)
        return replace(new, error=fmean(errors))

    def _with(self, alike: tuple[Alike, ...], samples: int, error: float) -> "Correction":
        """Return the correction with other measurements, and the line through them."""
        trust = 1.0
        if self.kind is StepKind.PREFILL:
            # Few steps of very different lengths, one of which waited, would give any slope.
            trust = min(1.0, samples / KNOWN)
        line = _line(alike, samples, trust)
        return replace(self, error=error, samples=samples, alike=alike, line=line)


def _length(roofline: float) -> int:
    return round(OCTAVE * math.log2(roofline))


def _line(alike: Sequence[Alike], now: int, trust: float) -> tuple[float, float]:
    """Return the factor and the summand that make the relative errors smallest.

    Args:
        alike: the measured steps, at least one length.
        now: how many steps were measured.
        trust: by what the proportional part of the error is multiplied, at most 1.
    """
    # Weighted least squares of y = slope + offset * x, in relative terms: x is 1 / roofline, and y
    # is what the roofline has missed as a part of it.
    sum_w = sum_wx = sum_wxx = sum_wy = sum_wxy = 0.0
    for one in alike:
        weight, x, y = one.weight(now), 1 / one.roofline, one.missed / one.roofline
        sum_w += weight
        sum_wx += weight * x
        sum_wxx += weight * x * x
        sum_wy += weight * y
        sum_wxy += weight * y * x
    spread = sum_w - sum_wx * sum_wx / sum_wxx
    # A step of more work takes no less time, whatever a few measurements say.
    steep = (sum_wy - sum_wx * sum_wxy / sum_wxx) / max(spread, sum_w * SPREAD**2)
    slope = trust * max(-1.0, steep)
    return 1 + slope, (sum_wxy - slope * sum_wx) / sum_wxx


def _bounded(seconds: float, roofline: float) -> float:
    return min(MAX_CORRECTION * roofline, max(roofline / MAX_CORRECTION, seconds))
