"""Requests of every kind, and whether two servers' answers to one are equal.

An answer is brought into one form, whether it came as a whole or as a stream, from the completions
or from the chat route.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

MODEL = "parity"
"""The name that both servers give the model."""
VOCABULARY = 2048
TOLERANCE = 1e-4
"""By how much log probabilities may differ, which groups sum in another order: in fp32, by 2e-5."""
MARGIN = 1e-4
"""By how much every token of a steady answer was better than any that is not in it."""

Answer = dict[str, Any]
"""See ``answer_of``."""

_WORDS = (
    "sea",
    "ship",
    "sails",
    "north",
    "old",
    "man",
    "told",
    "island",
    "class",
    "value",
    "returns",
)
_ROUTES = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        number: what it is known by.
        kind: one of ``KINDS``.
        route: where it is sent.
        body: without ``stream``.
        streams: whether it may be streamed, too.
    """

    number: int
    kind: str
    route: str
    body: dict[str, Any]
    streams: bool

    def handicapped(self, answer: Answer) -> "Case":
        """Return the request with everything in an answer made a little less likely.

        If what comes of it is the same, none of the choices of a token was so close that fp32
        could decide it either way.
        """
        tokens = itertools.chain(*outputs_of(answer))
        biases = {**self.body.get("logit_bias", {})}
        biases |= {str(token): biases.get(str(token), 0.0) - MARGIN for token in tokens}
        return replace(self, body={**self.body, "logit_bias": biases})


# --- requests -------------------------------------------------------------------------------------


