"""The page of metrics: those of vLLM and the front ends, and those of the controller."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shoal.runtime.protocol.messages import NodeMetrics
from shoal.runtime.protocol.messages.metrics import EngineGauges, Family, Kind

SCHEDULER_GAUGES: Mapping[str, Callable[[EngineGauges, str], float]] = {
    "vllm:num_requests_running": lambda engine, _: engine.running,
    "vllm:num_requests_waiting": lambda engine, _: engine.waiting + engine.deferred,
    "vllm:num_requests_waiting_by_reason": lambda engine, reason: (
        engine.deferred if reason == "deferred" else engine.waiting
    ),
    "vllm:kv_cache_usage_perc": lambda engine, _: engine.kv_cache_usage,
}
"""Gauges of vLLM that a scheduler's steps set, and the values that replace theirs here.

An engine that has become a member of another engine's unit schedules no steps, so its gauges would
keep their last values. The functions take an engine and the value of the label ``reason``, which is
empty if there is no such label.
"""


class _One(Collector):
    """A registry of one metric family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


async def page(registered: Iterable[Metric], node: NodeMetrics) -> bytes:
    """Return the page in Prometheus' text format.

    The page of a node with two engines took a front end 15 ms of a CPU's time. No stream would get
    a token meanwhile, so other tasks have their turn after each metric family.

    Args:
        registered: the metric families of the front ends' registry.
        node: the controller's metrics.
    """
    text = list[bytes]()
    for metric in _families(registered, node):
        text.append(generate_latest(_One(metric)))
        await asyncio.sleep(0)
    return b"".join(text)


def _families(registered: Iterable[Metric], node: NodeMetrics) -> Iterator[Metric]:
    engines = {str(gauges.engine): gauges for gauges in node.engines}
    for metric in registered:
        if metric.name in SCHEDULER_GAUGES:
            _show(metric, engines)
        elif metric.name.startswith("shoal_"):
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
        yield metric
    yield from map(_metric, node.families)


def _show(metric: Metric, engines: Mapping[str, EngineGauges]) -> None:
    """Replace the values of each engine's last step by the current ones."""
    value = SCHEDULER_GAUGES[metric.name]
    metric.samples = [
        sample._replace(value=value(engines[engine], sample.labels.get("reason", "")))
        for sample in metric.samples
        if (engine := sample.labels["engine"]) in engines
    ]


def _metric(family: Family) -> Metric:
    """Convert a ``Family`` to a metric family of prometheus_client's."""
    if family.kind is Kind.HISTOGRAM:
        return _histogram(family)
    kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = kind(family.name, family.documentation, labels=family.labels)
    for sample in family.samples:
        metric.add_metric(sample.labels, sample.value)
    return metric


def _histogram(family: Family) -> Metric:
    metric = HistogramMetricFamily(family.name, family.documentation, labels=family.labels)
    bounds = [*(str(float(bound)) for bound in family.bounds), "+Inf"]
    for sample in family.samples:
        buckets = list(zip(bounds, accumulate(sample.counts), strict=True))
        metric.add_metric(sample.labels, buckets, sample.value)
    return metric
