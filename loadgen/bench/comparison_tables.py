"""The Markdown report of a comparison: first all beside stock vLLM, then the single figures."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.loadgen.bench.agreement import agreements
from shoal.loadgen.bench.breakdown_tables import breakdown_table
from shoal.loadgen.bench.carry_tables import TITLE, carry_table
from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.markdown import MISSING, more, ms, number, rows, slower
from shoal.loadgen.bench.measures import FIRST_ROUNDS
from shoal.loadgen.bench.memory import kv_tokens
from shoal.loadgen.bench.memory_tables import memory_tables
from shoal.loadgen.bench.modes import MODES
from shoal.loadgen.bench.rates_tables import rates_table
from shoal.loadgen.bench.serving_tables import serving_sections
from shoal.loadgen.bench.switch_tables import switch_table
from shoal.loadgen.bench.systems import (
    COMPARED,
    SHOAL,
    STOCK_BETWEEN,
    STOCK_DP,
    STOCK_EP,
    STOCK_TP,
)

Figure = float | None
Show = Callable[[Figure], str]
Compare = Callable[[Figure, Figure], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in the four columns, with its name and the functions that print and compare it."""

    name: str
    stock_dp: Figure
    stock_tp: Figure
    shoal_dp: Figure
    shoal_tp: Figure
    show: Show
    compare: Compare

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        figures = (self.stock_dp, self.stock_tp, self.shoal_dp, self.shoal_tp)
        pairs = ((self.shoal_dp, self.stock_dp), (self.shoal_tp, self.stock_tp))
        compared = (self.compare(*pair) for pair in pairs)
        return [self.name, *(self.show(figure) for figure in figures), *compared]


def markdown(results: Results) -> str:
    """Return the report of whatever has been measured."""
    sections = [
        _head(results),
        _section("Beside stock vLLM", _stock_table(results)),
        _section("Beside stock vLLM, by degree of TP", _degree_table(results)),
        _section("Beside stock vLLM with whole experts on each GPU", _experts_table(results)),
        _section("Memory per GPU, GiB", memory_tables(results)),
        _section("Start-up", _startup_table(results)),
        _section("What vLLM chose", _choices_table(results)),
        _section("Switches", switch_table(results)),
        _section(TITLE, carry_table(results)),
        _section("Numerics", _numerics_table(results)),
        _section("Ways of working", _modes_table(results)),
        _section("Arrival rates", rates_table(results)),
        _section("Where the time of a prefill goes", breakdown_table(results)),
        *serving_sections(results),
        _section("Failures", _failures(results)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(results: Results) -> str:
    settings, about = results.settings, results.environment
    gpus = about.get("gpus") or []
    machine = f"{len(gpus)} x {gpus[0]}, driver {about.get('driver')}" if gpus else "no GPU"
    packages = ", ".join(f"{k} {v}" for k, v in about.get("packages", {}).items())
    facts = (
        f"{machine}; Python {about.get('python')}, {packages}. {settings.dtype}, quantisation "
        f"{settings.quantization or 'none'}, random weights; max_model_len "
        f"{settings.max_model_len}, max_num_seqs {settings.max_num_seqs}, max_num_batched_tokens "
        f"{settings.max_num_batched_tokens}, gpu_memory_utilization "
        f"{settings.gpu_memory_utilization:g}, prefix caching "
        f"{'on' if settings.prefix_caching else 'off'}, {settings.api_servers} front ends"
        f"{''.join(f', {option}' for option in settings.options)}. The same for every system."
    )
    variables = ", ".join(f"`{k}={v}`" for k, v in about.get("variables", {}).items())
    title = f"# {settings.shape} on {settings.engines} GPUs: stock vLLM and Shoal"
    return f"{title}\n\n{facts}\n\nEnvironment: {variables or 'nothing set'}."


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *lines]) if lines else ""


# --- beside stock vLLM ----------------------------------------------------------------------------


