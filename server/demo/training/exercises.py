"""Small exercises: arithmetic, counting, spelling, and remembering what was just said."""

import random
from collections.abc import Callable, Sequence

from shoal.server.demo.training.answers import question, small_talk, table
from shoal.server.demo.training.chat import Message, exchange
from shoal.server.demo.training.names import names
from shoal.server.demo.training.texts import capitalised, fill, joined, load

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_HOW_MUCH = ("What is {x}?", "How much is {x}?", "{x} = ?", "What's {x}?", "Calculate {x}.", "{x}")
_OBJECTS = ("ball", "kite", "hat", "book", "cup", "boat", "lamp", "key", "apple", "box", "drum")
_PLACES = ("garden", "kitchen", "forest", "station", "library", "tower", "boat", "barn", "school")


def exercise(draw: random.Random) -> tuple[Message, ...]:
    """Return an exercise and its solution."""
    makers: Sequence[Callable[[random.Random], tuple[Message, ...]]] = (
        *([_calculation] * 6),
        _word_problem,
        _comparison,
        _counting,
        _next_in_order,
        _spelling,
        _repetition,
        *([_remembered] * 3),
        *([_who_has_what] * 2),
        *([_where_is] * 2),
    )
    return draw.choice(makers)(draw)


def _calculation(draw: random.Random) -> tuple[Message, ...]:
    kind = draw.choice(["plus", "plus", "minus", "times", "half", "double"])
    limit = draw.choice([10, 20, 20, 100])
    first, second = draw.randint(0, limit), draw.randint(0, limit)
    if kind == "half":
        return exchange(f"What is half of {2 * first}?", f"Half of {2 * first} is {first}.")
    if kind == "double":
        return exchange(f"What is double {first}?", f"Double {first} is {2 * first}.")
    if kind == "times":
        first, second = draw.randint(0, 12), draw.randint(0, 12)
        result, sign, word = first * second, draw.choice("x*"), "times"
    elif kind == "minus":
        first, second = max(first, second), min(first, second)
        result, sign, word = first - second, "-", "minus"
    else:
        result, sign, word = first + second, "+", "plus"
    written = draw.choice([f"{first} {sign} {second}", f"{first} {word} {second}"])
    answer = f"{first} {word} {second} is {result}."
    return exchange(draw.choice(_HOW_MUCH).format(x=written), answer)


def _word_problem(draw: random.Random) -> tuple[Message, ...]:
    have, change = draw.randint(2, 12), draw.randint(1, 9)
    item = draw.choice(["apples", "books", "coins", "eggs", "stones", "shells", "cookies", "nuts"])
    who = draw.choice(["I", names(draw, 1)[0]])
    has, gets, gives = ("have", "get", "give") if who == "I" else ("has", "gets", "gives")
    if draw.random() < 0.5:
        asked = f"{who} {has} {have} {item} and {gets} {change} more. How many {item} are there?"
        return exchange(asked, f"{have} plus {change} is {have + change}. So {have + change}.")
    change = min(have, change)
    asked = f"{who} {has} {have} {item} and {gives} {change} away. How many {item} are left?"
    return exchange(asked, f"{have} minus {change} is {have - change}. So {have - change}.")


def _comparison(draw: random.Random) -> tuple[Message, ...]:
    first, second = draw.sample(range(1, 100), 2)
    if draw.random() < 0.3:
        kind = "odd" if first % 2 else "even"
        return exchange(f"Is {first} even or odd?", f"{first} is {kind}.")
    asked = f"Which number is bigger, {first} or {second}?"
    return exchange(asked, f"{max(first, second)} is bigger than {min(first, second)}.")


def _counting(draw: random.Random) -> tuple[Message, ...]:
    start = draw.choice([1, 1, 1, draw.randint(2, 20)])
    end = start + draw.randint(3, 19)
    numbers = [str(k) for k in range(start, end + 1)]
    if draw.random() < 0.25:
        return exchange(f"Count down from {end} to {start}.", ", ".join(reversed(numbers)))
    asks: tuple[str, ...] = (
        f"Count from {start} to {end}.",
        f"Can you count from {start} to {end}?",
    )
    if start == 1:
        asks = (*asks, f"Count to {end}.", f"Can you count to {end}?")
    return exchange(draw.choice(asks), ", ".join(numbers))


