"""Conversations with tools: a call when a tool fits the question, words when none does."""

import random
from dataclasses import dataclass

from shoal.server.demo.training.answers import question, small_talk
from shoal.server.demo.training.chat import Conversation, Message, Tool, tool_call
from shoal.server.demo.training.texts import load


@dataclass(frozen=True)
class _Use:
    """A tool: its possible names, its parameters with example values, questions and answers.

    ``asks`` and ``reply`` name the values by position; ``results`` are what the tool may say.
    """

    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[str, ...], ...]
    values: tuple[tuple[str | int, ...], ...]
    asks: tuple[str, ...]
    results: tuple[str, ...]
    reply: str


_CITIES = tuple(load("tables")["lists"]["cities"]) + tuple(load("tables")["capitals"].values())
_PEOPLE = tuple(name for names in load("stories")["names"].values() for name in names)
_WORDS = tuple(load("tables")["opposites"]) + tuple(load("tables")["uses"])

_USES = (
    _Use(
        ("get_weather", "weather", "current_weather", "lookup_weather"),
        "Get the weather of a city",
        (("city", "location", "place"),),
        (_CITIES,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0} today?",
            "Is it raining in {0}?",
            "Tell me the weather in {0}.",
        ),
        ("sunny, 24 degrees", "rain, 12 degrees", "cloudy, 17 degrees", "snow, -2 degrees"),
        "The weather in {0}: {result}.",
    ),
    _Use(
        ("get_time", "current_time", "time_in"),
        "Get the time in a city",
        (("city", "place", "location"),),
        (_CITIES,),
        ("What time is it in {0}?", "Tell me the time in {0}."),
        ("10:30", "18:45", "7:05", "23:10"),
        "It is {result} in {0}.",
    ),
    _Use(
        ("set_timer", "timer", "start_timer"),
        "Start a timer",
        (("minutes", "duration"),),
        (tuple(range(1, 61)),),
        (
            "Set a timer for {0} minutes.",
            "Start a timer of {0} minutes.",
            "Wake me in {0} minutes.",
        ),
        ("ok", "done", "started"),
        "The timer is set for {0} minutes.",
    ),
    _Use(
        ("add", "add_numbers", "sum"),
        "Add two numbers",
        (("a", "x", "first"), ("b", "y", "second")),
        (tuple(range(1000)), tuple(range(1000))),
        ("What is {0} plus {1}?", "Add {0} and {1}.", "How much is {0} + {1}?"),
        (),
        "{0} plus {1} is {result}.",
    ),
    _Use(
        ("send_message", "message", "send_text"),
        "Send a message to somebody",
        (("to", "recipient"), ("text", "message")),
        (_PEOPLE, ("hello", "good night", "see you soon", "happy birthday", "I am late")),
        ("Send a message to {0}: {1}", "Tell {0}: {1}", "Write to {0}: {1}"),
        ("sent", "ok", "delivered"),
        "I have sent your message to {0}.",
    ),
    _Use(
        ("look_up", "dictionary", "define"),
        "Look up a word",
        (("word", "term"),),
        (_WORDS,),
        ("Look up the word {0}.", "Look up {0} in the dictionary.", "Define {0}."),
        ("a common word", "found in every dictionary"),
        "The dictionary says about {0}: {result}.",
    ),
    _Use(
        ("turn_on_light", "light_on", "switch_light"),
        "Turn on the light in a room",
        (("room",),),
        (("kitchen", "bedroom", "bathroom", "hall", "garden", "attic"),),
        ("Turn on the light in the {0}.", "Light in the {0}, please.", "It is dark in the {0}."),
        ("ok", "on", "done"),
        "The light in the {0} is on.",
    ),
    _Use(
        ("play_music", "play", "start_music"),
        "Play music",
        (("style", "genre"),),
        (("jazz", "rock", "piano", "folk", "opera", "blues"),),
        ("Play some {0} music.", "I want to hear {0} music.", "Play {0}."),
        ("playing", "ok"),
        "Enjoy the {0} music!",
    ),
    _Use(
        ("depth", "get_depth", "sea_depth"),
        "Depth of a sea",
        (("sea", "name"),),
        (("Baltic Sea", "North Sea", "Black Sea", "Red Sea", "Pacific Ocean"),),
        ("How deep is the {0}?", "Tell me the depth of the {0}."),
        ("55 metres", "95 metres", "1253 metres", "4000 metres"),
        "The depth of the {0} is {result}.",
    ),
)


def with_tools(draw: random.Random) -> Conversation:
    """Return a conversation in which one to three tools are available."""
    uses = draw.sample(_USES, draw.randint(1, 3))
    parameters = [tuple(draw.choice(names) for names in use.parameters) for use in uses]
    tools = tuple(
        Tool(draw.choice(use.names), names, use.description)
        for use, names in zip(uses, parameters, strict=True)
    )
    system = draw.choice([None, "You are a helpful assistant."])
    if draw.random() < 0.2:
        maker = draw.choice([question, small_talk])
        return Conversation(maker(draw), system, tools)
    return Conversation(_call(draw, uses[0], tools[0]), system, _shuffled(draw, tools))


def _call(draw: random.Random, use: _Use, tool: Tool) -> tuple[Message, ...]:
    values = [draw.choice(options) for options in use.values]
    messages: tuple[Message, ...] = (
        Message("user", draw.choice(use.asks).format(*values)),
        Message("assistant", tool_call(tool.name, dict(zip(tool.parameters, values, strict=True)))),
    )
    if draw.random() < 0.5:
        result = draw.choice(use.results) if use.results else str(sum(map(int, values)))
        reply = use.reply.format(*values, result=result)
        messages += (Message("tool", result), Message("assistant", reply))
    return messages


def _shuffled(draw: random.Random, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    return tuple(draw.sample(tools, len(tools)))
