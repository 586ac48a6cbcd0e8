"""Conversations, and how they become text: the same format in training and in the chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

END_OF_TEXT, START, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens, in the order of their ids from 0: one ends a document, two frame a message."""

CHAT_TEMPLATE = (
    "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{% if system is not none or tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{{ system if system is not none else '' }}"
    "{{ '\\n' if system is not none and tools else '' }}"
    "{% if tools %}Tools:"
    "{% for tool in tools %}"
    "{% set names = (tool.function.parameters or {}).properties or {} %}"
    "{{ '\\n- ' + tool.function.name + '(' + names | join(', ') + '): ' }}"
    "{{ tool.function.description or '' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role != 'system' or not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)
"""Jinja template of the tokenizer. Tool calls are in Hermes format, as vLLM's parser reads them."""


@dataclass(frozen=True)
class Tool:
    """A function the model may call, with the names of its parameters."""

    name: str
    parameters: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class Message:
    """One turn; ``role`` is ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages, and what stands before them in the system message."""

    messages: tuple[Message, ...]
    system: str | None = None
    tools: tuple[Tool, ...] = ()


def exchange(user: str, assistant: str) -> tuple[Message, Message]:
    """Return a question and its answer."""
    return Message("user", user), Message("assistant", assistant)


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in Hermes format, as an assistant writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def render(conversation: Conversation) -> str:
    """Return the text of a conversation as ``CHAT_TEMPLATE`` makes it."""
    parts = []
    header = [] if conversation.system is None else [conversation.system]
    if conversation.tools:
        header.append("\n".join(["Tools:", *map(_signature, conversation.tools)]))
    if header:
        parts.append(_framed("system", "\n".join(header)))
    parts += [_framed(message.role, message.content) for message in conversation.messages]
    return "".join(parts)


def prompt(messages: Sequence[Message]) -> str:
    """Return the text after which the assistant's next message begins."""
    return f"{render(Conversation(tuple(messages)))}{START}assistant\n"


def _framed(role: str, content: str) -> str:
    return f"{START}{role}\n{content}{END}\n"


def _signature(tool: Tool) -> str:
    return f"- {tool.name}({', '.join(tool.parameters)}): {tool.description}"