def _greedy(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    return {"temperature": 0}


def _seed(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    cut = draw.choice(({}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}))
    return {"temperature": draw.choice((0.5, 1.0)), "seed": draw.randrange(1 << 30), **cut}


def _choices(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    return {"n": 3, "temperature": 0.8, "seed": draw.randrange(1 << 30)}


def _logprobs(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    wanted = {"logprobs": True, "top_logprobs": 4} if chat else {"logprobs": 4}
    return {"temperature": 0, **wanted}


def _prompt_logprobs(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    if chat or draw.random() < 0.5:
        return {"temperature": 0, "prompt_logprobs": 3}
    return {"temperature": 0, "echo": True, "logprobs": 2}


def _penalties(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    # Of so few tokens some come again and again, unless a penalty keeps them away.
    few = draw.sample(range(3, VOCABULARY), 24)
    penalties = draw.choice(
        (
            {"presence_penalty": 1.5},
            {"frequency_penalty": 1.0},
            {"repetition_penalty": 1.6},
            {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        )
    )
    return {"temperature": 0, "allowed_token_ids": few, **penalties}


def _grammar(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    sampling = draw.choice(({"temperature": 0}, {"temperature": 0.7, "seed": draw.randrange(99)}))
    word = {"type": "string", "pattern": f"^[a-z]{{{draw.randrange(12, 20)},40}}$"}
    schema = {
        **{"type": "object", "properties": {"word": word}, "required": ["word"]},
        "additionalProperties": False,
    }
    if chat:
        function = {"name": "note", "parameters": schema, "strict": True}
        tool = {"type": "function", "function": function}
        choice = {"type": "function", "function": {"name": "note"}}
        return {**sampling, "tools": [tool], "tool_choice": choice, "max_tokens": 120}
    part = draw.choice(("[a-z]{2,6} ", "[0-9]{3}-[a-f]{2};", "yes|no|[x-z]+,"))
    regex = f"({part}){{{draw.randrange(5, 9)}}}end"
    outputs = draw.choice(({"regex": regex}, {"json": schema}))
    return {**sampling, "structured_outputs": outputs, "max_tokens": 120}


def _stops(draw: random.Random, *, chat: bool) -> dict[str, Any]:
    return {
        "temperature": 0,
        "stop": [draw.choice("xqz"), "="],
        "include_stop_str_in_output": draw.random() < 0.5,
        "min_tokens": draw.randrange(4, 24),
        "logit_bias": {str(draw.randrange(3, VOCABULARY)): 3.0},
    }


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "greedy": _greedy,
    "seed": _seed,
    "choices": _choices,
    "logprobs": _logprobs,
    "prompt_logprobs": _prompt_logprobs,
    "penalties": _penalties,
    "grammar": _grammar,
    "stops": _stops,
}
"""What is asked for, by name: given a source of random numbers and whether it is a chat."""


def draw_case(number: int, attempt: int = 0) -> Case:
    """Return a request that is like no other.

    Args:
        number: the kinds, and on either route, come in turn.
        attempt: other ones for other requests of the same number and kind.
    """
    draw = random.Random(f"{number} {attempt}")
    kind = list(KINDS)[number % len(KINDS)]
    route = _ROUTES[number // len(KINDS) % len(_ROUTES)]
    chat = route != _ROUTES[0]
    text = " ".join(draw.choices(_WORDS, k=draw.choice((3, 20, 60, 110)))) + f", number {number}"
    body = {
        "model": MODEL,
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
        "max_tokens": draw.randrange(24, 40),
        "return_token_ids": True,
        # Several tokens may have the same text: parts of a character.
        "return_tokens_as_token_ids": True,
        **KINDS[kind](draw, chat=chat),
    }
    return Case(number, kind, route, body, streams="prompt_logprobs" not in body)


async def ask(http: httpx.AsyncClient, case: Case, *, stream: bool) -> tuple[Answer, httpx.Headers]:
    """Send a request, and return the answer and the response's headers."""
    if not stream:
        response = await http.post(case.route, json=case.body)
        assert response.status_code == 200, response.text
        return answer_of([response.json()]), response.headers
    body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", case.route, json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events.pop() == "[DONE]"
    return answer_of(map(json.loads, events)), response.headers


# --- answers --------------------------------------------------------------------------------------


def answer_of(bodies: Iterable[dict[str, Any]]) -> Answer:
    """Join what was answered, an object or the chunks of a stream.

    Returns:
        ``usage`` and, by their index, ``choices``: text, calls of tools (name and arguments, by
        index), token ids, log probabilities (see ``_tokens``), and why each ended; the ``prompt``'s
        ids and its log probabilities, if they came as such.
    """
    answer: Answer = {"usage": None, "choices": {}, "prompt": None, "prompt_logprobs": []}
    for body in bodies:
        assert "error" not in body, body
        answer["usage"] = body.get("usage") or answer["usage"]
        for part in (body, *body["choices"]):  # the chat route says it once, completions by choice
            answer["prompt"] = part.get("prompt_token_ids") or answer["prompt"]
            answer["prompt_logprobs"] += map(_prompt_token, part.get("prompt_logprobs") or ())
        for part in body["choices"]:
            choice = answer["choices"].setdefault(part["index"], _empty_choice())
            message = part.get("message") or part.get("delta") or {}
            choice["text"] += part.get("text") or message.get("content") or ""
            for place, call in enumerate(message.get("tool_calls") or ()):
                told = choice["calls"].setdefault(call.get("index", place), ["", ""])
                told[0] += call["function"].get("name") or ""
                told[1] += call["function"].get("arguments") or ""
            choice["token_ids"] += part.get("token_ids") or []
            choice["logprobs"] += _tokens(part.get("logprobs") or {})
            for end in ("finish_reason", "stop_reason"):
                assert choice[end] is None, "something came after the end"
                choice[end] = part.get(end)
    for choice in answer["choices"].values():
        for call in choice["calls"].values():
            call[1] = _as_written_anew(call[1])
    return answer


def _as_written_anew(arguments: str) -> str:
    """Return a call's arguments as answers in one piece have them: a stream has the raw text."""
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:  # the answer ended before them
        return "".join(arguments.split())


def _empty_choice() -> dict[str, Any]:
    parts: dict[str, Any] = {"text": "", "calls": {}, "token_ids": [], "logprobs": []}
    return {**parts, "finish_reason": None, "stop_reason": None}


def _tokens(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for every token its name and log probability, and by name those of the best ones."""
    if "content" in logprobs:
        return [
            {
                "token": said["token"],
                "logprob": said["logprob"],
                "best": {best["token"]: best["logprob"] for best in said["top_logprobs"]},
            }
            for said in logprobs["content"]
        ]
    columns = [logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "top_logprobs")]
    return [
        {"token": token, "logprob": logprob, "best": best}
        for token, logprob, best in zip(*columns, strict=True)
    ]


def _prompt_token(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the rank of a token of the prompt, which comes first, and the best ones."""
    if logprobs is None:  # of the first
        return None
    rank = next(iter(logprobs.values()))["rank"]
    return {"rank": rank, "best": {token: said["logprob"] for token, said in logprobs.items()}}


def differences(got: Any, expected: Any, where: str = "") -> list[str]:
    """Return in what an answer differs from the expected one, as text.

    Log probabilities, the only fractions in it, may differ by ``TOLERANCE``, and what is as likely
    as the last of the best tokens may stand in its place. A rank may differ by one.
    """
    if isinstance(got, float) and isinstance(expected, float):
        equal = abs(got - expected) <= TOLERANCE
    elif isinstance(got, dict) and isinstance(expected, dict):
        if where.endswith(".best"):
            return differences(*_with_each_others(got, expected), where.removesuffix("best"))
        keys = sorted(got.keys() | expected.keys(), key=str)
        return [d for k in keys for d in differences(got.get(k), expected.get(k), f"{where}.{k}")]
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        pairs = enumerate(zip(got, expected, strict=True))
        return [d for k, (g, e) in pairs for d in differences(g, e, f"{where}[{k}]")]
    elif where.endswith(".rank") and None not in (got, expected):
        equal = abs(got - expected) <= 1
    else:
        equal = got == expected
    return [] if equal else [f"{where}: {got!r} instead of {expected!r}"]


def _with_each_others(*tables: dict[str, float]) -> list[dict[str, float]]:
    """Return tables of the best tokens, each with what the others have at its own lowest value."""
    lowest = [min(table.values(), default=0.0) for table in tables]
    tokens = {token for table in tables for token in table}
    return [
        {token: table.get(token, low) for token in tokens}
        for table, low in zip(tables, lowest, strict=True)
    ]


def outputs_of(answer: Answer) -> Sequence[Sequence[int]]:
    """Return every choice's token ids."""
    return [choice["token_ids"] for choice in answer["choices"].values()]
