"""One request that was sent, and its response: the outcome, the times, and the tokens."""

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

from shoal.loadgen.summary import Record
from shoal.loadgen.workload import Arrival


class Outcome(enum.StrEnum):
    """How a sent request ended; every request ends in exactly one way."""

    OK = "ok"
    """The stream came to its end, with tokens."""
    REFUSED_429 = "refused_429"
    """The caller has too many requests."""
    REFUSED_503 = "refused_503"
    """The server has too many requests."""
    EXPIRED_504 = "expired_504"
    """The request's deadline passed."""
    ERROR_STATUS = "error_status"
    """Any other error that the server reported, as the response's status or in its stream."""
    TRUNCATED = "truncated"
    """The response broke off before the stream's end, or the server aborted it (``abort``)."""
    CONNECTION_ERROR = "connection_error"
    """There was no response."""
    TIMEOUT = "timeout"
    """The whole response did not come in time; the client gave up."""
    CANCELLED = "cancelled"
    """The client was stopped."""


class Flaw(enum.Enum):
    """What can be wrong with the tokens of a request that succeeded."""

    PROMPT_LENGTH = "had another prompt length than asked for"
    ENDED_EARLY = "ended before the output length asked for"
    MISCOUNTED = "had a token count that does not fit their streams"
    NO_USAGE = "had no token count from the server: chunks were counted"


_OF_STATUS: dict[int, Outcome] = {
    HTTPStatus.TOO_MANY_REQUESTS: Outcome.REFUSED_429,
    HTTPStatus.SERVICE_UNAVAILABLE: Outcome.REFUSED_503,
    HTTPStatus.GATEWAY_TIMEOUT: Outcome.EXPIRED_504,
}


def outcome_of_status(status: int) -> Outcome:
    """Return the outcome that an HTTP error status stands for."""
    return _OF_STATUS.get(status, Outcome.ERROR_STATUS)


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are seconds from the start of the run."""

    index: int
    """Index of the request, or of its chat, in its workload."""
    arrival: Arrival
    """With the time at which it was due, without content and later turns."""
    sent: float | None = None
    """When sending began; the request was due at ``arrival.at``."""
    chunk_times: list[float] = field(default_factory=list)
    """When each chunk with a choice came. A chunk usually has one token, and more if the server had
    more to send."""
    ended: float | None = None
    outcome: Outcome = Outcome.CANCELLED
    status: int | None = None
    error: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """As the server counted them; None if it did not say."""
    output_tokens: int | None = None
    """As the server counted them; None if it did not say."""
    layout: str | None = None
    """Layout of the unit that served it, if the server says so."""

    @property
    def failed(self) -> bool:
        """Whether it has ended with another outcome than ``OK``."""
        return self.ended is not None and self.outcome is not Outcome.OK

    @property
    def lag(self) -> float:
        """Seconds from the moment it was due to the moment it was sent."""
        return 0.0 if self.sent is None else self.sent - self.arrival.at

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: seconds between each chunk and the one before."""
        times = self.chunk_times
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def counted_output(self) -> int:
        """Output tokens by the server's count; without that, one token for each chunk."""
        return len(self.chunk_times) if self.output_tokens is None else self.output_tokens

    @property
    def counted_prompt(self) -> int:
        """Prompt tokens by the server's count; without that, the number asked for."""
        asked = self.arrival.prompt_tokens
        return asked if self.prompt_tokens is None else self.prompt_tokens

    def flaws(self) -> Iterator[Flaw]:
        """Yield what is wrong with the server's counts of its tokens.

        The stream shows which counts are possible: each chunk has at least one token, except the
        first of a chat, which names the role. A stream that ended at its length has all tokens
        asked for.
        """
        if self.outcome is not Outcome.OK:
            return
        if self.prompt_tokens is None or self.output_tokens is None:
            yield Flaw.NO_USAGE
            return
        asked = self.arrival.output_tokens
        if self.arrival.prompt_tokens not in (0, self.prompt_tokens):
            yield Flaw.PROMPT_LENGTH
        at_length = self.finish_reason == "length"
        if len(self.chunk_times) - 1 > self.output_tokens or (
            at_length and self.output_tokens != asked
        ):
            yield Flaw.MISCOUNTED
        elif self.output_tokens < asked:
            yield Flaw.ENDED_EARLY

    def record(self) -> Record:
        """Return the record from which figures are computed.

        As in ``vllm bench serve``, a request begins when it is sent and, if it succeeds, ends with
        its last token.
        """
        finished = self.outcome is Outcome.OK
        return Record(
            arrived=self.arrival.at if self.sent is None else self.sent,
            started=None,
            first_token=self.chunk_times[0] if self.chunk_times else None,
            ended=self.chunk_times[-1] if finished else self.ended,
            prompt_tokens=self.counted_prompt,
            output_tokens=self.counted_output,
            finished=finished,
            priority=self.arrival.priority,
            phase=self.arrival.phase,
            itls=self.itls,
        )


def tokens_by_second(exchanges: Iterable[Exchange]) -> dict[int, float]:
    """Return the output tokens of each second; a response's tokens count evenly per chunk."""
    tokens: defaultdict[int, float] = defaultdict(float)
    for exchange in exchanges:
        for at in exchange.chunk_times:
            tokens[int(at)] += exchange.counted_output / len(exchange.chunk_times)
    return dict(tokens)
