"""Makes queries in PromQL for the nodes that the dashboard's variables choose."""

NODES = 'instance=~"$instance"'
"""Matcher that selects the nodes shown."""
WINDOW = "$__rate_interval"
"""Grafana's shortest window that holds enough scrapes for a rate."""


def series(metric: str, *matchers: str) -> str:
    """Return the selector of a metric's series, as ``metric{...}``.

    Args:
        metric: its name.
        matchers: of labels, such as ``outcome="lost"``.
    """
    return f"{metric}{{{', '.join((NODES, *matchers))}}}"


def total(metric: str, *matchers: str, by: str = "") -> str:
    """Return the sum of a gauge over all labels except ``by``."""
    return f"sum{_by(by)} ({series(metric, *matchers)})"


def rate(metric: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """Return how much a counter grows per second, summed over all labels except ``by``."""
    return f"sum{_by(by)} (rate({series(metric, *matchers)}[{window}]))"


def events(metric: str, *matchers: str, by: str = "", window: str = "$__range") -> str:
    """Return how many events a counter saw in a window, by default in the whole time shown.

    ``increase`` extrapolates to the ends of the window, so that one event becomes 1.07 of them.
    """
    return f"round(sum{_by(by)} (increase({series(metric, *matchers)}[{window}])))"


def share(part: str, whole: str) -> str:
    """Return a part of a whole, from 0 to 1, and nothing where the whole is 0.

    Both are extrapolated and come with different reports, so without a bound it might exceed 1.
    """
    return f"clamp_max({part} / ({whole} > 0), 1)"


def quantile(
    share: float, histogram: str, *matchers: str, by: str = "", window: str = WINDOW
) -> str:
    """Return a quantile of a histogram.

    Args:
        share: 0.9 for the 90th percentile.
        histogram: its name, without ``_bucket``.
        matchers: see ``series``.
        by: labels whose values are kept apart.
        window: the time whose observations count.
    """
    buckets = rate(f"{histogram}_bucket", *matchers, by=f"le, {by}" if by else "le", window=window)
    return f"histogram_quantile({share:g}, {buckets})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
