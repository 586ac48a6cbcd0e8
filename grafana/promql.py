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


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Return how much a counter grows per second, summed over all labels except ``by``."""
    return f"sum{_by(by)} (rate({series(metric, *matchers)}[{WINDOW}]))"


def increase(metric: str, *matchers: str, by: str = "", window: str = "$__range") -> str:
    """Return how much a counter grew in a window, by default in the whole time shown."""
    return f"sum{_by(by)} (increase({series(metric, *matchers)}[{window}]))"


def quantile(share: float, histogram: str, *matchers: str, by: str = "") -> str:
    """Return a quantile of a histogram.

    Args:
        share: 0.9 for the 90th percentile.
        histogram: its name, without ``_bucket``.
        matchers: see ``series``.
        by: labels whose values are kept apart.
    """
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', *matchers, by=labels)})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
