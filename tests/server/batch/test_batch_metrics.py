from pathlib import Path

import msgspec

from shoal.server.batch.batch_metrics import batch_metrics
from shoal.server.batch.batch_objects import Batch, Status
from tests.server.batch.batches import batch_of, jsonl, named, store_in


def shown(batches: list[Batch]) -> dict[tuple[str, str], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in batch_metrics(batches)
        for sample in metric.samples
    }


def test_all_series_are_there_without_a_batch() -> None:
    assert set(shown([]).values()) == {0}
    assert len(shown([])) == 7


def test_unfinished_batches_are_counted(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    first, second = (batch_of(store, jsonl(named(3))) for _ in range(2))
    running = msgspec.structs.replace(
        first, status=Status.IN_PROGRESS, total=9, completed=3, failed=1
    )
    figures = shown([running, second])
    assert figures["shoal_batches", "in_progress"] == figures["shoal_batches", "validating"] == 1
    assert figures["shoal_batch_requests", "waiting"] == 5
    assert figures["shoal_batch_requests", "completed"] == 3
    assert figures["shoal_batch_requests", "failed"] == 1
    store.close()
