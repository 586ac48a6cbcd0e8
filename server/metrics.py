"""Prometheus metrics: vLLM's own of the front end, and Shoal's of the node."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.messages import LayoutView


class NodeCollector(Collector):
    """Shoal's metrics of one ``LayoutView``."""

    def __init__(self, view: LayoutView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        view = self._view
        yield GaugeMetricFamily(
            "shoal_ready", "1 if the node can take requests.", value=int(view.ready)
        )
        yield _gauge("shoal_engines", "Engines by state.", "state", [e.state for e in view.engines])
        yield _gauge("shoal_units", "Units by layout.", "layout", [u.layout for u in view.units])
        yield GaugeMetricFamily(
            "shoal_pool_waiting", "Requests in the task pool.", value=view.waiting
        )
        switches = CounterMetricFamily(
            "shoal_switches", "Switches since the start, by outcome.", labels=["outcome"]
        )
        for outcome, count in sorted(view.switches_total.items()):
            switches.add_metric([outcome], count)
        yield switches


def node_metrics(view: LayoutView) -> bytes:
    """Return Shoal's metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(view))
    return generate_latest(registry)


def _gauge(name: str, documentation: str, label: str, values: list[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for value, count in sorted(Counter(values).items()):
        family.add_metric([value], count)
    return family
