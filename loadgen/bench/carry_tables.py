"""Tables of running requests that switches carry."""

from collections.abc import Iterator
from typing import Any

from shoal.loadgen.bench.carry_measure import BYSTANDERS, PREFIX_HIT, carry_name
from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.markdown import MISSING, ms, number, rows
from shoal.loadgen.bench.systems import SHOAL

TITLE = (
    "Running requests carried (targets: gap less a step 10 ms p50, 15 ms p99; with 16,384 tokens "
    "at most 5 ms more than with 4,096)"
)
_DIRECTIONS = ("bind", "release")
_QUANTILES = ("p50", "p99", "max")
_SHORT, _LONG = carry_name(8, 4096), carry_name(8, 16384)
"""The cases that show what four times the context costs."""


def carry_table(results: Results) -> list[str]:
    """Return the lines of all tables of the measure; none if nothing was measured."""
    tables = (
        _gaps(results),
        _longer_context(results),
        _totals(results),
        _bystanders(results),
        _prefix_hits(results),
    )
    lines = [line for table in tables if table for line in ("", *table)]
    return lines[1:]


def _cases(results: Results) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the title and the figures of every case."""
    for requests, tokens in results.sizes.carry_cases:
        if case := results.found(SHOAL, carry_name(requests, tokens)):
            yield f"{requests} x {number(tokens)}", case


def _gaps(results: Results) -> list[str]:
    """Return a row for every case and direction; times are in milliseconds."""
    body = [
        [
            f"{title}: {direction}",
            *(_quantile(case[direction]["beyond_step"], q) for q in _QUANTILES),
            _quantile(case[direction].get("without"), "p50"),
            _quantile(case[direction]["gap"], "p50"),
            ms(case[direction]["step"]),
            *(_quantile(case[direction]["duration"], q) for q in ("p50", "p99")),
            _quantile(case[direction]["carry"], "p50"),
        ]
        for title, case in _cases(results)
        for direction in _DIRECTIONS
    ]
    head = [
        "requests x prompt tokens",
        *(f"gap less a step, {q} ms" for q in _QUANTILES),
        "the same without a switch, p50 ms",
        "gap, p50 ms",
        "step before, ms",
        *(f"switch, {q} ms" for q in ("p50", "p99")),
        "carry, p50 ms",
    ]
    return rows(head, body) if body else []


def _longer_context(results: Results) -> list[str]:
    short, long = (results.found(SHOAL, name) for name in (_SHORT, _LONG))
    if not (short and long):
        return []
    more = (f"{one} {ms(_median(long, one) - _median(short, one))} ms" for one in _DIRECTIONS)
    return [
        f"The median gap less a step with 16,384 tokens above that with 4,096: {', '.join(more)}."
    ]


def _median(case: dict[str, Any], direction: str) -> float:
    spread = case[direction]["beyond_step"]
    return float("nan") if spread is None else float(spread["p50"])


def _totals(results: Results) -> list[str]:
    """Return what was carried, and what must be nothing."""
    body = []
    for title, case in _cases(results):
        both = [case[direction] for direction in _DIRECTIONS]
        switches, carried, moved, paused, size = (
            sum(one[key] for one in both)
            for key in ("switches", "carried", "moved", "paused", "carried_bytes")
        )
        body.append(
            [
                title,
                *(number(value) for value in (switches, carried)),
                f"{size / switches / 1e9:.2f}" if switches else MISSING,
                _reasons(both),
                *(number(value) for value in (moved, paused)),
                number(case["prefilled_again"]),
                f"{case['differing']} of {case['requests']}",
                f"{case['differing_without_switch']} of {case['requests']}",
                number(case["compared_tokens"]),
                number(case["distinct_tokens"]),
            ]
        )
    head = [
        "requests x prompt tokens",
        *("switches", "carried, sum", "GB per switch", "recomputed, sum", "moved", "paused"),
        "prompt tokens computed again",
        "streams with other tokens than without a switch",
        "prompts with other tokens in TP than in DP, without a switch",
        "tokens compared",
        "distinct tokens of a stream, fewest",
    ]
    return rows(head, body) if body else []


def _reasons(directions: list[dict[str, Any]]) -> str:
    """Return the recomputed requests, with the reasons."""
    found: dict[str, int] = {}
    for one in directions:
        for reason, count in one["recomputed"].items():
            found[reason] = found.get(reason, 0) + count
    return ", ".join(f"{count} {reason}" for reason, count in found.items()) or "0"


def _bystanders(results: Results) -> list[str]:
    found = results.found(SHOAL, BYSTANDERS)
    body = [
        [direction, ms(one["ordinary"]), *(_quantile(one["during"], q) for q in _QUANTILES)]
        for direction, one in found.items()
    ]
    head = ["other engines, time per token", "ordinary, ms", *(f"{q}, ms" for q in _QUANTILES)]
    return rows(head, body) if body else []


def _prefix_hits(results: Results) -> list[str]:
    found = results.found(SHOAL, PREFIX_HIT)
    if not found:
        return []
    names = {
        "carried": "in the cache since a request was carried",
        "repeated": "in the cache since a request before",
        "new": "not in the cache",
    }
    head = [f"TTFT in a group of a prompt of {number(found['prompt_tokens'])} tokens", "ms"]
    return rows(head, [[name, ms(found[key])] for key, name in names.items()])


def _quantile(spread: dict[str, float] | None, q: str) -> str:
    return MISSING if spread is None else ms(spread[q])