def _stock_table(results: Results) -> list[str]:
    if not results.systems:
        return []
    tp = f"TP{results.settings.engines}"
    head = ["", "stock DP", f"stock {tp}", "Shoal DP", f"Shoal {tp}", "Shoal's DP", f"its {tp}"]
    return rows(head, [row.cells for row in stock_rows(results)])


def _degree_table(results: Results) -> list[str]:
    """Return the figures of the degrees of TP between one GPU and all GPUs."""
    body = []
    for degree in results.settings.degrees:
        stock, layout = STOCK_BETWEEN[degree], f"tp{degree}"
        for name, path, show, compare in _measured(results):
            figures = [_figure(results, system, layout, path) for system in (stock, SHOAL)]
            if any(figure is not None for figure in figures):
                line = (show(figure) for figure in figures)
                body.append([f"TP{degree}: {name}", *line, compare(figures[1], figures[0])])
    return rows(["", "stock", "Shoal", "Shoal beside stock"], body) if body else []


def _experts_table(results: Results) -> list[str]:
    """Return Shoal's widest layout beside stock TP and stock EP, and beside the better of them."""
    if STOCK_EP not in results.systems:
        return []
    engines = results.settings.engines
    body = []
    for name, path, show, compare in _measured(results):
        tp, ep, shoal = (
            _figure(results, system, f"tp{engines}", path) for system in (STOCK_TP, STOCK_EP, SHOAL)
        )
        if any(figure is not None for figure in (tp, ep, shoal)):
            known = [figure for figure in (tp, ep) if figure is not None]
            best = (max if compare is more else min)(known) if known else None
            body.append([name, *map(show, (tp, ep, shoal)), compare(shoal, best)])
    head = ["", f"stock TP{engines}", f"stock EP{engines}", f"Shoal TP{engines}"]
    return rows([*head, "Shoal beside the better"], body) if body else []


def stock_rows(results: Results) -> Iterator[Row]:
    """Yield the rows of the first table."""
    for name, path, show, compare in _measured(results):
        yield _row(results, name, path, show, compare)
    engines = results.settings.engines
    dp, shoal_dp = (_kv(results, name, 1) for name in (STOCK_DP, SHOAL))
    tp, shoal_tp = (_kv(results, name, engines) for name in (STOCK_TP, SHOAL))
    node, shoal_node = (None if one is None else one * engines for one in (dp, shoal_dp))
    yield Row("KV cache of the node, tokens", node, tp, shoal_node, shoal_tp, number, more)
    yield Row("longest context of a unit, tokens", dp, tp, shoal_dp, shoal_tp, number, more)
    for title, again in (("start-up", False), ("start-up again", True)):
        dp, tp, shoal = (_start(results, name, again) for name in (STOCK_DP, STOCK_TP, SHOAL))
        yield Row(f"{title}, s (Shoal: of all layouts)", dp, tp, shoal, shoal, number, slower)


def _measured(results: Results) -> Iterator[tuple[str, Sequence[str], Show, Compare]]:
    """Yield what is measured in every layout: title, path, and how to print and to compare it.

    A path is the measure's name, followed by keys within its figures.
    """
    for batch in results.sizes.batches:
        yield f"TPOT, {batch} per unit, ms", ("decode", str(batch), "tpot"), ms, slower
    for tokens in results.sizes.prompts:
        yield f"TTFT, {tokens} tokens, ms", ("prefill", str(tokens), "ttft"), ms, slower
    for name in ("first", "last"):
        title = f"TTFT, 16 tokens, {name} of {FIRST_ROUNDS} after the start, ms"
        yield title, ("first", name), ms, slower
    rate = ("saturation", "output_tokens_per_second")
    yield "output tokens/s, all batches full", rate, number, more


def _figure(results: Results, system: str, layout: str, path: Sequence[str]) -> Figure:
    found: Any = results.found(system, path[0]).get(layout, {})
    for key in path[1:]:
        found = found.get(key, {})
    return float(found) if isinstance(found, int | float) else None


