"""Finds the largest rate of requests at which a server keeps its promises, by bisection."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured in one window at one rate."""

    requests: int
    attainment: float
    """Share of the requests that got what they were promised, from 0 to 1."""
    ttft_p90: float | None
    """Seconds, of the requests that finished; None: none did."""
    tpot_p90: float | None
    """Seconds per output token; None: no request had two."""
    problems: tuple[str, ...] = ()
    """Why the window does not count: the load was not what it should have been."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate that was tried."""

    rate: float
    """Requests (or chats) per second."""
    windows: tuple[Window, ...]
    kept: bool
    """Whether the promises were kept in every window."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found. The promises hold at ``kept`` and do not at ``broken``."""

    kept: float | None
    """The largest rate that was kept; None: not even the lowest."""
    broken: float | None
    """The lowest rate that was not kept; None: even the highest was."""
    trials: tuple[Trial, ...]
    """In the order in which they were made."""
    problem: str = ""
    """Why the search ended early; empty: it did not."""


Measure = Callable[[float, int], Awaitable[Window]]
"""Measures one window at a rate; the number tells windows apart, from 0, over the whole search."""


async def find_max_rate(
    measure: Measure,
    bounds: tuple[float, float],
    *,
    windows: int = 3,
    attainment: float = 0.9,
    precision: float = 0.05,
) -> Found:
    """Return the largest rate within the bounds at which promises are kept.

    The lowest rate is tried first, then the highest, and then the geometric mean of the largest
    that was kept and the lowest that was not, until these differ by no more than ``precision``.

    Args:
        measure: measures a window.
        bounds: the lowest and the highest rate, requests per second.
        windows: windows for each rate. A rate is kept if all of its windows are, so the first that
            is not is the last.
        attainment: share of a window's requests that must get what they were promised.
        precision: relative difference of two rates that counts as none.
    """
    trials: list[Trial] = []
    measured = 0

    async def keeps(rate: float) -> bool:
        nonlocal measured
        seen: list[Window] = []
        while len(seen) < windows and all(_kept(window, attainment) for window in seen):
            seen.append(await measure(rate, measured))
            measured += 1
        trials.append(Trial(rate, tuple(seen), all(_kept(window, attainment) for window in seen)))
        return trials[-1].kept

    low, high = bounds
    if not await keeps(low):
        return _found(None, low, trials)
    if low == high or await keeps(high):
        return _found(high, None, trials)
    while not _problem(trials) and high / low > 1 + precision:
        middle = math.sqrt(low * high)
        if await keeps(middle):
            low = middle
        else:
            high = middle
    return _found(low, high, trials)


def _kept(window: Window, attainment: float) -> bool:
    return not window.problems and window.attainment >= attainment


def _problem(trials: Sequence[Trial]) -> str:
    """Return what was wrong with the last window: a load that is not right shows nothing."""
    return "; ".join(trials[-1].windows[-1].problems)


def _found(kept: float | None, broken: float | None, trials: Sequence[Trial]) -> Found:
    problem = _problem(trials)
    if problem:  # the last rate is neither kept nor broken
        before = [trial.rate for trial in trials[:-1] if not trial.kept]
        broken = min(before, default=None)
        kept = max((trial.rate for trial in trials if trial.kept), default=None)
    return Found(kept, broken, tuple(trials), problem)


def table(found: Found) -> str:
    """Return what was tried as a table, and what came of it as the last line."""
    head = f"{'rate/s':>10}{'window':>8}{'requests':>10}{'kept':>8}{'TTFT p90':>11}{'TPOT p90':>11}"
    lines = [f"{head}   times in ms"]
    for trial in found.trials:
        for number, window in enumerate(trial.windows, start=1):
            verdict = "".join(f"   {problem}" for problem in window.problems)
            if number == len(trial.windows) and not verdict:
                verdict = "   keeps the targets" if trial.kept else "   breaks the targets"
            lines.append(
                f"{trial.rate:>10.2f}{number:>8}{window.requests:>10}{window.attainment:>8.1%}"
                f"{_ms(window.ttft_p90):>11}{_ms(window.tpot_p90):>11}{verdict}"
            )
    return "\n".join([*lines, verdict_of(found)])


def verdict_of(found: Found) -> str:
    """Return the result as one line."""
    if found.problem:
        return f"The search ended early: {found.problem}"
    if found.kept is None:
        return f"Not even {found.broken:g} requests per second keep the targets"
    if found.broken is None:
        return f"Even {found.kept:g} requests per second keep the targets: try a higher rate"
    return (
        f"The largest rate that keeps the targets is {found.kept:.2f} requests per second; "
        f"{found.broken:.2f} break them"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
