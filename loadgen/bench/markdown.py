"""Cells and rows of Markdown tables."""

from collections.abc import Sequence

MISSING = "-"
"""What is printed where nothing was measured."""


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines."""
    lines = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(line)} |" for line in lines]


def ms(seconds: float | None) -> str:
    """Return seconds as milliseconds."""
    return MISSING if seconds is None else f"{seconds * 1000:.2f}"


def number(value: float | None) -> str:
    """Return a number: whole if it is large."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.2f}"


def ratio(value: float | None, base: float | None) -> str:
    """Return how many times as large as ``base`` the value is."""
    return MISSING if value is None or not base else f"{value / base:.3f}"
