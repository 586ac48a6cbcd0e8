"""What a prompt costs the requests beside it, from when a client got each token.

Requests of one unit get their tokens together, once in each step. So requests whose tokens come at
the same moments several times in a row are in one unit, and the time between two such moments is
that of a step. The step that computes a prompt ends when the new request gets its first token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from shoal.loadgen.bench.traffic_pictures import Requests

TOGETHER_SECONDS = 0.0015
"""Tokens of one step come within so many seconds."""
IN_A_ROW = 5
"""So many tokens of two requests must come together."""
BESIDE = 2
"""At least so many requests must run beside a new one, because one alone may be late by chance."""
MOST_PROMPTS = 500
"""Of more new requests some are looked at, evenly spread."""

Times = Sequence[float]
"""When each token of a request came, in seconds."""


class PromptGaps(NamedTuple):
    """Seconds between two tokens of requests that run, each a median over new requests."""

    prompts: int
    """New requests that were looked at."""
    usual: float
    """Steps shortly before and after."""
    prompt: float
    """The step that computes the end of the new request's prompt."""
    after: float
    """The step after that."""


def prompt_gaps(run: Requests) -> PromptGaps | None:
    """Return what prompts cost the requests beside them; None: no request came beside others."""
    began = zip(run.start_times, run.ttfts, run.itls, strict=True)
    every = [list(accumulate(itls, initial=at + ttft)) for at, ttft, itls in began]
    every.sort(key=lambda times: times[0])
    long = [nth for nth, times in enumerate(every) if len(times) > IN_A_ROW]
    looked_at = long[:: -(-len(long) // MOST_PROMPTS) or 1]
    found = [gaps for nth in looked_at if (gaps := _beside(every[nth], every[:nth])) is not None]
    if not found:
        return None
    return PromptGaps(len(found), *(median(each) for each in zip(*found, strict=True)))


def _beside(new: Times, others: Sequence[Times]) -> tuple[float, float, float] | None:
    """Return the usual step, that with a prompt and the next one, of requests beside a new one."""
    marks = new[1 : 1 + IN_A_ROW]
    running = (times for times in others if times[-1] >= marks[-1] - TOGETHER_SECONDS)
    steps = [gaps for times in running if (gaps := _steps(times, marks)) is not None]
    if len(steps) < BESIDE:
        return None
    usual, prompt, after = (median(each) for each in zip(*steps, strict=True))
    return usual, prompt, after


def _steps(times: Times, marks: Times) -> tuple[float, float, float] | None:
    """Return the usual step, that with the prompt and the next one, as one request has seen them.

    None: its tokens do not come at the same moments as those of the new request.

    Args:
        times: its tokens.
        marks: when the new request got tokens, the second one first.
    """
    at = bisect_left(times, marks[0] - TOGETHER_SECONDS)
    if at < 4 or at + len(marks) > len(times):
        return None  # two steps before that with the prompt are looked at
    together = zip(times[at:], marks, strict=False)
    if any(abs(time - mark) > TOGETHER_SECONDS for time, mark in together):
        return None
    gaps = [times[nth] - times[nth - 1] for nth in range(at - 3, at + len(marks))]
    return median(gaps[:2] + gaps[4:]), gaps[2], gaps[3]
