"""Short and long stories: a hero, a friend and a plot, drawn anew for each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.server.demo.training.chat import Message, exchange
from shoal.server.demo.training.names import made_up
from shoal.server.demo.training.texts import capitalised, fill, load, pick, with_articles

_PRONOUNS = {"she": ("she", "her", "her", "herself"), "he": ("he", "his", "him", "himself")}
_UNUSUAL_HERO = 0.12
_UNUSUAL_NAME = 0.2
_MAX_CHAPTERS = 4


@dataclass(frozen=True)
class _Character:
    """Somebody in a story: ``kind`` is what they are, ``pronoun`` ``he`` or ``she``."""

    kind: str
    name: str
    pronoun: str


def request_and_story(draw: random.Random) -> tuple[Message, ...]:
    """Return a request for a story, and the story; sometimes also for a second story."""
    messages = _one_exchange(draw)
    if draw.random() < 0.12:
        again = draw.choice(["Another one!", "Tell me another story.", "One more please", "Again!"])
        messages += exchange(again, story(draw, *_cast(draw)))
    return messages


def plain_story(draw: random.Random) -> str:
    """Return a story without a request, as a plain text."""
    return story(draw, *_cast(draw), chapters=draw.choice([1, 1, 1, 2, 3]))


def story(
    draw: random.Random,
    hero: _Character,
    friend: _Character,
    *,
    chapters: int = 1,
    thing: str | None = None,
) -> str:
    """Return a story of one plot per chapter."""
    texts = load("stories")
    slots = _slots(draw, hero, friend)
    plots = draw.sample(texts["plot"], chapters)
    if thing is not None:
        slots["thing"] = thing
        plots = [plot for plot in texts["plot"] if plot["about"] == "lost"]
    paragraphs = [_opening(draw, slots)]
    for number, plot in enumerate(plots):
        if number:
            slots |= _slots(draw, hero, _character(draw, but=hero))
            paragraphs.append(pick(texts["chapters"]["texts"], draw, slots))
        paragraphs += _told(draw, plot["beats"], slots)
    ending = draw.choice(texts["ending"]["texts"])
    return "\n\n".join([*paragraphs, ending] if ending else paragraphs)


def _one_exchange(draw: random.Random) -> tuple[Message, ...]:
    requests = load("stories")["requests"]
    hero, friend = _cast(draw)
    form = draw.choices(["any", "kind", "name", "pair", "thing", "long"], [3, 5, 3, 2, 1, 3])[0]
    slots = _slots(draw, hero, friend)
    asked = pick(requests[form], draw, slots)
    told = story(
        draw,
        hero,
        friend,
        chapters=draw.randint(2, _MAX_CHAPTERS) if form == "long" else 1,
        thing=slots["thing"] if form == "thing" else None,
    )
    reply = draw.choice(load("stories")["replies"]["texts"])
    return exchange(asked, f"{reply}\n\n{told}" if reply else told)


def _told(draw: random.Random, beats: Sequence[Sequence[str]], slots: dict[str, str]) -> list[str]:
    """Tell each beat of a plot in one of its ways, in paragraphs of two or three beats."""
    sentences = [_sentence(draw, draw.choice(beat), slots) for beat in beats]
    paragraphs = []
    while sentences:
        size = draw.choice([2, 2, 3])
        paragraphs.append(" ".join(sentences[:size]))
        sentences = sentences[size:]
    return paragraphs


def _opening(draw: random.Random, slots: dict[str, str]) -> str:
    texts = load("stories")
    life = draw.sample(texts["life"]["texts"], draw.choice([0, 0, 1, 2]))
    first = draw.choice(texts["opening"]["texts"])
    return " ".join(_sentence(draw, text, slots) for text in [first, *life])


def _sentence(draw: random.Random, template: str, slots: dict[str, str]) -> str:
    text = with_articles(fill(template, draw, slots))
    return text.replace("old old", "old").replace("little little", "little")


def _cast(draw: random.Random) -> tuple[_Character, _Character]:
    hero = _character(draw)
    return hero, _character(draw, but=hero)


def _character(draw: random.Random, but: _Character | None = None) -> _Character:
    texts = load("stories")
    kind, gender = draw.choice(list(texts["heroes"].items()))
    if draw.random() < _UNUSUAL_HERO:
        kind, gender = draw.choice(_other_kinds()), "it"
    unusual = draw.random() < _UNUSUAL_NAME
    name = made_up(draw) if unusual else draw.choice(texts["names"][gender])
    if but is not None and (kind == but.kind or name == but.name):
        return _character(draw, but)
    return _Character(kind, name, draw.choice(["he", "she"]) if gender == "it" else gender)


def _other_kinds() -> list[str]:
    """Return the topics whose names have an article: a story may be about a cloud."""
    names = [topic["one"] for topic in load("topics")["topic"]]
    return [name.partition(" ")[2] for name in names if name.startswith(("a ", "an "))]


def _slots(draw: random.Random, hero: _Character, friend: _Character) -> dict[str, Any]:
    slots = {name: draw.choice(values) for name, values in load("stories")["slots"].items()}
    slots = {name: fill(value, draw) for name, value in slots.items()}
    for prefix, who in (("", hero), ("f", friend)):
        forms = dict(zip(("he", "his", "him", "himself"), _PRONOUNS[who.pronoun], strict=True))
        slots |= {f"{prefix}{role}": form for role, form in forms.items()}
        slots |= {f"{prefix}{role}".capitalize(): capitalised(f) for role, f in forms.items()}
        slots[f"{prefix}kind"] = who.kind
    slots |= {"name": hero.name, "friend": friend.name, "place_up": capitalised(slots["place"])}
    return slots
