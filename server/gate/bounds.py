"""What the body of a request may ask for: checked before the tokenizer or an engine sees any of it.

vLLM checks most of it too, but some of it late (after the prompt is tokenised) and some not at all.
What is refused here is refused whatever vLLM makes of it; what passes is vLLM's to judge.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import msgspec

from shoal.server.errors import UserError
from shoal.server.gate.json_keys import repeated_key


@dataclass(frozen=True)
class Bounds:
    """The largest of everything. Sizes of text are in characters unless they say bytes."""

    body_bytes: int = 16 << 20
    url_bytes: int = 8 << 10
    headers: int = 100
    header_bytes: int = 64 << 10
    nesting: int = 64
    """Depth of a body's JSON."""
    prompt_tokens: int = 1 << 20
    """Of one prompt given as token ids: the model's length."""
    chars_per_token: int = 32
    """Text of a request per token of ``prompt_tokens``: vLLM counts tokens after it made them."""
    messages: int = 4096
    """Of a chat, or items of a response's input."""
    tools: int = 256
    choices: int = 128
    """Answers of one request: ``n`` times the number of prompts."""
    logprobs: int = 20
    logprob_values: int = 1 << 20
    """Log probabilities of one request: of all its answers' tokens, and its prompts'."""
    vocabulary: int = 1 << 18
    """Log probabilities of one token if all are asked for: the model's vocabulary."""
    length_penalty: float = 10.0
    """Of beam search, whatever its sign."""
    stops: int = 16
    stop_chars: int = 1024
    words: int = 128
    """``bad_words``, each of at most ``stop_chars``."""
    token_ids: int = 2048
    """Entries of ``logit_bias`` and of lists of token ids."""
    identifier_chars: int = 256
    """Of names that a request gives: ``user``, ``request_id``, ``cache_salt`` and the like."""
    template_values: int = 32
    """Entries of ``chat_template_kwargs``, each a scalar of at most ``stop_chars``."""
    grammar_bytes: int = 256 << 10
    """Of a JSON schema, regular expression or grammar, or of all tools together."""
    grammar_nesting: int = 32
    grammar_cpu_seconds: int = 5
    """What a grammar may take to compile."""
    grammars_waiting: int = 64
    """Grammars of one API key, or of all callers without one, that may wait to be compiled."""
    regex_chars: int = 4096
    """Of a regular expression, and of every ``pattern`` of a schema."""

    @property
    def text_chars(self) -> int:
        """Text that one request may bring for the prompt."""
        return self.prompt_tokens * self.chars_per_token


DEFAULTS = Bounds()


class BoundsError(ValueError):
    """A body is beyond a bound, or has what is not served; the message names it.

    Attributes:
        param: the field.
    """

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message if param is None else f"{param}: {message}")
        self.param = param


def add_bounds_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of those bounds that operators may want to move."""
    for flag, value, what in (
        ("--max-body-bytes", DEFAULTS.body_bytes, "bytes of a request's body"),
        ("--max-choices", DEFAULTS.choices, "answers that one request may ask for"),
        ("--max-logprob-values", DEFAULTS.logprob_values, "log probabilities in its answers"),
        ("--max-grammar-bytes", DEFAULTS.grammar_bytes, "bytes of its schemas and grammars"),
        ("--max-grammar-seconds", DEFAULTS.grammar_cpu_seconds, "CPU seconds to compile one"),
        ("--max-waiting-grammars", DEFAULTS.grammars_waiting, "of one caller that wait for it"),
    ):
        group.add_argument(
            flag, type=int, default=value, metavar="N", help=f"{what} (default: %(default)s)"
        )


def bounds_of(args: Namespace, max_model_len: int, vocabulary: int) -> Bounds:
    """Return the bounds that the command line and the model set.

    Args:
        args: the parsed arguments.
        max_model_len: tokens that the model takes.
        vocabulary: tokens that it knows.
    """
    return Bounds(
        body_bytes=args.max_body_bytes,
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
    )


def check_bounds_options(args: Namespace) -> None:
    """Refuse bounds that leave nothing.

    Raises:
        UserError: one is less than 1.
    """
    for name in (
        *("max_body_bytes", "max_choices", "max_logprob_values"),
        *("max_grammar_bytes", "max_grammar_seconds", "max_waiting_grammars"),
    ):
        value = getattr(args, name)
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: it must be at least 1")


_ALL = 1 << 31
"""vLLM's -1, for as many as there are, as a number."""


def _unlimited(count: int) -> int:
    return _ALL if count < 0 else count


# --- what a body is checked for ---

Check = Callable[[str, Any, Bounds], None]

