"""Prometheus metrics: vLLM's own of the front end, and Shoal's of the node."""

from collections import Counter
from collections.abc import Iterator, Mapping

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
        yield GaugeMetricFamily(
            "shoal_pool_waiting_tokens",
            "Prompt tokens of the requests in the task pool.",
            value=view.waiting_tokens,
        )
        yield _counter(
            "shoal_requests", "Requests that have ended, by outcome.", view.requests_total
        )
        yield _counter(
            "shoal_switches", "Switches since the start, by outcome.", view.switches_total
        )
        yield CounterMetricFamily(
            "shoal_policy_errors",
            "Plans that raised or could not be done: the node kept what it had.",
            value=view.policy_errors,
        )
        yield CounterMetricFamily(
            "shoal_moved_requests",
            "Requests taken out of a unit and recomputed on another.",
            value=view.moves_total,
        )
        errors = GaugeMetricFamily(
            "shoal_step_time_relative_error",
            "Smoothed relative error of the cost model's step times, by layout.",
            labels=["layout"],
        )
        for layout, error in sorted(view.step_errors.items()):
            errors.add_metric([layout], error)
        yield errors


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


def _counter(name: str, documentation: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=["outcome"])
    for outcome, count in sorted(counts.items()):
        family.add_metric([outcome], count)
    return family
