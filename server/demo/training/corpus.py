"""The corpus: documents drawn from a seed, conversations for the most part."""

import random
from collections.abc import Callable, Iterator, Mapping

from shoal.server.demo.training import answers, chat, exercises, stories, tool_calls
from shoal.server.demo.training.chat import Conversation, Message
from shoal.server.demo.training.texts import capitalised

Maker = Callable[[random.Random], tuple[Message, ...]]

_TURNS: Mapping[Maker, int] = {
    stories.request_and_story: 24,
    answers.topic: 20,
    answers.small_talk: 20,
    answers.question: 9,
    answers.table: 10,
    exercises.exercise: 13,
    answers.unknown: 4,
}
"""What makes a turn, and its relative frequency."""

_BRIEF = ("Be brief.", "Answer in one sentence.", "You answer briefly.", "Keep it short.")
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are the demo model of Shoal.",
    "You are a kind and patient assistant.",
    "Answer in simple English.",
)
_TOOLS_SHARE = 0.06
_PLAIN_SHARE = 0.08
_BRIEF_SHARE = 0.03
_SYSTEM_SHARE = 0.2


def documents(seed: int, count: int) -> Iterator[str]:
    """Yield ``count`` documents; the same seed gives the same ones."""
    draw = random.Random(seed)
    for _ in range(count):
        yield document(draw)


def document(draw: random.Random) -> str:
    """Return a conversation in the format of the chat template, or a plain text."""
    chance = draw.random()
    if chance < _PLAIN_SHARE:
        return draw.choice([stories.plain_story, answers.passage])(draw)
    if chance < _PLAIN_SHARE + _TOOLS_SHARE:
        return chat.render(tool_calls.with_tools(draw))
    if chance < _PLAIN_SHARE + _TOOLS_SHARE + _BRIEF_SHARE:
        return chat.render(Conversation(answers.topic(draw, brief=True), draw.choice(_BRIEF)))
    return chat.render(conversation(draw))


def conversation(draw: random.Random) -> Conversation:
    """Return exchanges about one to four things, with or without a system message."""
    messages: tuple[Message, ...] = ()
    for _ in range(draw.choices([1, 2, 3, 4], [11, 5, 3, 1])[0]):
        maker = draw.choices(list(_TURNS), list(_TURNS.values()))[0]
        messages += tuple(_as_typed(message, draw) for message in maker(draw))
    system = draw.choice(_SYSTEMS) if draw.random() < _SYSTEM_SHARE else None
    return Conversation(messages, system)


def _as_typed(message: Message, draw: random.Random) -> Message:
    """Return what a user says as people type: some without capitals or the last full stop."""
    text = message.content
    if message.role != "user" or draw.random() < 0.65:
        return message
    match draw.randrange(4):
        case 0:
            text = text[:1].lower() + text[1:]
        case 1:
            text = text.rstrip(".?!") or text
        case 2:
            text = text.lower().rstrip(".?!") or text
        case _:
            text = f"{draw.choice(['Hi! ', 'Please: ', 'Hey, ', 'Hello! '])}{capitalised(text)}"
    return Message("user", text)
