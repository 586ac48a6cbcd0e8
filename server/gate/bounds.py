"""Upper bounds on what a request may bring or ask for, and the options that set them."""

import argparse
from argparse import Namespace
from dataclasses import dataclass

from shoal.runtime.config import MAX_HELD_BYTES
from shoal.server.number_options import add_number, check_at_least, flag_of


@dataclass(frozen=True)
class Bounds:
    """Upper bounds. Sizes of text are in characters unless the name says bytes."""

    body_bytes: int = 16 << 20
    bodies_bytes: int = MAX_HELD_BYTES
    """Bytes of all bodies that a front end keeps at once."""
    url_bytes: int = 8 << 10
    headers: int = 100
    header_bytes: int = 64 << 10
    nesting: int = 64
    """Nesting depth of a body's JSON."""
    prompt_tokens: int = 1 << 20
    """Tokens of one prompt that is given as token ids: the model's maximum length."""
    chars_per_token: int = 32
    """Characters of a request's text per token of ``prompt_tokens``: vLLM counts tokens only
    later."""
    messages: int = 4096
    """Messages of a chat, or items of a response's input."""
    tools: int = 256
    choices: int = 128
    """Answers of one request: ``n`` times the number of prompts."""
    logprobs: int = 20
    logprob_values: int = 1 << 20
    """Log probabilities of one request, for the tokens of all its answers and prompts."""
    vocabulary: int = 1 << 18
    """Log probabilities of one token if all are asked for: the model's vocabulary."""
    length_penalty: float = 10.0
    """Absolute value of beam search's length penalty."""
    stops: int = 16
    stop_chars: int = 1024
    words: int = 128
    """``bad_words``, each of at most ``stop_chars``."""
    token_ids: int = 2048
    """Entries of ``logit_bias`` and of lists of token ids."""
    identifier_chars: int = 256
    """Length of names in a request: ``user``, ``request_id``, ``cache_salt`` and the like."""
    template_values: int = 32
    """Entries of ``chat_template_kwargs``, each a scalar of at most ``stop_chars``."""
    grammar_bytes: int = 256 << 10
    """Size of a JSON schema, regular expression or grammar, or of all tools together."""
    grammar_nesting: int = 32
    grammar_cpu_seconds: int = 5
    """CPU time to compile a grammar."""
    grammars_waiting: int = 64
    """Grammars of one API key, or of all callers without one, that may wait to be compiled."""
    regex_chars: int = 4096
    """Length of a regular expression, and of every ``pattern`` of a schema."""
    prompt_logprobs: bool = True
    """Whether engines compute log probabilities of prompts (``has_prompt_logprobs``)."""
    images: bool = False
    """Whether the model takes images."""
    image_hosts: frozenset[str] = frozenset()
    """The hosts that the server asks for images."""

    @property
    def text_chars(self) -> int:
        """Characters of text that one request may bring for its prompts."""
        return self.prompt_tokens * self.chars_per_token


DEFAULTS = Bounds()
IMAGE_BYTES = 256 << 20
"""Bytes of all that the front end makes of the images of one request, for the encoder to read. It
travels to the controller and to an engine, and the controller keeps it until the request ends."""


class BoundsError(ValueError):
    """A body exceeds a bound, or asks for what is not served; the message says which.

    Attributes:
        param: the field.
    """

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message if param is None else f"{param}: {message}")
        self.param = param


_OPTIONS = (
    ("max_body_bytes", DEFAULTS.body_bytes, "bytes of a request's body"),
    ("max_choices", DEFAULTS.choices, "answers that one request may ask for"),
    ("max_logprob_values", DEFAULTS.logprob_values, "log probabilities of one request"),
    ("max_grammar_bytes", DEFAULTS.grammar_bytes, "bytes of a request's schemas and grammars"),
    ("max_grammar_seconds", DEFAULTS.grammar_cpu_seconds, "CPU seconds to compile a grammar"),
    ("max_waiting_grammars", DEFAULTS.grammars_waiting, "waiting grammars of one caller"),
    ("max_image_bytes", IMAGE_BYTES, "bytes of the features of a request's images"),
)
"""The bounds that have an option: those that operators may want to change."""


def add_bounds_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of bounds."""
    for name, default, text in _OPTIONS:
        add_number(group, flag_of(name), default, text)


def bounds_of(
    args: Namespace,
    max_model_len: int,
    vocabulary: int,
    *,
    images: bool = False,
    prompt_logprobs: bool = True,
) -> Bounds:
    """Return the bounds that the command line and the model set.

    Args:
        args: the parsed arguments.
        max_model_len: the most tokens of one request, prompt and answer together.
        vocabulary: how many tokens the model knows.
        images: whether it takes images.
        prompt_logprobs: whether engines compute log probabilities of prompts.
    """
    bodies_bytes = max(1, args.max_held_bytes // args.api_server_count)
    return Bounds(
        body_bytes=min(args.max_body_bytes, bodies_bytes),
        bodies_bytes=bodies_bytes,
        headers=args.h11_max_header_count,
        header_bytes=args.h11_max_incomplete_event_size,
        prompt_tokens=max_model_len,
        choices=args.max_choices,
        logprobs=_unlimited(args.max_logprobs),
        logprob_values=args.max_logprob_values,
        vocabulary=vocabulary,
        grammar_bytes=args.max_grammar_bytes,
        grammar_cpu_seconds=args.max_grammar_seconds,
        grammars_waiting=args.max_waiting_grammars,
        prompt_logprobs=prompt_logprobs,
        images=images,
        image_hosts=frozenset(map(str.lower, args.allowed_media_domains or ())),
    )


def check_bounds_options(args: Namespace) -> None:
    """Refuse bounds that would allow nothing.

    Raises:
        UserError: a bound is less than 1.
    """
    check_at_least(args, 1, *(name for name, _, _ in _OPTIONS))


ALL = 1 << 31
"""A number in place of vLLM's -1, which stands for all that there are."""


def _unlimited(count: int) -> int:
    return ALL if count < 0 else count
