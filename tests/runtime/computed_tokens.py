"""How often fake engines compute each token of each request."""

from collections import Counter, defaultdict

import pytest

from shoal.runtime.engine.fake.fake_scheduler import Batch, FakeScheduler


class ComputedTokens:
    """Counts what fake engines compute from now on.

    Args:
        monkeypatch: puts itself between the engines and their schedulers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._times: defaultdict[str, Counter[int]] = defaultdict(Counter)
        schedule = FakeScheduler.schedule

        def watched(scheduler: FakeScheduler, *ahead: float) -> tuple[Batch, bool]:
            batch, preempted = schedule(scheduler, *ahead)
            for request, share in batch:
                self._times[request.id].update(range(request.computed, request.computed + share))
            return batch, preempted

        monkeypatch.setattr(FakeScheduler, "schedule", watched)

    @property
    def requests(self) -> int:
        """Requests of which anything was computed."""
        return len(self._times)

    @property
    def again(self) -> dict[str, int]:
        """Tokens that were computed more than once, by request."""
        counts = {id_: sum(n > 1 for n in times.values()) for id_, times in self._times.items()}
        return {request_id: count for request_id, count in counts.items() if count}
