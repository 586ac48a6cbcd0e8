"""Checks what the body of a request asks for, before the tokenizer or an engine sees any of it.

vLLM checks most of it too, but some late (after the prompt is tokenised) and some not at all. Some
requests that vLLM would accept are refused here. What passes these checks is left to vLLM's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.server.gate.bounds import ALL, Bounds, BoundsError
from shoal.server.gate.image_parts import IMAGE_PART, check_image, image_chars
from shoal.server.gate.json_objects import decode_object, is_deeper, strings

Check = Callable[[str, Any, Bounds], None]

REFUSED_FIELDS: Mapping[str, str] = {
    "chat_template": "a template of the client's own is not taken",
    "prompt_embeds": "prompt embeddings are not supported",
    "mm_processor_kwargs": "the operator chooses how images are read",
    "media_io_kwargs": "the operator chooses how images are read",
    "kv_transfer_params": "transferring KV between servers is not supported",
    "ec_transfer_params": "transferring KV between servers is not supported",
    "vllm_xargs": "arguments for extensions of the engine are not taken",
}
"""Fields that reach code of vLLM's that is not safe for untrusted input, and why each is
refused."""

_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("chat_template", "tokenize", "conversation", "tools", "documents"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""Arguments of Transformers' ``apply_chat_template`` other than variables: clients may not set
them."""

TEXT_PARTS = frozenset(
    {
        *("text", "input_text", "output_text", "reasoning_text", "summary_text"),
        *("refusal", "thinking", "tool_reference"),
    }
)
"""Types of a message's parts that are text. Beside these, only images are served, in chats."""
_MEDIA = (
    *("image_url", "input_image", "image_embeds", "image_pil"),
    *("audio_url", "input_audio", "audio_embeds"),
    *("video_url", "video_embeds", "prompt_embeds"),
    *("file", "input_file", "file_url", "file_data", "file_id"),
)
"""Keys that make a part a medium whatever its type says: vLLM looks for some of them."""
LOCAL_TOOLS = frozenset({"function", "custom", "namespace"})
"""Types of tools that the client runs itself; for other types the server would have to call out."""


def check_body(
    body: bytes, bounds: Bounds, others: Mapping[str, Check] | None = None
) -> dict[str, Any]:
    """Check the body of any route of the OpenAI API, and return its content.

    Args:
        body: the whole body.
        bounds: the largest of everything.
        others: for a body of another API, checks of the fields that have another meaning there.

    Raises:
        BoundsError: the body is not a JSON object, exceeds a bound, or asks for what is not served.
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
    _check_lists(fields)
    if others is None:
        _check_named_tool(fields)
    _check_choices(fields, bounds)
    if len(body) > bounds.text_chars:  # a character of JSON has at least a byte
        _check_text(fields, bounds)
    return fields


def _at_most(param: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise BoundsError(param, f"{count} {what}, at most {limit} are allowed")


# --- one check per field ---


def _integer(limit: str) -> Check:
    """Bound an integer, and refuse what vLLM would read as one; it refuses all other types."""

    def check(param: str, value: Any, bounds: Bounds) -> None:
        most = getattr(bounds, limit)
        if isinstance(value, str | float):
            raise BoundsError(param, "it must be an integer")
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            raise BoundsError(param, f"{value} is more than {most}, the most that is allowed")

    return check


def _logprobs(param: str, value: Any, bounds: Bounds) -> None:
    """Bound a number for which -1 stands for all tokens of the vocabulary."""
    if isinstance(value, int) and value < 0 <= bounds.logprobs < ALL:
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
    """Bound an exponent: vLLM divides by that power of the number of tokens."""
    if isinstance(value, str):  # vLLM would read it as a number
        raise BoundsError(param, "it must be a number")
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


def _chat(param: str, value: Any, bounds: Bounds) -> None:
    """Check the messages of a chat: the content of each may have images, if the model takes any."""
    _messages(param, value, bounds, images=bounds.images)


def _messages(param: str, value: Any, bounds: Bounds, *, images: bool = False) -> None:
    if not isinstance(value, list):
        return
    _at_most(param, len(value), bounds.messages, "entries")
    for message in value:
        if isinstance(message, list):  # a conversation of a batch
            _messages(param, message, bounds, images=images)
        if isinstance(message, dict):
            _check_parts(param, [message])
            if not isinstance(message.get("tool_calls"), list | None):
                raise BoundsError(param, "tool_calls must be a list")
            for name in ("content", "output"):
                parts = message.get(name)
                if images and name == "content" and isinstance(parts, list):
                    parts = _without_images(param, parts, bounds)
                if isinstance(parts, dict | list):
                    _check_parts(param, parts if isinstance(parts, list) else [parts], typed=True)


def _without_images(param: str, parts: Sequence[Any], bounds: Bounds) -> list[Any]:
    """Check the images among the parts of a message, and return the others."""
    others = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == IMAGE_PART:
            check_image(param, part, bounds)
        else:
            others.append(part)
    return others


def _input(param: str, value: Any, bounds: Bounds) -> None:
    """Check the input of a response, also for items that vLLM accepts and then fails at."""
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
    if is_deeper([value], bounds.grammar_nesting + 1):
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
    "messages": _chat,
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
    """Refuse integers too large for a message; vLLM compares lists of tokens to the vocabulary."""
    for name, value in fields.items():
        for number in value.values() if isinstance(value, dict) else (value,):
            if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
                raise BoundsError(name, "an integer has more than 64 bits")


def _check_lists(fields: Mapping[str, Any]) -> None:
    """Refuse what vLLM would walk through before it looks at its type."""
    for name, or_null in (("messages", False), ("tools", True)):
        value = fields.get(name, [])
        if not (isinstance(value, list) or (or_null and value is None)):
            raise BoundsError(name, "it must be a list")


def _check_named_tool(fields: Mapping[str, Any]) -> None:
    """Refuse a chat whose tools vLLM would search for the chosen one, and fail."""
    if not isinstance(fields.get("tool_choice"), dict) or "messages" not in fields:
        return
    tools = fields.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise BoundsError("tools", "every tool needs a function with a name")


def _check_choices(fields: Mapping[str, Any], bounds: Bounds) -> None:
    """Bound the number of answers, and the tokens of prompts that are token ids."""
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
    """Return how many answers a body asks for: ``n`` times the number of prompts or chats."""
    n = fields.get("n")
    several = len(_prompts(fields) or _conversations(fields))
    return max(1, several) * (n if isinstance(n, int) else 1)


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a list of prompts or of token ids; none if there is no list."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return []
    return [prompt] if isinstance(prompt[0], int) else prompt


def _conversations(fields: Mapping[str, Any]) -> list[Any]:
    """Return the chats of a batch (``/v1/chat/completions/batch``); none for other requests."""
    messages = fields.get("messages")
    return [m for m in messages if isinstance(m, list)] if isinstance(messages, list) else []


_TEXTS = (
    *("prompt", "messages", "system", "input", "instructions"),
    *("documents", "tools", "suffix"),
)


def _check_text(fields: Mapping[str, Any], bounds: Bounds) -> None:
    """Bound the text that becomes tokens; a list of prompts counts as one text."""
    for name in _TEXTS:
        value = fields.get(name)
        if value is not None:
            length = sum(map(len, strings(value)))
            if name == "messages" and bounds.images:
                length -= image_chars(value)
            _at_most(name, length, bounds.text_chars, "characters")
