"""Compares a client's counts with those in the server's metrics."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from shoal.loadgen.client import Client, ClientError
from shoal.loadgen.exchange import Exchange, Outcome

METRICS_PATH = "/metrics"
SETTLE_SECONDS = 5.0
"""How long a server's counters may take to show the last request."""
POLL_SECONDS = 0.25
_SUMMED = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
_SUCCESS = ("stop", "length")
_SHOAL_OUTCOMES = {
    Outcome.OK: "finished",
    Outcome.EXPIRED_504: "expired",
    Outcome.REFUSED_503: "pool_full",
    Outcome.REFUSED_429: "caller_full",
}
"""Shoal's label ``outcome`` of an answered request, by the client's outcome."""


@dataclass(frozen=True)
class ServerCounters:
    """Counters of a server at one moment, over all its engines."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    succeeded: int = 0
    """Requests that were not aborted."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """``shoal_requests_total`` by outcome; empty for other servers."""

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """Return what was counted between two moments."""
        return ServerCounters(
            self.prompt_tokens - before.prompt_tokens,
            self.output_tokens - before.output_tokens,
            self.succeeded - before.succeeded,
            Counter({name: count - before.outcomes[name] for name, count in self.outcomes.items()}),
        )


@dataclass(frozen=True, slots=True)
class Count:
    """One thing that both sides counted."""

    name: str
    client: int
    server: int
    exact: bool = True
    """False: the server may have counted more, because requests broke off."""

    @property
    def agrees(self) -> bool:
        """Whether both counted the same."""
        return self.client == self.server if self.exact else self.client <= self.server

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        relation = "" if self.exact else " (or more: requests broke off)"
        return f"{self.name:<24}{self.client:>12}{self.server:>12}  {verdict}{relation}"


async def read_counters(client: Client) -> ServerCounters:
    """Return the server's counters.

    Raises:
        ClientError: the server has no metrics in Prometheus' format.
    """
    text = await client.ask_text("GET", METRICS_PATH)
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError as error:
        raise ClientError(f"{METRICS_PATH} is not in Prometheus' format: {error}") from error
    sums: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for sample in samples:
        if sample.name == "shoal_requests_total":
            outcomes[sample.labels["outcome"]] += int(sample.value)
        elif sample.name in _SUMMED and sample.labels.get("finished_reason", "stop") in _SUCCESS:
            sums[sample.name] += int(sample.value)
    prompt_tokens, output_tokens, succeeded = (sums[name] for name in _SUMMED)
    return ServerCounters(prompt_tokens, output_tokens, succeeded, outcomes)


async def settled_counters(
    client: Client,
    exchanges: Sequence[Exchange],
    before: ServerCounters,
    *,
    timeout: float = SETTLE_SECONDS,
    pause: float = POLL_SECONDS,
) -> ServerCounters:
    """Return a server's counters once they include these requests.

    The server may count the end of a request after its client has seen it. So the counters are read
    until they agree with the client's and have not changed between two reads, or the time is over.

    Args:
        client: the server.
        exchanges: every request since ``before``.
        before: the server's counters before them.
        timeout: the most seconds to wait.
        pause: seconds between two reads.

    Raises:
        ClientError: see ``read_counters``.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    last: ServerCounters | None = None
    while True:
        after = await read_counters(client)
        agreed = all(count.agrees for count in compare(exchanges, after.since(before)))
        if (after == last and agreed) or asyncio.get_running_loop().time() >= deadline:
            return after
        last = after
        await asyncio.sleep(pause)


def compare(exchanges: Sequence[Exchange], server: ServerCounters) -> list[Count]:
    """Return what both sides counted of a run.

    Args:
        exchanges: every request of the run.
        server: what the server counted meanwhile.
    """
    ended = Counter(exchange.outcome for exchange in exchanges)
    answered = [exchange for exchange in exchanges if exchange.outcome is Outcome.OK]
    # For other outcomes only the server knows how many tokens it computed before the end.
    exact = all(exchange.outcome in _SHOAL_OUTCOMES for exchange in exchanges)
    prompt_tokens = sum(exchange.counted_prompt for exchange in answered)
    output_tokens = sum(exchange.counted_output for exchange in answered)
    return [
        Count("requests", ended[Outcome.OK], server.succeeded),
        Count("prompt tokens", prompt_tokens, server.prompt_tokens, exact),
        Count("output tokens", output_tokens, server.output_tokens, exact),
        *(
            Count(f"requests {name}", ended[outcome], server.outcomes[name])
            for outcome, name in _SHOAL_OUTCOMES.items()
            if server.outcomes
        ),
    ]
