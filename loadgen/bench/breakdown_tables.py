"""Tables of where a prefill's time goes."""

from typing import Any

from shoal.loadgen.bench.breakdown import BREAKDOWN
from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.kernels import Kind
from shoal.loadgen.bench.markdown import ms, rows
from shoal.loadgen.bench.systems import SHOAL


def breakdown_table(results: Results) -> list[str]:
    """Return the lines of all tables, one table for every prompt length."""
    found = results.found(SHOAL, BREAKDOWN)
    if not found:
        return []
    ways: dict[str, dict[str, Any]] = found["ways"]
    prompts = next(iter(ways.values()))
    tables = [_of_prompt(tokens, ways) for tokens in prompts]
    return [line for table in tables for line in [*table, ""]] + [_NOTE]


def _of_prompt(tokens: str, ways: dict[str, dict[str, Any]]) -> list[str]:
    parts = {way: part for way, figures in ways.items() if (part := figures[tokens])}
    body = [
        [kind, *(_share(part["kinds"][kind], part["span"]) for part in parts.values())]
        for kind in Kind
        if any(part["kinds"][kind] for part in parts.values())
    ]
    around = [_share(part["ttft_recorded"] - part["span"], None) for part in parts.values()]
    body.append(["before the runner and after the last kernel", *around])
    body.append(["TTFT, recorded", *(ms(part["ttft_recorded"]) for part in parts.values())])
    body.append(["TTFT, not recorded", *(ms(part["ttft"]) for part in parts.values())])
    body.append(["steps", *(str(part["steps"]) for part in parts.values())])
    return rows([f"{int(tokens):,} tokens, ms (of the runner's time)", *parts], body)


def _share(seconds: float, whole: float | None) -> str:
    return ms(seconds) if not whole else f"{ms(seconds)} ({seconds / whole:.0%})"


_NOTE = (
    "Of the engines of the unit, means. An instant in which several kinds ran counts for the first "
    "of: GEMM, attention, the collectives, other kernels; host is what is left: no kernel ran. A "
    "collective's time is also what its member waits in it for the others. A prompt without a "
    "column for SP is one that runs as TP."
)
