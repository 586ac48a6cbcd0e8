"""The figures of ``shoal bench traffic``, and their report: a table for each load."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.loadgen.bench.markdown import MISSING, more, number, rows, slower
from shoal.loadgen.bench.prompt_gaps import prompt_gaps
from shoal.loadgen.bench.systems import SHOAL
from shoal.loadgen.bench.traffic_pictures import Requests
from shoal.loadgen.bench.traffic_simulated import COMPARED, errors

KEPT = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "output_throughput",
    "request_throughput",
)
STATISTICS = ("ttft", "tpot", "itl", "e2el")
LOWER_IS_BETTER: Mapping[str, str] = {
    "mean_ttft_ms": "TTFT mean, ms",
    "p90_ttft_ms": "TTFT P90, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "p90_itl_ms": "between tokens P90, ms",
    "mean_e2el_ms": "request mean, ms",
    "p90_e2el_ms": "request P90, ms",
}
HIGHER_IS_BETTER: Mapping[str, str] = {"output_throughput": "output tokens/s"}


class SystemFigures(msgspec.Struct):
    """The figures of one system."""

    command: list[str]
    start_seconds: float | None = None
    ways: dict[str, dict[str, dict[str, Any]]] = {}
    """By way and load: ``KEPT``, and ``STATISTICS`` in milliseconds as vLLM's client has them."""
    failure: str | None = None
    simulated: dict[str, dict[str, dict[str, float]]] = {}
    """What the simulator says, by way and workload, under the same names."""


class Figures(msgspec.Struct):
    """One comparison, which the next run into the same directory continues."""

    shape: str
    engines: int
    environment: dict[str, Any]
    systems: dict[str, SystemFigures] = {}


Columns = dict[str, dict[str, dict[str, Any]]]
"""Figures by column and load."""


def markdown(figures: Figures, kept: Sequence[Requests] = ()) -> str:
    """Return the report: every load's figures, and Shoal's beside the best of stock vLLM.

    Args:
        figures: the comparison.
        kept: the requests of its loads.
    """
    environment = figures.environment
    machine = ", ".join(environment.get("gpus") or ["no GPU"])
    packages = ", ".join(f"{name} {v}" for name, v in environment.get("packages", {}).items())
    variables = ", ".join(f"`{k}={v}`" for k, v in environment.get("variables", {}).items())
    title = f"# {figures.shape} on {figures.engines} GPUs, all servers with their own defaults"
    about = (
        f"{machine}; driver {environment.get('driver')}; Python {environment.get('python')}; "
        f"{packages}. Random weights. Environment: {variables or 'nothing that counts'}."
    )
    lines = [title, "", about, ""]
    columns = _columns(figures)
    for load in _loads(columns):
        lines += [f"## {load}", "", *_table(columns, load), ""]
    starts = [[n, number(s.start_seconds), s.failure or ""] for n, s in figures.systems.items()]
    lines += rows(["system", "ready after, s", "failed"], starts)
    return "\n".join([*lines, *_prompts(kept), *_simulator(figures)]) + "\n"


def column_of(system: str, way: str) -> str:
    """Return the name of a column: stock vLLM's systems have only one way."""
    return f"Shoal {way}" if system == SHOAL else system


def _columns(figures: Figures) -> Columns:
    return {
        column_of(name, way): loads
        for name, system in figures.systems.items()
        for way, loads in system.ways.items()
    }


def _loads(columns: Columns) -> list[str]:
    return list(dict.fromkeys(load for loads in columns.values() for load in loads))


def _table(columns: Columns, load: str) -> list[str]:
    ours = [name for name in columns if name.startswith("Shoal")]
    head = [f"of {load}", *columns, *(f"{name} beside stock's best" for name in ours)]
    body = []
    for names, best, compare in ((LOWER_IS_BETTER, min, slower), (HIGHER_IS_BETTER, max, more)):
        for key, label in names.items():
            found = {name: loads.get(load, {}).get(key) for name, loads in columns.items()}
            stock = [v for name, v in found.items() if name not in ours and v is not None]
            base = best(stock) if stock else None
            cells = [number(value) for value in found.values()]
            body.append([label, *cells, *(compare(found[name], base) for name in ours)])
    return rows(head, body) if columns else [MISSING]


def _prompts(kept: Sequence[Requests]) -> list[str]:
    """Return the table of what prompts cost others; nothing if no load's requests were kept."""
    body = []
    for run in kept:
        found = prompt_gaps(run)
        gaps = [number(1e3 * seconds) for seconds in found[1:]] if found else [MISSING] * 3
        body.append([run.traffic, run.column, str(found.prompts if found else 0), *gaps])
    title = "## What a prompt costs the requests beside it: medians of steps, ms"
    head = ["workload", "", "prompts", "usual step", "step with the prompt", "step after it"]
    return ["", title, "", *rows(head, body)] if body else []


# --- the simulator --------------------------------------------------------------------------------


def _simulator(figures: Figures) -> list[str]:
    """Return the table of the simulator's errors; nothing if nothing was simulated."""
    body = [
        [load, column_of(name, way), *_cells(system.ways[way][load], simulated)]
        for name, system in figures.systems.items()
        for way, loads in system.simulated.items()
        for load, simulated in loads.items()
    ]
    head = ["workload", "", *(LOWER_IS_BETTER[name].removesuffix(", ms") for name in COMPARED)]
    return ["", "## The simulator beside these runs", "", *rows(head, body)] if body else []


def _cells(measured: dict[str, Any], simulated: dict[str, float]) -> list[str]:
    off = errors(measured, simulated)
    return [
        f"{number(simulated[name])} ms ({off[name]:+.1%})" if name in off else MISSING
        for name in COMPARED
    ]
