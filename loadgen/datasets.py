"""Readers of datasets: files of prompts and chats, which say what to send but not when."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.loadgen.workload import Arrival, Message, Workload, chat_of

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}
_ROLES |= {"bing": "assistant", "bard": "assistant", "assistant": "assistant", "system": "system"}
"""Roles of messages, by ShareGPT's names."""

Content = str | tuple[Message, ...]
CountTokens = Callable[[str], int]


class DatasetError(ValueError):
    """A dataset cannot be read or used; the message is one line that names the file."""


class Turn(msgspec.Struct, frozen=True):
    """What one request sends, and the answer that the dataset has for it."""

    content: Content
    answer: str | None = None
    output_tokens: int | None = None


Talk = Sequence[Turn]
"""The turns of a chat, at least one; a prompt is a chat of one turn."""


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _ShareGpt(msgspec.Struct):
    conversations: list[_Said]


class _Message(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the project's own format: the prompt, or all messages, of one request."""

    prompt: str | None = None
    messages: list[_Message] | None = None
    output_tokens: int | None = None


def read_dataset(path: Path) -> list[Talk]:
    """Read ShareGPT's JSON, or JSON lines of prompts or messages (``docs/replay.md``).

    Chats in which no user speaks are left out.

    Raises:
        DatasetError: the file does not exist, is no such dataset, or has nothing to send.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from error
    is_array = content.lstrip()[:1] == b"["
    talks = [talk for talk in (_sharegpt if is_array else _lines)(path, content) if talk]
    if not talks:
        raise DatasetError(f"{path}: nothing to send in it")
    return talks


def _sharegpt(path: Path, content: bytes) -> Iterator[Talk]:
    try:
        rows = msgspec.json.decode(content, type=list[_ShareGpt])
    except msgspec.DecodeError as error:
        raise DatasetError(f"{path} is not in ShareGPT's format: {error}") from error
    for row in rows:
        yield _turns(
            Message(_ROLES.get(one.speaker, "user"), one.value) for one in row.conversations
        )


def _lines(path: Path, content: bytes) -> Iterator[Talk]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
        except msgspec.DecodeError as error:
            raise DatasetError(f"{path}, line {number}: {error}") from error
        if (row.prompt is None) is (row.messages is None):
            raise DatasetError(f"{path}, line {number}: it has neither or both of prompt, messages")
        if row.output_tokens is not None and row.output_tokens < 1:
            raise DatasetError(f"{path}, line {number}: output_tokens must be at least 1")
        if row.prompt is not None:
            turns = [Turn(row.prompt)]
        else:
            # The messages before the last of a user are its context, not requests of their own.
            turns = _turns(Message(one.role, one.content) for one in row.messages or ())[-1:]
        yield [msgspec.structs.replace(turn, output_tokens=row.output_tokens) for turn in turns]


def _turns(messages: Iterable[Message]) -> list[Turn]:
    """Return a turn for each message of a user, with all messages before it."""
    said: list[Message] = []
    turns: list[Turn] = []
    for message in messages:
        if message.role == "assistant" and turns and said[-1].role == "user":
            turns[-1] = msgspec.structs.replace(turns[-1], answer=message.content)
        said.append(message)
        if message.role == "user":
            turns.append(Turn(tuple(said)))
    return turns


def with_contents(
    workload: Workload,
    talks: Sequence[Talk],
    *,
    seed: int = 0,
    think_seconds: float = 5.0,
    max_turns: int | None = None,
    count: CountTokens | None = None,
) -> Workload:
    """Return a workload that sends a dataset when the other one sends its requests.

    The dataset comes in an order that the seed decides, and again from its beginning if it is
    shorter. An answer's length is the row's own, or that of the dataset's answer if tokens can be
    counted, or else that of the workload.

    Args:
        workload: says when each chat begins.
        talks: the dataset.
        seed: of the order, and of the times between turns.
        think_seconds: mean time from an answer to the next turn, exponentially distributed.
        max_turns: the most turns of a chat.
        count: counts a text's tokens.
    """
    rng = random.Random(seed)
    order = rng.sample(talks, len(talks))

    def length(turn: Turn, otherwise: int) -> int:
        if turn.output_tokens is not None:
            return turn.output_tokens
        return max(1, count(turn.answer)) if count and turn.answer else otherwise

    def chat(arrival: Arrival, talk: Talk) -> Arrival:
        plain = replace(arrival, prompt_tokens=0, prefix=(), next=None)
        return chat_of(
            [
                replace(
                    plain,
                    at=arrival.at if k == 0 else rng.expovariate(1 / think_seconds),
                    content=turn.content,
                    output_tokens=length(turn, arrival.output_tokens),
                )
                for k, turn in enumerate(talk[:max_turns])
            ]
        )

    arrivals = map(chat, workload.arrivals, itertools.cycle(order))
    return replace(workload, arrivals=tuple(arrivals))