def _row(results: Results, name: str, path: Sequence[str], show: Show, compare: Compare) -> Row:
    tp = f"tp{results.settings.engines}"
    columns = ((STOCK_DP, "dp"), (STOCK_TP, tp), (SHOAL, "dp"), (SHOAL, tp))
    dp, tp_stock, shoal_dp, shoal_tp = (
        _figure(results, system, layout, path) for system, layout in columns
    )
    return Row(name, dp, tp_stock, shoal_dp, shoal_tp, show, compare)


def _kv(results: Results, system: str, degree: int) -> Figure:
    kept = results.systems.get(system)
    return None if kept is None else kv_tokens(kept, degree)


def _start(results: Results, system: str, again: bool) -> Figure:
    """Return the seconds of a system's first start, or of its last start after the first."""
    kept = results.systems.get(system)
    starts = kept.starts if kept is not None else []
    found = starts[1:] if again else starts[:1]
    return found[-1]["seconds"] if found else None


# --- start-up -------------------------------------------------------------------------------------


def _startup_table(results: Results) -> list[str]:
    found = [
        [name, f"{number(position)}", number(start["seconds"]), _phases(start)]
        for name, kept in results.systems.items()
        for position, start in enumerate(kept.starts, 1)
    ]
    return rows(["", "start", "ready after s", "phases, s"], found) if found else []


def _choices_table(results: Results) -> list[str]:
    """Return the backends of every system, from its last start's log; old logs have none."""
    chosen = {
        name: kept.starts[-1]["choices"]
        for name, kept in results.systems.items()
        if kept.starts and "choices" in kept.starts[-1]
    }
    uses = list(dict.fromkeys(use for choices in chosen.values() for use in choices))
    body = [
        [name, *("; ".join(choices.get(use, [])) or "-" for use in uses)]
        for name, choices in chosen.items()
    ]
    return rows(["", *uses], body) if body else []


def _phases(start: dict[str, Any]) -> str:
    """Return the phases of the slowest engine that reports them, or those in vLLM's log."""
    if start.get("phases"):
        slowest = max(start["phases"].values(), key=lambda phases: phases.get("up", 0.0))
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in slowest.items())
    names = (
        ("load", "model_seconds"),
        ("compile", "compile_seconds"),
        ("graphs", "graph_seconds"),
        ("init engine", "init_seconds"),
    )
    found = [(name, max(start[key])) for name, key in names if start.get(key)]
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in found) or MISSING


# --- ways of working, numerics, failures ----------------------------------------------------------


def _modes_table(results: Results) -> list[str]:
    found = {
        f"{system} {way}": figures
        for system in COMPARED
        for way, figures in results.found(system, MODES).items()
    }
    if not found:
        return []
    prompts = next(iter(found.values()))["ttft"]
    body = [
        [f"TTFT, {tokens} tokens, ms", *(ms(f["ttft"].get(tokens)) for f in found.values())]
        for tokens in prompts
    ]
    body.append(["TPOT, 1 request, ms", *(ms(f["tpot"]) for f in found.values())])
    for name, key in (("prompt tokens/s", "prompt"), ("prompt and output tokens/s", "combined")):
        body.append([name, *(number(f[f"{key}_tokens_per_second"]) for f in found.values())])
    return rows(["", *found], body)


def _numerics_table(results: Results) -> list[str]:
    found = [
        [
            f"{one.first} and {one.second}",
            f"{one.largest:.2e}",
            f"{one.spread:.2e}",
            f"{one.same_best:.2%}",
            f"{one.same_generated:.0%}",
        ]
        for one in agreements(results)
    ]
    head = [
        "",
        "largest difference of a log probability",
        "standard deviation of these",
        "same likeliest token",
        "same greedy answers",
    ]
    note = (
        "Random weights are so small that a layer adds next to nothing to its input: agreement on "
        "them says little of attention and MLPs. The rows of shoal-check are of real weights."
    )
    return [*rows(head, found), "", note] if found else []


def _failures(results: Results) -> list[str]:
    return list(_failure_lines(results.systems.items()))


def _failure_lines(systems: Iterable[tuple[str, SystemResults]]) -> Iterator[str]:
    for system, kept in systems:
        for measure, reason in kept.failures.items():
            yield f"- {system}, {measure}: {reason}"