def _next_in_order(draw: random.Random) -> tuple[Message, ...]:
    names, unit = draw.choice([(_DAYS, "day"), (_MONTHS, "month")])
    index = draw.randrange(len(names))
    step, word = draw.choice([(1, "after"), (-1, "before")])
    other = names[(index + step) % len(names)]
    asked = f"Which {unit} comes {word} {names[index]}?"
    return exchange(asked, f"{other} comes {word} {names[index]}.")


def _spelling(draw: random.Random) -> tuple[Message, ...]:
    tables = load("tables")
    words = [*tables["opposites"], *tables["plurals"], *tables["uses"], *tables["past"], *_OBJECTS]
    word = draw.choice(words)
    kind = draw.choice(["spell", "count", "first"])
    if kind == "spell":
        return exchange(f"How do you spell {word}?", f"{capitalised(word)}: {'-'.join(word)}.")
    if kind == "count":
        asked = f"How many letters does the word {word} have?"
        return exchange(asked, f"{capitalised(word)} has {len(word)} letters: {'-'.join(word)}.")
    asked = f"What is the first letter of {word}?"
    return exchange(asked, f"The first letter of {word} is {word[0]}.")


def _repetition(draw: random.Random) -> tuple[Message, ...]:
    texts = load("talk")["exchange"]
    words = " ".join(fill(draw.choice(draw.choice(texts)["user"]), draw).split()[:6])
    if draw.random() < 0.5:
        words = " ".join(draw.sample(_OBJECTS + _PLACES, draw.randint(1, 4)))
    asks = ("Say: {x}", "Repeat after me: {x}", "Please repeat: {x}", 'Say "{x}".')
    return exchange(draw.choice(asks).format(x=words), words)


def _remembered(draw: random.Random) -> tuple[Message, ...]:
    kind = draw.choice(["name", "name", "colour", "pet"])
    if kind == "name":
        told, value = f"My name is {(name := names(draw, 1)[0])}.", name
        told = draw.choice(
            [told, f"I am {name}.", f"Hello, my name is {name}.", f"Call me {name}."]
        )
        greeting = f"Nice to meet you, {name}!"
        asked = draw.choice(["What is my name?", "Who am I?", "Do you remember my name?"])
        answer = f"Your name is {value}."
    elif kind == "colour":
        value = draw.choice(load("tables")["lists"]["colours"])
        told, greeting = (
            f"My favourite colour is {value}.",
            f"{capitalised(value)} is a fine colour.",
        )
        asked, answer = "What is my favourite colour?", f"Your favourite colour is {value}."
    else:
        animal, value = draw.choice(["dog", "cat", "horse", "rabbit", "bird"]), names(draw, 1)[0]
        told, greeting = (
            f"I have a {animal} named {value}.",
            f"{value} is a nice name for a {animal}.",
        )
        asked = f"What is the name of my {animal}?"
        answer = f"Your {animal} is called {value}."
    between = draw.choice([question, small_talk, table])(draw) if draw.random() < 0.4 else ()
    return exchange(told, greeting) + between + exchange(asked, answer)


def _who_has_what(draw: random.Random) -> tuple[Message, ...]:
    count = draw.choice([2, 2, 3])
    owners, things = names(draw, count), draw.sample(_OBJECTS, count)
    colours = draw.sample(load("tables")["lists"]["colours"], count)
    told = joined(
        [f"{who} has {_a(c)} {x}" for who, c, x in zip(owners, colours, things, strict=True)]
    )
    k = draw.randrange(count)
    asked, answer = draw.choice(
        [
            (f"Who has the {things[k]}?", f"{owners[k]} has the {things[k]}."),
            (f"What does {owners[k]} have?", f"{owners[k]} has {_a(colours[k])} {things[k]}."),
            (f"What colour is the {things[k]}?", f"The {things[k]} is {colours[k]}."),
        ]
    )
    return exchange(f"{told}. {asked}", answer)


def _where_is(draw: random.Random) -> tuple[Message, ...]:
    count = draw.choice([2, 2, 3])
    people, places = names(draw, count), draw.sample(_PLACES, count)
    told = " ".join(f"{who} is in the {at}." for who, at in zip(people, places, strict=True))
    k = draw.randrange(count)
    if draw.random() < 0.4:
        return exchange(f"{told} Who is in the {places[k]}?", f"{people[k]} is in the {places[k]}.")
    return exchange(f"{told} Where is {people[k]}?", f"{people[k]} is in the {places[k]}.")


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
