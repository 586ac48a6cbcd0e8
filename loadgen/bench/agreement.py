"""Compares log probabilities of the same prompts, to see whether systems compute the same."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.systems import CHECK, SHOAL, STOCK_DP


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two runs of the same prompts."""

    first: str
    second: str
    largest: float
    """Largest difference of a prompt token's log probability."""
    spread: float
    """Standard deviation of the first run's log probabilities; differences should be far
    smaller."""
    same_best: float
    """Part of the positions with the same likeliest token."""
    same_generated: float
    """Part of the prompts with the same greedy answer."""


def agreements(results: Results) -> Iterator[Agreement]:
    """Yield the pairs that should agree.

    Stock TP is in no pair: it makes up the weights of each member's shard on its own, so its
    weights differ from those of the other systems.
    """
    tp, sp = (f"{mode}{results.settings.engines}" for mode in ("tp", "sp"))
    pairs = (
        ((SHOAL, "dp"), (SHOAL, tp)),
        ((SHOAL, tp), (SHOAL, sp)),
        ((STOCK_DP, "dp"), (SHOAL, "dp")),
        ((CHECK, "dp"), (CHECK, tp)),
        ((CHECK, tp), (CHECK, sp)),
    )
    for first, second in pairs:
        one, other = (_scores(results, *name) for name in (first, second))
        if one is not None and other is not None:
            yield compare(" ".join(first), one, " ".join(second), other)


def compare(first: str, one: dict[str, Any], second: str, other: dict[str, Any]) -> Agreement:
    """Return how far two runs agree (``measures.numerics``)."""
    logprobs = list(zip(_flat(one["logprobs"]), _flat(other["logprobs"]), strict=True))
    best = list(zip(_flat(one["best"]), _flat(other["best"]), strict=True))
    answers = list(zip(one["generated"], other["generated"], strict=True))
    return Agreement(
        first=first,
        second=second,
        largest=max(abs(a - b) for a, b in logprobs),
        spread=statistics.pstdev(a for a, _ in logprobs),
        same_best=sum(a == b for a, b in best) / len(best),
        same_generated=sum(a == b for a, b in answers) / len(answers),
    )


def _scores(results: Results, system: str, layout: str) -> dict[str, Any] | None:
    return results.found(system, "numerics").get(layout)


def _flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for inner in lists for value in inner]
