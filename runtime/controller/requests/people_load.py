"""How much people use a node: in the last seconds, and as their latest requests found it."""

import math
from collections.abc import Sequence

from shoal.policies.crowding import Load
from shoal.policies.values.snapshot import PoolRequest, Snapshot

SMOOTHING_SECONDS = 10.0
"""Time constant of the usual figures."""
BURST_SECONDS = 1.0
"""Time constant of the rate that a request finds."""
LINGER_SECONDS = 60.0
"""How long after a person's request the node counts as used, at least."""
LINGER_GAPS = 4.0
"""The same in mean times between two such requests, so that few come later than that."""
MOST_LINGER_SECONDS = 600.0
"""People who come more rarely find a node that others use."""
GAPS_KEPT = 8
"""A gap between two requests has the weight of one in so many."""


class PeopleLoad:
    """Figures of people's requests; ``pass_to``, ``arrive`` and ``run`` tell what happens."""

    def __init__(self) -> None:
        self._now = self._began = math.nan
        self._came_at = -math.inf
        self._gap = 0.0
        self._running_now = 0
        self._rate = self._prompts = self._running = self._latest = 0.0

    def pass_to(self, now: float) -> None:
        """Take note of the time."""
        if math.isnan(self._now):
            self._now = self._began = now
        passed, self._now = now - self._now, now
        kept = math.exp(-passed / SMOOTHING_SECONDS)
        self._running = kept * self._running + (1 - kept) * self._running_now
        self._rate, self._prompts = kept * self._rate, kept * self._prompts
        self._latest *= math.exp(-passed / BURST_SECONDS)

    def arrive(self, requests: Sequence[PoolRequest]) -> None:
        """Take note of requests that have come."""
        for request in requests:
            self._rate += 1 / SMOOTHING_SECONDS
            self._prompts += request.prompt_tokens / SMOOTHING_SECONDS
            self._latest += 1 / BURST_SECONDS
            if self._came_at > -math.inf:
                self._gap += (self._now - self._came_at - self._gap) / GAPS_KEPT
            self._came_at = self._now

    def run(self, requests: int) -> None:
        """Take note of how many are on the node from now on."""
        self._running_now = requests
        if requests:
            self._came_at = self._now

    @property
    def is_unused(self) -> bool:
        """Whether no person's request is on the node or likely to come soon."""
        linger = min(MOST_LINGER_SECONDS, max(LINGER_SECONDS, LINGER_GAPS * self._gap))
        return self._now - self._came_at >= linger

    def usual(self, snapshot: Snapshot) -> Load:
        """Return the averages over the last seconds, or over the time that is known."""
        known = 1 - math.exp((self._began - self._now) / SMOOTHING_SECONDS)
        mean = self._prompts / self._rate if self._rate else snapshot.prompt_tokens
        rate, running = (self._rate / known, self._running / known) if known else (0.0, 0.0)
        return Load(rate, running, mean, snapshot.output_tokens)

    def found(self, snapshot: Snapshot) -> Load:
        """Return what a request finds that comes now: in a burst, the burst."""
        usual = self.usual(snapshot)
        return Load(self._latest, self._running_now, usual.prompt_tokens, usual.output_tokens)
