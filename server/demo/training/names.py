"""First names: those of the stories, and made-up names that teach the model to copy any name."""

import random

from shoal.server.demo.training.texts import load

_MADE_UP = 0.4


def names(draw: random.Random, count: int) -> list[str]:
    """Return ``count`` different names, some of them made up."""
    known = [name for group in load("stories")["names"].values() for name in group]
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[made_up(draw) if draw.random() < _MADE_UP else draw.choice(known)] = None
    return list(chosen)


def made_up(draw: random.Random) -> str:
    """Return a made-up name of two or three syllables."""
    syllables = (draw.choice("bdfghjklmnprstvz") + draw.choice("aeiou") for _ in range(2))
    return "".join(syllables).capitalize() + draw.choice(["", "n", "l", "ra", "s", "na", "ck"])
