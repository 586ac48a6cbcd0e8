"""Tables of the sweep over arrival rates: one for every figure, with a column for every way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.markdown import MISSING, more, ms, number, rows, slower
from shoal.loadgen.bench.rates import RATES
from shoal.loadgen.bench.systems import COMPARED

Cell = Mapping[str, Any]
_INVALID = " (!)"
"""Marks the figures of a cell that is not valid."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """One table."""

    title: str
    path: Sequence[str]
    """Keys of the figure within a cell."""
    show: Callable[[float | None], str]
    best: Callable[..., Any] = min

    def of(self, cell: Cell | None) -> float | None:
        found: Any = cell
        for key in self.path:
            found = (found or {}).get(key)
        return None if found is None else float(found)


_FIGURES = (
    _Figure("completion time, mean, ms", ("e2el", "mean"), ms),
    _Figure("completion time, p50, ms", ("e2el", "p50"), ms),
    _Figure("completion time, p90, ms", ("e2el", "p90"), ms),
    _Figure("TTFT, mean, ms", ("ttft", "mean"), ms),
    _Figure("TTFT, p90, ms", ("ttft", "p90"), ms),
    _Figure("TPOT, mean, ms", ("tpot", "mean"), ms),
    _Figure("peak output tokens/s", ("peak_throughput",), number, max),
    _Figure("seconds to the last answer", ("seconds",), number),
)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The measured cells."""

    rates: Mapping[str, Mapping[str, Cell]]
    """Cells of every rate, the lowest rate first, by column, such as ``shoal tp2``."""
    fixed: Sequence[str]
    """Columns of the fixed ways."""
    policies: Sequence[str]

    @property
    def columns(self) -> list[str]:
        return [*self.fixed, *self.policies]

    def cells(self) -> Iterator[tuple[str, str, Cell]]:
        """Yield rate, column, and cell."""
        for rate, by_column in self.rates.items():
            for column in self.columns:
                if column in by_column:
                    yield rate, column, by_column[column]


def rates_table(results: Results) -> list[str]:
    """Return the lines of all tables and of their notes."""
    sweep = _sweep(results)
    if not sweep.columns:
        return []
    tables = [_of_figure(figure, sweep) for figure in _FIGURES]
    switches = _switches(sweep)
    parts = [
        _made_with(results),
        [_NOTE],
        *tables,
        switches,
        _steps_in_sp(sweep),
        _not_valid(sweep),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part).split("\n")


def _sweep(results: Results) -> _Sweep:
    names = _names(results)
    rates: dict[str, dict[str, Cell]] = {name.removeprefix(f"{RATES} "): {} for name in names}
    fixed: dict[str, None] = {}
    policies: dict[str, None] = {}
    for system in COMPARED:
        kept = results.systems.get(system)
        for name in names:
            for measure, cell in (kept.measures if kept else {}).items():
                if not measure.startswith(f"{name} "):
                    continue
                column = f"{system} {measure.removeprefix(f'{name} ')}"
                rates[name.removeprefix(f"{RATES} ")][column] = cell
                (fixed if cell["policy"] is None else policies)[column] = None
    return _Sweep({rate: found for rate, found in rates.items() if found}, [*fixed], [*policies])


def _names(results: Results) -> list[str]:
    """Return the names of the rates, the lowest first."""
    rates = {n: a["rate"] for n, a in results.workloads.items() if n.startswith(f"{RATES} ")}
    return sorted(rates, key=lambda name: rates[name])


def _of_figure(figure: _Figure, sweep: _Sweep) -> list[str]:
    head = [f"{figure.title}, by requests/s", *sweep.columns]
    head += [f"{policy} beside the best" for policy in sweep.policies]
    body = []
    for rate, cells in sweep.rates.items():
        values = {column: figure.of(cells.get(column)) for column in sweep.columns}
        known = [value for column in sweep.fixed if (value := values[column]) is not None]
        best = figure.best(known) if known else None
        shown = [
            _shown(figure.show(value), cells.get(column), column in sweep.fixed and value == best)
            for column, value in values.items()
        ]
        compare = slower if figure.best is min else more
        body.append([rate, *shown, *(compare(values[policy], best) for policy in sweep.policies)])
    return rows(head, body)


def _shown(text: str, cell: Cell | None, is_best: bool) -> str:
    if cell is None:
        return MISSING
    marked = f"**{text}**" if is_best and text != MISSING else text
    return marked + (_INVALID if cell["problems"] else "")


def _switches(sweep: _Sweep) -> list[str]:
    body = [
        [rate, *(_switching(cells.get(policy)) for policy in sweep.policies)]
        for rate, cells in sweep.rates.items()
    ]
    head = [
        "switches (ms each; requests paused, moved), requests by layout, by requests/s",
        *sweep.policies,
    ]
    return rows(head, body) if sweep.policies else []


def _switching(cell: Cell | None) -> str:
    found = cell["switching"] if cell is not None else None
    if not cell or not found:
        return MISSING
    switches = str(found["switches"])
    if found["switches"]:
        each = ms(found["seconds"] / found["switches"])
        switches += f" ({each}; {found['paused']}, {found['moved']})"
    layouts = ", ".join(f"{layout} {n}" for layout, n in sorted(cell["layouts"].items()))
    return f"{switches}, {layouts}"


def _made_with(results: Results) -> list[str]:
    """Return a line for every kind of request, with the rates at which it came."""
    kinds: dict[str, list[str]] = {}
    for name in _names(results):
        about = results.workloads[name]
        prompt, output = map(_tokens, about["request"])
        kind = (
            f"{prompt} tokens in and {output} out, {about['seconds']:g} s of Poisson arrivals, "
            f"seed {about['seed']}"
        )
        kinds.setdefault(kind, []).append(f"{about['requests']} at {about['rate']:g}/s")
    return [f"{kind}; requests: {', '.join(counts)}." for kind, counts in kinds.items()]


def _tokens(told: int | Sequence[int]) -> str:
    """Return lengths for people: equal ones are one number, others lie between two."""
    return str(told) if isinstance(told, int) else " to ".join(map(str, told))


def _steps_in_sp(sweep: _Sweep) -> list[str]:
    """Return a line with the thresholds of SP: ways with the same thresholds run the same steps."""
    above: dict[str, None] = {}
    for _, column, cell in sweep.cells():
        if cell["sp_above"]:
            told = ", ".join(f"{n} tokens in {layout}" for layout, n in cell["sp_above"].items())
            above[f"{column} above {told}"] = None
    if not above:
        return []
    same = "Ways of one layout that share them run the same steps."
    return [f"Steps that are SP: {'; '.join(above)}. {same}"]


def _not_valid(sweep: _Sweep) -> list[str]:
    return [
        f"- Not valid, {rate} requests/s, {column}: {problem}."
        for rate, column, cell in sweep.cells()
        for problem in cell["problems"]
    ]


_NOTE = (
    "Completion time is from sending a request to its last token. **Bold** is the best of the "
    "fixed ways of all systems, and policies stand beside it. "
    f"{_INVALID.strip()}: the client lagged, see below the tables."
)
