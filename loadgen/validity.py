"""Judges whether a run measured the server, and not the machine that made the load."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.loadgen.exchange import Outcome
from shoal.loadgen.open_loop import Run
from shoal.loadgen.summary import quantile

MAX_LAG_SECONDS = 0.05
"""Default bound of the 99th percentile of each lag."""
MAX_SHARE_OF_TTFT = 0.1
"""Bound of the median of the event loop's lag, as a share of the median TTFT."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How late something was, seconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Lag":
        """Return the lag of these samples, 0 if there are none."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        return cls(quantile(values, 0.5), quantile(values, 0.99), max(values))

    def __str__(self) -> str:
        return (
            f"p50 {1000 * self.p50:.1f} ms, p99 {1000 * self.p99:.1f} ms, "
            f"max {1000 * self.max:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is valid, and why not."""

    send_lag: Lag
    """From when a request was due to when it was sent."""
    loop_lag: Lag
    """How late the event loop was that measures all times."""
    problems: tuple[str, ...]
    """One line each; none: the run is valid."""

    @property
    def valid(self) -> bool:
        """Whether the figures are the server's."""
        return not self.problems


def judge(run: Run, max_lag_seconds: float = MAX_LAG_SECONDS) -> Verdict:
    """Return whether a run is valid.

    A lag of sending changes the load, and a lag of the event loop affects every measured time. The
    99th percentile of each may be at most ``max_lag_seconds``, and the median of the event loop's
    lag at most a tenth of the median TTFT.
    """
    send = Lag.of([exchange.lag for exchange in run.exchanges if exchange.sent is not None])
    loop = Lag.of(run.loop_lags)
    problems = [
        f"{what} lagged: its p99 is {1000 * lag.p99:.1f} ms, more than {1000 * max_lag_seconds:g}"
        for what, lag in (("sending", send), ("the event loop", loop))
        if lag.p99 > max_lag_seconds
    ]
    answered = [e for e in run.exchanges if e.outcome is Outcome.OK and e.sent is not None]
    if not answered:
        problems.append("no request succeeded")
    else:
        ttft = quantile([e.chunk_times[0] - (e.sent or 0.0) for e in answered], 0.5)
        if loop.p50 > MAX_SHARE_OF_TTFT * ttft:
            problems.append(
                f"the event loop lagged: its median is {1000 * loop.p50:.1f} ms, more than a tenth "
                f"of the median TTFT, {1000 * ttft:.1f} ms"
            )
    if run.interrupted:
        problems.append(f"it was stopped, with {run.unsent} requests not sent")
    return Verdict(send, loop, tuple(problems))
