"""What may happen to a node in a chaos run, drawn from a seed."""

import enum
import random
from typing import Any

import msgspec

MODEL = "shoal-demo"
PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple(random.Random(f"prompt {k}").randrange(3, 256) for _ in range(2 + 13 * k))
    for k in range(12)
)
"""The prompts of all requests, as token ids that every tokenizer has: some share nothing, and the
longer ones take several blocks."""
MOST_TOKENS = 80
"""Tokens of the longest answer."""
LONGEST_DEADLINE_MS = 2000


class Event(enum.StrEnum):
    """What is done to a node, beside asking it for completions."""

    SWITCH = "switch"
    DRAIN = "drain"
    """An engine is taken out, and serves again later."""
    POLICY = "policy"
    KILL = "kill"
    STOP = "stop"
    """A process of an engine is stopped, and not continued."""
    STALL = "stall"
    """It is stopped, and continued before anybody should have noticed."""
    BURST = "burst"
    MALFORMED = "malformed"


WEIGHTS = {
    Event.SWITCH: 8,
    Event.DRAIN: 1,
    Event.POLICY: 2,
    Event.KILL: 2,
    Event.STOP: 1,
    Event.STALL: 2,
    Event.BURST: 1,
    Event.MALFORMED: 4,
}


class Plan(msgspec.Struct, frozen=True):
    """One request for a completion."""

    prompt: int
    """Which of ``PROMPTS``."""
    max_tokens: int
    stream: bool = True
    temperature: float = 0.0
    seed: int | None = None
    priority: int = 0
    deadline_ms: int | None = None
    cancel_after: float | None = None
    """Seconds after which the client closes the connection; None: never."""

    def body(self) -> dict[str, Any]:
        """Return the JSON of the request."""
        return {
            "model": MODEL,
            "prompt": list(PROMPTS[self.prompt]),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "priority": self.priority,
            "stream": self.stream,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def headers(self) -> dict[str, str]:
        """Return the headers of the request."""
        deadline = self.deadline_ms
        return {} if deadline is None else {"x-shoal-deadline-ms": str(deadline)}


def draw_event(rng: random.Random) -> Event:
    """Draw what happens next."""
    (event,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    return event


def draw_plan(rng: random.Random) -> Plan:
    """Draw a request: most are greedy streams that are read to their end."""
    greedy = rng.random() < 0.7
    return Plan(
        prompt=rng.randrange(len(PROMPTS)),
        max_tokens=rng.randint(1, MOST_TOKENS),
        stream=rng.random() < 0.7,
        temperature=0.0 if greedy else 0.9,
        seed=None if greedy or rng.random() < 0.5 else rng.randrange(1000),
        priority=rng.choice([0, 0, 0, -1, 5]),
        deadline_ms=rng.randint(1, LONGEST_DEADLINE_MS) if rng.random() < 0.1 else None,
        cancel_after=rng.uniform(0, 1) if rng.random() < 0.15 else None,
    )


def draw_malformed(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """Draw the body and headers of a request that a server must refuse."""
    good = Plan(prompt=0, max_tokens=4, stream=rng.random() < 0.5).body()
    wrong: dict[str, Any] = rng.choice(
        [
            {"max_tokens": -1},
            {"max_tokens": "many"},
            {"temperature": -1},
            {"n": 100_000},
            {"stop": ["x"] * 1000},
            {"prompt": [1] * 1_000_000},
            {"prompt": [-5]},
            {"prompt": None},
            {"model": "no such model"},
            {"priority": 1e9},
            {"logprobs": 10_000},
            {"structured_outputs": {"regex": "("}},
        ]
    )
    body = msgspec.json.encode(good | wrong)
    headers = {"content-type": "application/json"}
    match rng.randrange(8):
        case 0:
            return body[: len(body) // 2], headers
        case 1:
            return msgspec.json.encode(good), headers | {"x-vllm-priority": "high"}
        case _:
            return body, headers
