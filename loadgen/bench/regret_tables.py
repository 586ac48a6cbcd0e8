"""The results of ``shoal bench regret``, and its report."""

import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.loadgen.bench.markdown import rows

CLOSE = 0.02
"""By how much the policy's request times may be longer than in the best fixed layout."""
CLOSE_PART = 0.10
"""The same of the P90 of the first token, and of the time per output token."""
AHEAD = 0.10
"""By how much they should be shorter where the best layout changes with the load."""
POINTS = 0.02
"""By how much the share of kept promises may be smaller."""


class Way(msgspec.Struct):
    """One way to serve a load. Times are in seconds, the mean first and then the P90."""

    e2el: tuple[float, float]
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    kept: float | None = None
    """Share of the requests that got what was promised; None: nothing was."""
    switches: int = 0


class Load(msgspec.Struct):
    """A load, and how it was served."""

    options: list[str]
    """Options of ``shoal simulate``."""
    requests: int = 0
    policy: Way | None = None
    fixed: dict[str, Way] = {}
    """By the layout's name."""
    error: str = ""
    """Why it could not be simulated."""

    @property
    def best(self) -> str:
        """The fixed layout that keeps most promises, or else has the fastest mean request."""
        return min(self.fixed, key=lambda name: self._badness(self.fixed[name]))

    @property
    def is_promised(self) -> bool:
        """Whether targets were given."""
        return self.policy is not None and self.policy.kept is not None

    def excess(self, figure: Callable[[Way], float]) -> float:
        """Return by how much a time of the policy is longer than in the best fixed layout."""
        assert self.policy is not None
        base = figure(self.fixed[self.best])
        return figure(self.policy) / base - 1 if base else 0.0

    @property
    def lost(self) -> float:
        """By how much the policy is behind: of request times, or else of promises in points."""
        assert self.policy is not None
        if self.policy.kept is None:
            return self.excess(mean_time)
        return (self.fixed[self.best].kept or 0.0) - self.policy.kept

    def _badness(self, way: Way) -> tuple[float, float]:
        return (-(way.kept or 0.0), way.e2el[0])


def mean_time(way: Way) -> float:
    """Return the mean time of a request."""
    return way.e2el[0]


_PARTS: Mapping[str, tuple[Callable[[Way], float], float]] = {
    "P90 of the request time": (lambda way: way.e2el[1], CLOSE),
    "P90 of the first token": (lambda way: way.ttft[1], CLOSE_PART),
    "P90 of the time per output token": (lambda way: way.tpot[1], CLOSE_PART),
}
"""Further figures, and how much longer than in the best fixed layout each may be."""


def describe(load: Load) -> str:
    """Return a line on a load that is done."""
    if load.error:
        return f"{shown(load)}: {load.error}"
    return f"{_behind(load)} beside {load.best}: {shown(load)}"


def shown(load: Load) -> str:
    """Return a load's options, with the names of files in place of their paths."""
    return _shown(load.options)


def _shown(words: Sequence[str]) -> str:
    """Return options as they are typed; an option may itself be a list of options."""

    def named(word: str) -> str:
        if word.startswith("-") and " " in word:
            return f"'{_shown(shlex.split(word))}'"
        return Path(word).name if "/" in word else word

    return " ".join(named(word) for word in words)


def markdown(policy: str, loads: Sequence[Load]) -> str:
    """Return the report: what holds in how many loads, and each load, the worst one first."""
    done = [load for load in loads if not load.error]
    timed = [load for load in done if not load.is_promised]
    promised = [load for load in done if load.is_promised]
    lines = [f"# `{policy}` beside the best fixed layout", ""]
    if timed:
        lines += [*rows(["loads without targets", str(len(timed))], _of_times(timed)), ""]
    if promised:
        lines += [*rows(["loads with targets", str(len(promised))], _of_promises(promised)), ""]
    head = ["load", "requests", "best fixed", policy, "P90", "first, output token: P90", "switches"]
    if done:
        worst_first = sorted(done, key=lambda load: load.lost, reverse=True)
        lines += [*rows(head, [_row(load) for load in worst_first]), ""]
    lines += [f"Not simulated: `{shown(load)}`: {load.error}" for load in loads if load.error]
    return "\n".join(lines).rstrip() + "\n"


def _of_times(loads: Sequence[Load]) -> list[list[str]]:
    lost = [load.lost for load in loads]
    return [
        [
            "mean request: mean excess, worst",
            f"{_percent(statistics.fmean(lost))}, {_percent(max(lost))}",
        ],
        [f"mean request at most {100 * CLOSE:g} % longer", _count(each <= CLOSE for each in lost)],
        [
            f"mean request at least {100 * AHEAD:g} % shorter",
            _count(each <= -AHEAD for each in lost),
        ],
        *(
            [
                f"{name} at most {100 * most:g} % longer",
                _count(load.excess(figure) <= most for load in loads),
            ]
            for name, (figure, most) in _PARTS.items()
        ),
        _switches(loads),
    ]


def _of_promises(loads: Sequence[Load]) -> list[list[str]]:
    lost = [load.lost for load in loads]
    return [
        [
            "share of promises kept: mean, worst",
            f"{_points(statistics.fmean(lost))}, {_points(max(lost))}",
        ],
        [f"at most {100 * POINTS:g} points fewer kept", _count(each <= POINTS for each in lost)],
        _switches(loads),
    ]


def _switches(loads: Sequence[Load]) -> list[str]:
    return ["switches", str(sum(load.policy.switches for load in loads if load.policy))]


def _row(load: Load) -> list[str]:
    assert load.policy is not None
    best = load.fixed[load.best]
    kept = "" if best.kept is None else f", {100 * best.kept:.1f} % kept"
    parts = [_percent(load.excess(figure)) for figure, _ in _PARTS.values()]
    return [
        f"`{shown(load)}`",
        str(load.requests),
        f"{1000 * best.e2el[0]:,.0f} ms ({load.best}){kept}",
        _behind(load),
        parts[0],
        ", ".join(parts[1:]),
        str(load.policy.switches),
    ]


def _behind(load: Load) -> str:
    if not load.is_promised:
        return _percent(load.lost)
    return f"{_points(load.lost)} ({_percent(load.excess(mean_time))})"


def _count(which: Iterable[bool]) -> str:
    return str(sum(which))


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %" if abs(value) >= 0.0005 else "0.0 %"


def _points(lost: float) -> str:
    return f"{-100 * lost:+.1f} points" if abs(lost) >= 0.0005 else "0.0 points"
