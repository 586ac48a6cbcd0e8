"""The texts that the corpus is made from, and the little template language they are written in.

``{slot}`` stands for a value, and ``[one|another]`` for either, drawn each time.
"""

import functools
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "texts"

_CHOICE = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])(?!(?:one|uni|use|euro))")


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Return the content of ``texts/<name>.toml``."""
    return tomllib.loads((DIRECTORY / f"{name}.toml").read_text(encoding="utf-8"))


def fill(template: str, draw: random.Random, slots: Mapping[str, str] | None = None) -> str:
    """Return ``template`` with its choices drawn and its slots filled.

    Raises:
        KeyError: a slot has no value.
    """
    chosen = _CHOICE.sub(lambda found: draw.choice(found[1].split("|")), template)
    return chosen if slots is None else chosen.format_map(slots)


def pick(templates: Sequence[str], draw: random.Random, slots: Mapping[str, str]) -> str:
    """Return one of ``templates``, filled, with ``a`` and ``an`` put right."""
    return with_articles(fill(draw.choice(templates), draw, slots))


def with_articles(text: str) -> str:
    """Return ``text`` with ``an`` before a vowel, whatever slot brought it there."""
    return _BEFORE_VOWEL.sub(r"\1n ", text)


def capitalised(text: str) -> str:
    """Return ``text`` with a capital first letter, and the others as they are."""
    return text[:1].upper() + text[1:]


def joined(items: Sequence[str]) -> str:
    """Return the items as a list in a sentence: ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
