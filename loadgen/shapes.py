"""Made-up workloads: a workload is the beginning of endless arrivals drawn from a seed."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.loadgen.workload import Arrival, Block, Phase, Workload, chat_of

URGENT = -10
"""Priority of the urgent requests of ``priority``; all others have 0."""
DEFAULT_REQUESTS = 4000
"""Requests of a workload whose length is not given."""

Range = tuple[float, float]
"""Inclusive bounds."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of made-up requests, drawn uniformly between inclusive bounds."""

    prompt: tuple[int, int] = (128, 2048)
    output: tuple[int, int] = (64, 512)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return prompt and output tokens of one request."""
        return rng.randint(*self.prompt), rng.randint(*self.output)


def poisson(
    rng: random.Random, lengths: Lengths = Lengths(), *, rate: float = 4.0
) -> Iterator[Arrival]:
    """Yield a Poisson process of ``rate`` requests per second."""
    return gamma(rng, lengths, rate=rate, burstiness=1.0)


def gamma(
    rng: random.Random,
    lengths: Lengths = Lengths(),
    *,
    rate: float = 4.0,
    burstiness: float = 0.25,
) -> Iterator[Arrival]:
    """Yield arrivals whose gaps are gamma distributed.

    Args:
        rng: of everything drawn.
        lengths: of the requests.
        rate: mean, requests per second.
        burstiness: the gamma distribution's shape, as in ``vllm bench serve``: 1 is a Poisson
            process, less is burstier, more is more even.
    """
    at = 0.0
    while True:
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield Arrival(at, *lengths.draw(rng))


def ramp(
    rng: random.Random,
    lengths: Lengths = Lengths(),
    *,
    rate: Range = (1.0, 10.0),
    ramp_seconds: float = 300.0,
) -> Iterator[Arrival]:
    """Yield a Poisson process whose rate goes from one value to another, and stays there.

    Args:
        rng: of everything drawn.
        lengths: of the requests.
        rate: the first and the last, requests per second.
        ramp_seconds: how long it takes.
    """
    first, last = rate

    def rate_at(at: float) -> float:
        return first + (last - first) * min(1.0, at / ramp_seconds)

    return _varying(rng, lengths, max(rate), rate_at)


def hill(
    rng: random.Random,
    lengths: Lengths = Lengths(),
    *,
    rate: Range = (1.0, 40.0),
    hill_seconds: float = 180.0,
) -> Iterator[Arrival]:
    """Yield a Poisson process whose rate rises evenly and falls again, once.

    Args:
        rng: of everything drawn.
        lengths: of the requests.
        rate: the first, which is also the last, and that at the top, requests per second. If the
            first is the higher one, the hill is a valley.
        hill_seconds: how long both take together.
    """
    foot, top = rate

    def rate_at(at: float) -> float:
        height = max(0.0, 1 - abs(2 * at / hill_seconds - 1))
        return foot + (top - foot) * height

    return _varying(rng, lengths, max(rate), rate_at)


def bursty(
    rng: random.Random,
    lengths: Lengths = Lengths(),
    *,
    rate: Range = (2.0, 5.0),
    burst_rate: Range = (10.0, 30.0),
    quiet_seconds: float = 60.0,
    burst_seconds: float = 30.0,
) -> Iterator[Arrival]:
    """Yield quiet phases and bursts in turn (Flying Serving, 6.1.3), Poisson within each.

    Args:
        rng: of everything drawn.
        lengths: of the requests.
        rate: bounds of a quiet phase's rate, requests per second.
        burst_rate: bounds of a burst's rate.
        quiet_seconds: how long a quiet phase lasts.
        burst_seconds: how long a burst lasts.
    """
    start = 0.0
    phases = ((Phase.QUIET, quiet_seconds, rate), (Phase.BURST, burst_seconds, burst_rate))
    for phase, seconds, rates in itertools.cycle(phases):
        for at in _poisson(rng, start, start + seconds, rng.uniform(*rates)):
            yield Arrival(at, *lengths.draw(rng), phase=phase)
        start += seconds


def priority(
    rng: random.Random,
    lengths: Lengths = Lengths(),
    *,
    rate: Range = (3.0, 5.0),
    rate_seconds: float = 30.0,
    urgent_share: float = 0.2,
) -> Iterator[Arrival]:
    """Yield urgent requests among others (Flying Serving, 6.3), at a rate that is drawn repeatedly.

    Args:
        rng: of everything drawn.
        lengths: of the requests.
        rate: bounds of the rate, requests per second.
        rate_seconds: how long each rate is kept.
        urgent_share: share of the requests that are urgent.
    """
    for k in itertools.count():
        start = k * rate_seconds
        for at in _poisson(rng, start, start + rate_seconds, rng.uniform(*rate)):
            urgent = rng.random() < urgent_share
            yield Arrival(at, *lengths.draw(rng), priority=URGENT if urgent else 0)


def chats(
    rng: random.Random,
    lengths: Lengths = Lengths((32, 512), (64, 256)),
    *,
    rate: float = 1.0,
    turns: tuple[int, int] = (2, 8),
    think_seconds: float = 5.0,
    shared_tokens: int = 256,
) -> Iterator[Arrival]:
    """Yield a Poisson process of chats of several turns, all of which begin with the same tokens.

    A turn's prompt is the whole chat so far and a new message. The answers in it are made up, not
    the server's own, so a prefix cache finds the prompt of the turn before, but not its answer.

    Args:
        rng: of everything drawn.
        lengths: of a turn's new message, and of its answer.
        rate: chats per second.
        turns: bounds of a chat's turns.
        think_seconds: mean time from an answer to the next message, exponentially distributed.
        shared_tokens: of a system prompt, which all chats have in common.
    """
    system = (Block("system", shared_tokens),) if shared_tokens else ()
    for chat, at in enumerate(_poisson(rng, 0.0, math.inf, rate)):
        said, due, made = system, at, []
        for turn in range(rng.randint(*turns)):
            new, answer = lengths.draw(rng)
            said = (*said, Block(f"chat {chat} turn {turn}", new))
            made.append(Arrival(due, sum(block.tokens for block in said), answer, prefix=said))
            said = (*said, Block(f"chat {chat} answer {turn}", answer))
            due = rng.expovariate(1 / think_seconds)
        yield chat_of(made)


SHAPES: dict[str, Callable[..., Iterator[Arrival]]] = {
    shape.__name__: shape for shape in (poisson, gamma, ramp, hill, bursty, priority, chats)
}
"""The shapes by name. Each takes a source of randomness, lengths, and its own settings."""


def make_up(
    shape: str,
    seed: int,
    *,
    start: float = 0.0,
    requests: int | None = None,
    seconds: float | None = None,
    lengths: Lengths = Lengths(),
    **settings: Any,
) -> Workload:
    """Return a part of a shape, up to the first of the bounds that are given.

    Args:
        shape: a key of ``SHAPES``.
        seed: of everything drawn.
        start: what comes earlier is left out, and all times stay as they are.
        requests: the most requests; ``DEFAULT_REQUESTS`` if neither bound is given.
        seconds: when to end.
        lengths: of the requests.
        settings: of the shape.
    """
    if requests is None and seconds is None:
        requests = DEFAULT_REQUESTS
    end = math.inf if seconds is None else seconds
    endless = SHAPES[shape](random.Random(seed), lengths, **settings)
    later = itertools.dropwhile(lambda arrival: arrival.at < start, endless)
    arrivals = itertools.takewhile(
        lambda arrival: arrival.at < end, itertools.islice(later, requests)
    )
    return Workload(shape, tuple(arrivals))


def _varying(
    rng: random.Random, lengths: Lengths, highest: float, rate_at: Callable[[float], float]
) -> Iterator[Arrival]:
    """Yield a Poisson process without end, whose rate is a function of the time.

    Thinning: arrivals of a process at the highest rate are kept with the current rate's share.
    """
    for at in _poisson(rng, 0.0, math.inf, highest):
        if rng.random() * highest < rate_at(at):
            yield Arrival(at, *lengths.draw(rng))


def _poisson(rng: random.Random, start: float, end: float, rate: float) -> Iterator[float]:
    at = start + rng.expovariate(rate)
    while at < end:
        yield at
        at += rng.expovariate(rate)
