"""Bounds the log probabilities of one request: its choices, tokens and logprobs multiply.

Each of these factors has its own bound (``bounds.py``), and a request may reach all of them at
once: 128 choices of 2,000 tokens with 20 log probabilities each are 5 million values, 650 MiB of a
front end's memory. The part of the product that the body tells is checked before anything works on
the body. The lengths of text prompts, and of answers whose length is left open, are known only when
vLLM has made engine requests of the body: ``LogprobBudget`` checks these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.server.gate.bounds import Bounds, BoundsError

OPEN_TOKENS = 4096
"""An answer whose length the request leaves open may be limited, but to no less than this."""
_COMPLETION_TOKENS = 16
"""vLLM's default of ``CompletionRequest.max_tokens``."""
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_INCLUDED = "message.output_text.logprobs"
"""The entry of ``include`` by which a request to ``/v1/responses`` asks for log probabilities."""


@dataclass(frozen=True)
class _Asked:
    """The factors that a body tells."""

    answers: int
    tokens: int | None
    """Tokens of an answer; None: left open."""
    width: int
    """Log probabilities per token; 0: none."""
    prompt_tokens: int
    """Tokens of all prompts that are token ids, counted once for each answer."""
    prompt_width: int


def _asked(fields: Mapping[str, Any], bounds: Bounds) -> _Asked:
    prompts = _prompts(fields)
    n = max(_count(fields.get("n")), 1)
    beams = n if fields.get("use_beam_search") else 0
    width = max(_width(fields, bounds), 2 * beams + 1 if beams else 0)
    tokens = _length(fields, bounds)
    if tokens is None and beams:  # the engine is asked for one token at a time
        tokens = bounds.prompt_tokens
    prompt_width = _values(fields.get("prompt_logprobs"), bounds)
    if fields.get("echo") and "prompt" in fields:
        prompt_width = max(prompt_width, _width(fields, bounds))
    ids = n * sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return _Asked(n * len(prompts), tokens, width, ids, prompt_width)


def _prompts(fields: Mapping[str, Any]) -> Sequence[Any]:
    """Return the prompts: lists of token ids, and an empty text for every text or chat."""
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list):
        return [""] * max(sum(isinstance(item, list) for item in messages), 1)
    if not isinstance(prompt, list) or not prompt:
        return [""]
    if isinstance(prompt[0], int):
        return [prompt]
    return [entry if isinstance(entry, list) else "" for entry in prompt]


def _length(fields: Mapping[str, Any], bounds: Bounds) -> int | None:
    for name in _LENGTHS:
        length = fields.get(name)
        if isinstance(length, int):
            return min(max(length, 0), bounds.prompt_tokens)
    left_out = "prompt" in fields and "max_tokens" not in fields
    return _COMPLETION_TOKENS if left_out else None


def _width(fields: Mapping[str, Any], bounds: Bounds) -> int:
    """Return the log probabilities per token of an answer."""
    logprobs = fields.get("logprobs")
    included = fields.get("include")
    if logprobs is True or (isinstance(included, list) and _INCLUDED in included):
        width = _values(fields.get("top_logprobs") or 0, bounds)
    else:
        width = _values(logprobs, bounds)
    ids = fields.get("logprob_token_ids")
    return max(width, len(ids) + 1) if isinstance(ids, list) and ids else width


def _values(logprobs: Any, bounds: Bounds) -> int:
    """Return the log probabilities per token: the token's own, and the ``logprobs`` asked for."""
    if not isinstance(logprobs, int) or isinstance(logprobs, bool):
        return 0
    return bounds.vocabulary if logprobs < 0 else logprobs + 1


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 1


def check_logprobs(fields: Mapping[str, Any], bounds: Bounds) -> None:
    """Bound the log probabilities that a body asks for, as far as it tells their number.

    Args:
        fields: the content of the body, of any route.
        bounds: the largest of everything.

    Raises:
        BoundsError: the body asks for too many, and the message has the factors; or it asks for
            those of prompts where there are none.
    """
    asked = _asked(fields, bounds)
    if asked.prompt_width and not bounds.prompt_logprobs:
        raise BoundsError(
            "prompt_logprobs",
            "engines on CPUs compute no log probabilities of prompts where there are adapters",
        )
    output = asked.answers * (asked.tokens or 0) * asked.width
    prompt = asked.prompt_tokens * asked.prompt_width
    if output + prompt > bounds.logprob_values:
        raise _refused(asked.answers, asked.tokens or 0, asked.width, prompt, bounds.logprob_values)


def _refused(answers: int, tokens: int, width: int, prompt: int, most: int) -> BoundsError:
    made = answers * tokens * width
    text = f"{answers} answers x {tokens} tokens x {width} values = {made}" if made else ""
    more = f"{prompt} values for the prompts" if prompt else ""
    asked = " and ".join(part for part in (text, more) if part)
    return BoundsError("logprobs", f"{asked}: at most {most} log probabilities are allowed")


class LogprobBudget:
    """The log probabilities that the engine requests of one HTTP request may still ask for.

    Args:
        fields: what its body says.
        bounds: the largest of everything.
    """

    def __init__(self, fields: Mapping[str, Any], bounds: Bounds) -> None:
        self._most = bounds.logprob_values
        self._vocabulary = bounds.vocabulary
        self._prompts = len(_prompts(fields))
        self._is_open = _asked(fields, bounds).tokens is None
        self._taken = 0

    def take(self, params: Any, prompt_tokens: int) -> None:
        """Count an engine request, and limit its answers if their length was left open.

        Args:
            params: the request's ``vllm.SamplingParams``, whose ``max_tokens`` may be lowered.
            prompt_tokens: tokens of its prompt.

        Raises:
            BoundsError: the request asks for more than is left.
        """
        width = self._width(params.logprobs)
        if params.logprob_token_ids:
            width = max(width, len(params.logprob_token_ids) + 1)
        prompt = params.n * prompt_tokens * self._width(params.prompt_logprobs)
        tokens = params.max_tokens or 0
        if width and self._is_open:
            share = (self._most // self._prompts - prompt) // (params.n * width)
            if OPEN_TOKENS <= share < tokens:
                tokens = params.max_tokens = share
        values = params.n * tokens * width + prompt
        if values > self._most - self._taken:
            raise _refused(params.n, tokens, width, prompt + self._taken, self._most)
        self._taken += values

    def _width(self, logprobs: int | None) -> int:
        if logprobs is None:
            return 0
        return self._vocabulary if logprobs < 0 else logprobs + 1
