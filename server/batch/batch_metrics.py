"""What the page of metrics says of batches: the state of the store, which all front ends share."""

from collections import Counter
from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from shoal.server.batch.batch_objects import UNFINISHED, Batch


def batch_metrics(batches: Sequence[Batch]) -> list[Metric]:
    """Return the metrics of the unfinished batches; all are 0 if there is none."""
    states = Counter(batch.status for batch in batches)
    in_state = GaugeMetricFamily("shoal_batches", "Unfinished batches", labels=["status"])
    for status in UNFINISHED:
        in_state.add_metric([status], states[status])
    completed = sum(batch.completed for batch in batches)
    failed = sum(batch.failed for batch in batches)
    waiting = sum(batch.total for batch in batches) - completed - failed
    lines = GaugeMetricFamily(
        "shoal_batch_requests", "Requests of unfinished batches", labels=["state"]
    )
    for state, count in (("waiting", waiting), ("completed", completed), ("failed", failed)):
        lines.add_metric([state], count)
    return [in_state, lines]
