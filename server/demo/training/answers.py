"""Questions and answers: small talk, topics, tables, and questions that the model cannot answer."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from shoal.server.demo.training.chat import Message, exchange
from shoal.server.demo.training.texts import capitalised, fill, joined, load, pick

_ABOUT_ONE = (
    "Tell me about {x}.",
    "What is {x}?",
    "What do you know about {x}?",
    "Can you tell me something about {x}?",
    "Can you explain {x}?",
    "Explain {x}.",
    "Describe {x}.",
    "I want to know more about {x}.",
    "What can you tell me about {x}?",
    "Explain {x} in simple words.",
)
_ABOUT_MANY = (
    "Tell me about {x}.",
    "What are {x}?",
    "What do you know about {x}?",
    "Can you tell me something about {x}?",
    "I want to know more about {x}.",
    "What can you tell me about {x}?",
    "Tell me something interesting about {x}.",
)
_MORE = ("Tell me more.", "What else?", "More please", "Go on.", "What else do you know about {x}?")
_NO_MORE = (
    "That is all I know about it.",
    "I do not know more than that. I am a very small model.",
)
_NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}


def small_talk(draw: random.Random) -> tuple[Message, ...]:
    """Return something that people say in small talk, and an answer."""
    chosen = draw.choice(load("talk")["exchange"])
    return exchange(draw.choice(chosen["user"]), fill(draw.choice(chosen["assistant"]), draw))


def question(draw: random.Random) -> tuple[Message, ...]:
    """Return a direct question and its one answer."""
    chosen = draw.choice(load("questions")["question"])
    return exchange(draw.choice(chosen["ask"]), draw.choice(chosen["answer"]))


def topic(draw: random.Random, *, brief: bool = False) -> tuple[Message, ...]:
    """Return a question about a topic and its answer, sometimes followed by a request for more.

    Args:
        draw: the source of chance.
        brief: whether the answer is one sentence.
    """
    chosen = draw.choice(load("topics")["topic"])
    asked, name = _ask_about(chosen, draw)
    first, *others = chosen["facts"]
    if brief:
        return exchange(asked, first)
    told = sorted(draw.sample(range(len(others)), draw.randint(min(2, len(others)), len(others))))
    messages: tuple[Message, ...] = exchange(asked, " ".join([first, *(others[k] for k in told)]))
    if draw.random() < 0.2:
        rest = [fact for k, fact in enumerate(others) if k not in told] or [draw.choice(_NO_MORE)]
        messages += exchange(draw.choice(_MORE).format(x=name), " ".join(rest))
    return messages


def passage(draw: random.Random) -> str:
    """Return what is known about one to three topics, as a plain text."""
    chosen = draw.sample(load("topics")["topic"], draw.choice([1, 1, 2, 3]))
    paragraphs = []
    for one in chosen:
        first, *others = one["facts"]
        draw.shuffle(others)
        paragraphs.append(" ".join([first, *others[: draw.randint(2, len(others))]]))
    return "\n\n".join(paragraphs)


def _ask_about(chosen: dict[str, Any], draw: random.Random) -> tuple[str, str]:
    if "many" in chosen and draw.random() < 0.5:
        name = chosen["many"]
        return draw.choice(_ABOUT_MANY).format(x=name), name
    name = chosen["one"]
    if draw.random() < 0.1:
        bare = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
        return capitalised(bare), name
    return draw.choice(_ABOUT_ONE).format(x=name), name


# --- tables ---------------------------------------------------------------------------------------


def table(draw: random.Random) -> tuple[Message, ...]:
    """Return a question whose answer is in a table, and the answer."""
    makers: Sequence[Callable[[random.Random], tuple[str, str]]] = (
        *([_capital] * 3),
        _continent,
        *([_opposite] * 2),
        _plural,
        _past,
        _young,
        _sound,
        *([_work] * 2),
        *([_use] * 2),
        *([_list] * 3),
        _kind,
    )
    return exchange(*draw.choice(makers)(draw))


def _entry(name: str, draw: random.Random) -> tuple[str, str]:
    key, value = draw.choice(list(load("tables")[name].items()))
    return key, value


def _capital(draw: random.Random) -> tuple[str, str]:
    country, city = _entry("capitals", draw)
    asks: tuple[str, ...]
    if draw.random() < 0.25:
        asks = (f"Where is {city}?", f"In which country is {city}?", f"What country is {city} in?")
        return draw.choice(asks), f"{city} is the capital of {country}."
    asks = (
        f"What is the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
        f"Do you know the capital of {country}?",
    )
    return draw.choice(asks), f"The capital of {country} is {city}."


def _continent(draw: random.Random) -> tuple[str, str]:
    continent, countries = draw.choice(list(load("tables")["continents"].items()))
    country = draw.choice(countries)
    asks = (f"Where is {country}?", f"On which continent is {country}?")
    return draw.choice(asks), f"{capitalised(country)} is in {continent}."


def _opposite(draw: random.Random) -> tuple[str, str]:
    word, other = _entry("opposites", draw)
    asks = (
        f"What is the opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"What is the opposite of '{word}'?",
    )
    return draw.choice(asks), f"The opposite of {word} is {other}."


def _plural(draw: random.Random) -> tuple[str, str]:
    word, plural = _entry("plurals", draw)
    return f"What is the plural of {word}?", f"The plural of {word} is {plural}."


def _past(draw: random.Random) -> tuple[str, str]:
    word, past = _entry("past", draw)
    return f"What is the past tense of {word}?", f"The past tense of {word} is {past}."


def _young(draw: random.Random) -> tuple[str, str]:
    animal, young = _entry("young", draw)
    asks = (f"What is a baby {animal} called?", f"What do you call a young {animal}?")
    return draw.choice(asks), f"A baby {animal} is called {young}."


def _sound(draw: random.Random) -> tuple[str, str]:
    animal, sound = _entry("sounds", draw)
    asks = ("What does the {x} say?", "What sound does a {x} make?", "How does a {x} sound?")
    return pick(asks, draw, {"x": animal}), pick(
        ["A {x} says: {sound}!"], draw, {"x": animal, "sound": sound}
    )


def _work(draw: random.Random) -> tuple[str, str]:
    worker, does = _entry("work", draw)
    asks = ("What does a {x} do?", "What is a {x}?", "What is the job of a {x}?")
    slots = {"x": worker, "does": does}
    if draw.random() < 0.3:
        return f"Who {does}?", pick(["A {x} {does}."], draw, slots)
    return pick(asks, draw, slots), pick(["A {x} {does}."], draw, slots)


def _use(draw: random.Random) -> tuple[str, str]:
    tool, use = _entry("uses", draw)
    slots = {"x": tool, "use": use}
    if draw.random() < 0.3:
        return f"What do I need to {use}?", pick(["You need a {x} to {use}."], draw, slots)
    asks = ("What is a {x} for?", "What do you do with a {x}?", "What can I do with a {x}?")
    return pick(asks, draw, slots), pick(["You use a {x} to {use}."], draw, slots)


def _list(draw: random.Random) -> tuple[str, str]:
    group, items = draw.choice(list(load("tables")["lists"].items()))
    count = draw.randint(2, 5)
    chosen = draw.sample(items, count)
    number = draw.choice([str(count), _NUMBER_WORDS[count]])
    asks = (
        f"Name {number} {group}.",
        f"Can you name {number} {group}?",
        f"Tell me {number} {group}.",
        f"Give me a list of {number} {group}.",
        f"List {number} {group}.",
    )
    if draw.random() < 0.5:
        return draw.choice(asks), capitalised(joined(chosen)) + "."
    lines = [f"{k}. {capitalised(item)}" for k, item in enumerate(chosen, 1)]
    return draw.choice(asks), "\n".join(lines)


def _kind(draw: random.Random) -> tuple[str, str]:
    thing, kind = _entry("kinds", draw)
    other = draw.choice([k for k in load("tables")["kinds"].values() if k != kind])
    named = thing if thing[0].isupper() else f"a {thing}"
    is_kind = draw.random() < 0.5
    answer = "Yes, {x} is {kind}." if is_kind else "No, {x} is {kind}, not {other}."
    slots = {"x": named, "kind": kind, "other": other, "asked": kind if is_kind else other}
    return pick(["Is {x} {asked}?"], draw, slots), pick([answer], draw, slots)


def unknown(draw: random.Random) -> tuple[Message, ...]:
    """Return a question that is too hard for the model, and an answer that says so."""
    texts = load("tables")["unknown"]
    ask = draw.choice(texts["asks"])
    thing, second = draw.sample(texts["things"], 2)
    person = draw.choice(texts["people"])
    slots = {
        "thing": thing,
        "thing2": second,
        "person": person,
        "topic": thing if "{thing}" in ask else person if "{person}" in ask else "that",
        "city": draw.choice(load("tables")["lists"]["cities"]),
        "year": str(draw.randint(1000, 2030)),
        "number": str(draw.randint(2, 30)),
    }
    return exchange(fill(ask, draw, slots), fill(draw.choice(texts["answers"]), draw, slots))
