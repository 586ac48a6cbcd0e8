"""What switches did to running streams, from the times at which the streams' tokens came.

All times are in seconds of one clock, the client's. A token that comes in one chunk with others has
the chunk's time, so an interval lies between two chunks.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.loadgen.bench.measures import spread

Times = Sequence[float]
"""When the tokens of one stream came, in order."""


@dataclass(frozen=True, slots=True)
class CarrySwitch:
    """One switch in which running requests were to go along."""

    begun: float
    """When the client asked for it."""
    ended: float
    """When the client had the answer."""
    duration: float
    """The controller's own duration, seconds."""
    carried: int
    """Requests that went on in the new layout with their KV."""
    recomputed: Mapping[str, int]
    """Requests whose KV was computed again, by the reason."""
    moved: int
    """Requests that were recomputed after they had waited in the task pool."""
    paused: int
    """Requests that were left behind, paused."""
    carried_bytes: int
    """Bytes of KV that were copied."""
    carry_seconds: float
    """How long requests were on their way."""

    @classmethod
    def of(cls, begun: float, ended: float, answer: Mapping[str, Any]) -> "CarrySwitch":
        """Return the switch that an answer of ``POST /admin/layout`` tells of."""
        return cls(
            begun=begun,
            ended=ended,
            duration=answer["duration_seconds"],
            carried=answer["requests"]["carried"],
            recomputed=answer["requests"]["recomputed"],
            moved=answer["requests"]["moved"],
            paused=answer["requests"]["paused"],
            carried_bytes=answer["carried_bytes"],
            carry_seconds=answer["carry_seconds"],
        )


def intervals_during(times: Times, switch: CarrySwitch, following: int = 0) -> list[float]:
    """Return a stream's intervals that overlap a switch, and so many that follow them."""
    first = max(0, bisect_right(times, switch.begun) - 1)
    last = bisect_left(times, switch.ended) + 1
    return [after - before for before, after in pairwise(times[first : last + following])]


def longest_gap_of(streams: Sequence[Times], switch: CarrySwitch) -> float:
    """Return the longest time for which a stream had no token, of all that ran in a switch.

    The answer about a switch may overtake the last tokens before it on their way to the client.
    Then the stream's pause lies between these tokens and the next, after the answer. So the first
    interval that begins after the answer counts too.

    Raises:
        ValueError: no stream ran.
    """
    return max(gap for times in streams for gap in intervals_during(times, switch, following=1))


def _intervals_before(streams: Sequence[Times], switch: CarrySwitch, steps: int) -> Iterator[float]:
    """Yield the last ``steps`` intervals of each stream that a switch found ended."""
    for times in streams:
        end = bisect_right(times, switch.begun)
        for before, after in pairwise(times[max(0, end - steps - 1) : end]):
            yield after - before


def step_before(streams: Sequence[Times], switch: CarrySwitch, steps: int) -> float:
    """Return the median of the ordinary intervals before a switch, ``steps`` of each stream.

    Raises:
        statistics.StatisticsError: no stream had two tokens before the switch.
    """
    return statistics.median(_intervals_before(streams, switch, steps))


def longest_before(streams: Sequence[Times], switch: CarrySwitch, steps: int) -> float:
    """Return the longest of the last half of these: what the longest gap is without a switch.

    The first of them may be the gap of the switch before.

    Raises:
        ValueError: no stream had two tokens before the switch.
    """
    return max(_intervals_before(streams, switch, max(1, steps // 2)))


def of_direction(
    lots: Sequence[tuple[Sequence[CarrySwitch], Sequence[Times]]], steps: int
) -> dict[str, Any]:
    """Return the figures of all binds, or of all releases, in JSON's types and seconds.

    Args:
        lots: switches in order, each lot with the times of every stream that ran in all of them.
        steps: intervals of each stream between two switches, of which an ordinary step's time is
            the median.

    Returns:
        ``gap``: the longest gap of each switch. ``step``: the time of an ordinary step before it,
        the median. ``beyond_step``: by how much each gap is longer than the step before it.
        ``without``: the same of the longest interval of any stream just before each switch. With
        many streams this is not 0, because a client gets the tokens of one step one by one.
        ``duration``: the controller's. ``carried``, ``recomputed``, ``moved`` and ``paused`` are
        sums over the switches; ``recomputed`` is by reason.
    """
    gaps, before, longest = list[float](), list[float](), list[float]()
    for some, streams in lots:
        gaps += [longest_gap_of(streams, switch) for switch in some]
        before += [step_before(streams, switch, steps) for switch in some]
        longest += [longest_before(streams, switch, steps) for switch in some]
    beyond = [gap - step for gap, step in zip(gaps, before, strict=True)]
    switches = [switch for some, _ in lots for switch in some]
    recomputed: Counter[str] = Counter()
    for switch in switches:
        recomputed.update(switch.recomputed)
    return {
        "switches": len(switches),
        "gap": spread(gaps),
        "step": statistics.median(before) if before else None,
        "beyond_step": spread(beyond),
        "beyond_steps": beyond,
        "without": spread([gap - step for gap, step in zip(longest, before, strict=True)]),
        "duration": spread([switch.duration for switch in switches]),
        "carry": spread([switch.carry_seconds for switch in switches]),
        "carried": sum(switch.carried for switch in switches),
        "carried_bytes": sum(switch.carried_bytes for switch in switches),
        "recomputed": dict(recomputed),
        "moved": sum(switch.moved for switch in switches),
        "paused": sum(switch.paused for switch in switches),
    }


def of_bystanders(
    switches: Sequence[CarrySwitch], streams: Sequence[Times], steps: int
) -> dict[str, Any]:
    """Return the time per token of streams that no switch concerned, in seconds.

    Args:
        switches: switches of other engines, in order.
        streams: the times of every stream that ran in all of them.
        steps: see ``of_direction``.

    Returns:
        ``ordinary``: the median before the switches. ``during``: the mean of the intervals that
        overlap a switch, for each switch and stream.
    """
    before = [step_before(streams, switch, steps) for switch in switches]
    during = [
        statistics.fmean(intervals)
        for switch in switches
        for times in streams
        if (intervals := intervals_during(times, switch))
    ]
    return {
        "switches": len(switches),
        "streams": len(streams),
        "ordinary": statistics.median(before) if before else None,
        "during": spread(during),
    }


def count_differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Return how many answers have other tokens in the second run of the same prompts."""
    return sum(list(a) != list(b) for a, b in zip(one, other, strict=True))
