"""How measured steps correct the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.policies.values.batch import Mode, StepKind
from shoal.policies.values.layouts import Layout

SMOOTHING = 0.1
"""Weight of a new measurement in a correction."""
SPREAD = 0.1
"""Relative standard deviation of steps that is enough to tell a proportional error from a constant.
"""
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
class Correction:
    """How measured times of one layout's steps, of one kind and mode, differ from the roofline.

    A line is fitted to them by least squares. A part of the error is proportional to the roofline,
    such as arithmetic below peak speed, and the rest is the same in every step, such as launches.
    Steps of about equal length cannot separate the two; until lengths differ, the error counts as
    constant.
    """

    layout: Layout
    kind: StepKind
    mode: Mode = Mode.TP
    error: float = 0.0
    """Smoothed relative error of the predictions, each made before its measurement was learned."""
    samples: int = 0
    roofline: float = 0.0
    """Smoothed seconds by the roofline."""
    missed: float = 0.0
    """Smoothed difference of the measured seconds and the roofline's."""
    variance: float = 0.0
    """Smoothed variance of the roofline's seconds."""
    covariance: float = 0.0
    """Smoothed covariance of the roofline's seconds and the difference."""
    streams: bool = False
    """Whether the steps read weights from other engines. Then what counts as their roofline is the
    longer of the corrected computing and the reading."""

    @property
    def line(self) -> tuple[float, float]:
        """By which factor the roofline's seconds are multiplied, and what is added to them."""
        if not self.samples:
            return 1.0, 0.0
        doubt = (SPREAD * self.roofline) ** 2
        # A step of more work takes no less time, whatever a few measurements say.
        slope = max(-1.0, self.covariance / (self.variance + doubt))
        if self.kind is StepKind.PREFILL:
            # Few steps of very different lengths, one of which waited, would give any slope.
            slope *= min(1.0, self.samples / KNOWN)
        return 1 + slope, self.missed - slope * self.roofline

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
        predicted = self.apply(roofline)
        error = abs(predicted - seconds) / seconds
        if expected is not None:
            seconds = min(OUTLIER * expected, max(expected / OUTLIER, seconds))
        missed = _bounded(seconds, roofline) - roofline
        off, beyond = roofline - self.roofline, missed - self.missed
        return replace(
            self,
            error=self.error + weight * (error - self.error),
            samples=self.samples + 1,
            roofline=self.roofline + weight * off,
            missed=self.missed + weight * beyond,
            variance=(1 - weight) * (self.variance + weight * off * off),
            covariance=(1 - weight) * (self.covariance + weight * off * beyond),
        )

    def fit(self, measured: Sequence[tuple[float, float]]) -> "Correction":
        """Return the correction that steps give which were all measured at once.

        They count as many, because each stands for the median of several.

        Args:
            measured: seconds by the roofline, and those that were measured; at least one pair.
        """
        count = len(measured)
        rooflines = [roofline for roofline, _ in measured]
        missed = [_bounded(seconds, roofline) - roofline for roofline, seconds in measured]
        roofline, mean = sum(rooflines) / count, sum(missed) / count
        pairs = list(zip(rooflines, missed, strict=True))
        variance = sum((one - roofline) ** 2 for one in rooflines) / count
        covariance = sum((one - roofline) * (off - mean) for one, off in pairs) / count
        doubt = (SPREAD * roofline) ** 2
        if variance > doubt:
            # Lengths differ enough to tell the two parts of the error, so ``line`` need not doubt.
            covariance *= 1 + doubt / variance
        new = replace(
            self,
            samples=max(KNOWN, count),
            roofline=roofline,
            missed=mean,
            variance=variance,
            covariance=covariance,
        )
        errors = (abs(new.apply(one) - seconds) / seconds for one, seconds in measured)
        return replace(new, error=sum(errors) / count)


def _bounded(seconds: float, roofline: float) -> float:
    return min(MAX_CORRECTION * roofline, max(roofline / MAX_CORRECTION, seconds))