REFUSED_FIELDS: Mapping[str, str] = {
    "chat_template": "a template of the client's own is not taken",
    "prompt_embeds": "prompt embeddings are not supported",
    "mm_processor_kwargs": "multimodal input is not supported",
    "media_io_kwargs": "multimodal input is not supported",
    "kv_transfer_params": "transferring KV between servers is not supported",
    "ec_transfer_params": "transferring KV between servers is not supported",
    "vllm_xargs": "arguments for extensions of the engine are not taken",
}
"""Fields that reach code of vLLM's which was not made for strangers, and why they are refused."""

_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("chat_template", "tokenize", "conversation", "tools", "documents"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""What Transformers' ``apply_chat_template`` takes beside variables: no business of a client's."""

TEXT_PARTS = frozenset(
    {
        *("text", "input_text", "output_text", "reasoning_text", "summary_text"),
        *("refusal", "thinking", "tool_reference"),
    }
)
"""Types of the parts of a message that are text; nothing else is served, nor fetched from a URL."""
_MEDIA = (
    *("image_url", "input_image", "image_embeds", "image_pil"),
    *("audio_url", "input_audio", "audio_embeds"),
    *("video_url", "video_embeds", "prompt_embeds"),
    *("file", "input_file", "file_url", "file_data", "file_id"),
)
"""Keys of a part that stand for media whatever its type: vLLM looks for some of them."""
LOCAL_TOOLS = frozenset({"function", "custom", "namespace"})
"""Types of tools that the client runs itself; the others would have the server call out."""


def check_body(
    body: bytes, bounds: Bounds, others: Mapping[str, Check] | None = None
) -> dict[str, Any]:
    """Check the body of any route of the OpenAI API, and return what it says.

    Args:
        body: all of it.
        bounds: the largest of everything.
        others: for a body of another API, the checks of the fields that mean something else there.

    Raises:
        BoundsError: it is not a JSON object, beyond a bound, or has what is not served.
    """
    fields = decode_object(body, bounds.nesting)
    for name, reason in REFUSED_FIELDS.items():
        if fields.get(name) is not None:
            raise BoundsError(name, reason)
    for name, check in {**_CHECKS, **(others or {})}.items():
        value = fields.get(name)
        if value is not None:
            check(name, value, bounds)
    _check_integers(fields)
    if others is None:
        _check_named_tool(fields)
    _check_choices(fields, bounds)
    if len(body) > bounds.text_chars:  # a character of JSON has at least a byte
        _check_text(fields, bounds)
    return fields


def decode_object(body: bytes, nesting: int) -> dict[str, Any]:
    """Return a JSON object; UTF-8, without NaN, infinity or numbers beyond a float's range.

    Raises:
        BoundsError: it is something else, nested more deeply than ``nesting``, or has an object
            that names a key twice: of its values one would count, and nobody knows which.
    """
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise BoundsError(None, f"the body is nested more than {nesting} deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BoundsError(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BoundsError(None, "the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > nesting and _is_deeper(fields, nesting):
        raise BoundsError(None, f"the body is nested more than {nesting} deep")
    repeated = repeated_key(body, fields)
    if repeated is not None:
        raise BoundsError(repeated[:40], "an object of the body has this key twice")
    return fields


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects nest more than ``levels`` deep, without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [child for node in layer for child in _children(node, dict, list)]
        if not layer:
            return False
    return True


def _children(node: dict[str, Any] | list[Any], *kinds: type) -> Iterator[Any]:
    """Yield the entries of a JSON list, or the values of an object, that are of these types.

    A prompt of token ids has as many entries as tokens, none of them of these types: to see that
    takes half the time of choosing among them, and no step of Python for each.
    """
    values, wanted = node.values() if isinstance(node, dict) else node, frozenset(kinds)
    if wanted.isdisjoint(map(type, values)):
        return iter(())
    return compress(values, map(wanted.__contains__, map(type, values)))


def _at_most(param: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise BoundsError(param, f"{count} {what}, at most {limit} are allowed")


def _strings(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value; keys of objects too."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            yield from node
        if isinstance(node, dict | list):
            pending += _children(node, str, dict, list)


# --- one check per field ---


def _integer(limit: str) -> Check:
    """Bound a number; one of another type is vLLM's to refuse."""

    def check(param: str, value: Any, bounds: Bounds) -> None:
        most = getattr(bounds, limit)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            raise BoundsError(param, f"{value} is more than {most}, the most that is allowed")

    return check


def _logprobs(param: str, value: Any, bounds: Bounds) -> None:
    """Bound a number of which -1 stands for all tokens of the vocabulary."""
    if isinstance(value, int) and value < 0 <= bounds.logprobs < _ALL:
        raise BoundsError(param, f"{value} is not allowed: at most {bounds.logprobs} are")
    _integer("logprobs")(param, value, bounds)


def _entries(limit: str, what: str) -> Check:
    """Bound the number of a list's or an object's entries."""

    def check(param: str, value: Any, bounds: Bounds) -> None:
        if isinstance(value, list | dict):
            _at_most(param, len(value), getattr(bounds, limit), what)

    return check


def _texts(limit: str, what: str) -> Check:
    """Bound the number of texts, one or a list, and the length of each."""

    def check(param: str, value: Any, bounds: Bounds) -> None:
        texts = value if isinstance(value, list) else [value]
        _at_most(param, len(texts), getattr(bounds, limit), what)
        for text in texts:
            if isinstance(text, str):
                _at_most(param, len(text), bounds.stop_chars, "characters")

    return check


def _exponent(param: str, value: Any, bounds: Bounds) -> None:
    """Bound a power of the number of tokens: vLLM divides by it."""
    if isinstance(value, int | float) and abs(value) > bounds.length_penalty:
        most = f"from {-bounds.length_penalty:g} to {bounds.length_penalty:g}"
        raise BoundsError(param, f"it must be {most}")


def _identifier(param: str, value: Any, bounds: Bounds) -> None:
    if isinstance(value, str):
        _at_most(param, len(value), bounds.identifier_chars, "characters")


def _template_values(param: str, value: Any, bounds: Bounds) -> None:
    if not isinstance(value, dict):
        raise BoundsError(param, "it must be an object")
    _at_most(param, len(value), bounds.template_values, "entries")
    for name, entry in value.items():
        if name in _TEMPLATE_ARGUMENTS:
            raise BoundsError(param, f"{name} is not taken: it is no variable of a template")
        if isinstance(entry, dict | list):
            raise BoundsError(param, f"{name[:40]!r} must be a scalar")
        if len(name) > bounds.identifier_chars or len(str(entry)) > bounds.stop_chars:
            raise BoundsError(param, f"at most {bounds.stop_chars} characters are allowed")


def _messages(param: str, value: Any, bounds: Bounds) -> None:
    if not isinstance(value, list):
        return
    _at_most(param, len(value), bounds.messages, "entries")
    for message in value:
        if isinstance(message, list):  # a conversation of a batch
            _messages(param, message, bounds)
        if isinstance(message, dict):
            _check_parts(param, [message])
            for name in ("content", "output"):
                parts = message.get(name)
                if isinstance(parts, dict | list):
                    _check_parts(param, parts if isinstance(parts, list) else [parts], typed=True)


def _input(param: str, value: Any, bounds: Bounds) -> None:
    """Check the input of a response, for items too that vLLM takes and then fails at."""
    _messages(param, value, bounds)
    for item in value if isinstance(value, list) else ():
        if not isinstance(item, dict):
            continue
        answer = item.get("content") if item.get("role") == "assistant" else None
        if isinstance(answer, list) and not (answer and _is_text(answer[0])):
            raise BoundsError(param, "the content of an earlier answer must begin with text")
        if "created_by" in item and isinstance(item.get("output"), list):
            raise BoundsError(param, "an output in parts cannot have created_by")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _check_parts(param: str, parts: Sequence[Any], *, typed: bool = False) -> None:
    for part in parts:
        if not isinstance(part, dict):
            continue
        kinds = [key for key in _MEDIA if part.get(key) is not None]
        kind = part.get("type", "text")
        if typed and not (isinstance(kind, str) and kind in TEXT_PARTS):
            kinds.insert(0, str(kind))
        if kinds:
            raise BoundsError(param, f"{kinds[0][:40]} is not supported: the model takes text")


def check_tools(param: str, value: Any, bounds: Bounds) -> None:
    """Bound tools together, and refuse those that the server would have to call."""
    if not isinstance(value, list):
        return
    _at_most(param, len(value), bounds.tools, "tools")
    for tool in value:
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if not (isinstance(kind, str) and kind in LOCAL_TOOLS):
            raise BoundsError(param, f"tools of type {str(kind)[:40]} are not supported")
    _grammar(param, value, bounds)


def _grammar(param: str, value: Any, bounds: Bounds) -> None:
    """Bound a schema, or what holds one: its size, its nesting and its regular expressions."""
    _at_most(param, len(msgspec.json.encode(value)), bounds.grammar_bytes, "bytes")
    if _is_deeper([value], bounds.grammar_nesting + 1):
        raise BoundsError(param, f"it is nested more than {bounds.grammar_nesting} deep")
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pattern = node.get("pattern")
            if isinstance(pattern, str):
                _at_most(param, len(pattern), bounds.regex_chars, "characters of a pattern")
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _structured_outputs(param: str, value: Any, bounds: Bounds) -> None:
    if not isinstance(value, dict):  # vLLM fails at others
        raise BoundsError(param, "it must be an object")
    _grammar(param, value, bounds)
    regex = value.get("regex")
    if isinstance(regex, str):
        _at_most(f"{param}.regex", len(regex), bounds.regex_chars, "characters")
    for name in ("json", "structural_tag"):
        if isinstance(value.get(name), str):  # JSON in a string
            inner = f"{param}.{name}"
            _grammar(inner, _decoded(inner, value[name], bounds), bounds)


def _decoded(param: str, text: str, bounds: Bounds) -> dict[str, Any]:
    try:
        return decode_object(text.encode(), bounds.nesting)
    except BoundsError as error:
        raise BoundsError(param, str(error).replace("the body", "it")) from None


_CHECKS: Mapping[str, Check] = {
    "messages": _messages,
    "input": _input,
    "previous_input_messages": _messages,
    "tools": check_tools,
    "response_format": _grammar,
    "structured_outputs": _structured_outputs,
    "text": _grammar,
    "output_config": _grammar,
    "tool_choice": _grammar,
    "n": _integer("choices"),
    "best_of": _integer("choices"),
    "logprobs": _logprobs,
    "length_penalty": _exponent,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "stop": _texts("stops", "stop strings"),
    "stop_sequences": _texts("stops", "stop strings"),
    "bad_words": _texts("words", "words"),
    "logit_bias": _entries("token_ids", "entries"),
    "stop_token_ids": _entries("token_ids", "token ids"),
    "allowed_token_ids": _entries("token_ids", "token ids"),
    "logprob_token_ids": _entries("token_ids", "token ids"),
    "documents": _entries("messages", "documents"),
    "chat_template_kwargs": _template_values,
    "metadata": _entries("template_values", "entries"),
    **dict.fromkeys(
        ("model", "user", "request_id", "session_id", "cache_salt", "prompt_cache_key"), _identifier
    ),
    "previous_response_id": _identifier,
    "tokens": _entries("prompt_tokens", "token ids"),
}


# --- what several fields make together ---


def _check_integers(fields: Mapping[str, Any]) -> None:
    """Refuse integers that no message holds; lists of tokens are compared to the vocabulary."""
    for name, value in fields.items():
        for number in value.values() if isinstance(value, dict) else (value,):
            if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
                raise BoundsError(name, "an integer has more than 64 bits")


def _check_named_tool(fields: Mapping[str, Any]) -> None:
    """Refuse tools of a chat in which vLLM would look for the chosen one, and fail."""
    if not isinstance(fields.get("tool_choice"), dict) or "messages" not in fields:
        return
    tools = fields.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise BoundsError("tools", "every tool needs a function with a name")


def _check_choices(fields: Mapping[str, Any], bounds: Bounds) -> None:
    """Bound the answers, and the tokens of prompts that are token ids."""
    if _conversations(fields) and fields.get("stream"):
        raise BoundsError("stream", "the answers to a batch are not streamed")
    prompts = _prompts(fields)
    for ids in prompts:
        if isinstance(ids, list):
            _at_most("prompt", len(ids), bounds.prompt_tokens, "tokens")
    answers = answers_of(fields)
    if answers > bounds.choices:
        most = f"at most {bounds.choices} are allowed"
        lists = "messages" if _conversations(fields) else "prompt" if len(prompts) > 1 else "n"
        raise BoundsError(lists, f"{answers} answers, {most}")


def answers_of(fields: Mapping[str, Any]) -> int:
    """Return the answers that a body asks for: ``n`` times the number of prompts, or of chats."""
    n = fields.get("n")
    several = len(_prompts(fields) or _conversations(fields))
    return max(1, several) * (n if isinstance(n, int) else 1)


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    """Return the prompts that are in a list; none where there is no list of them."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return []
    return [prompt] if isinstance(prompt[0], int) else prompt


def _conversations(fields: Mapping[str, Any]) -> list[Any]:
    """Return the chats of a batch (``/v1/chat/completions/batch``); none of another request."""
    messages = fields.get("messages")
    return [m for m in messages if isinstance(m, list)] if isinstance(messages, list) else []


_TEXTS = (
    *("prompt", "messages", "system", "input", "instructions"),
    *("documents", "tools", "suffix"),
)


def _check_text(fields: Mapping[str, Any], bounds: Bounds) -> None:
    """Bound the text that is to become tokens; lists of prompts count as one."""
    for name in _TEXTS:
        value = fields.get(name)
        if value is not None:
            length = sum(map(len, _strings(value)))
            _at_most(name, length, bounds.text_chars, "characters")
