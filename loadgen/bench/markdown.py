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


def slower(value: float | None, base: float | None) -> str:
    """Return by how much a time is longer or shorter than ``base``: ``5.4 % faster``."""
    return _beside(value, base, "slower", "faster")


def more(value: float | None, base: float | None) -> str:
    """Return by how much an amount is larger or smaller than ``base``: ``5.4 % less``."""
    return _beside(value, base, "more", "less")


def _beside(value: float | None, base: float | None, above: str, below: str) -> str:
    if value is None or not base:
        return MISSING
    percent = round(100 * (value / base - 1), 1)
    return f"{abs(percent):.1f} % {above if percent > 0 else below}" if percent else "equal"
