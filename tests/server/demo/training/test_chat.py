"""The chat template that serves is the format that trained."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shoal.server.demo.training import chat, corpus
from shoal.server.demo.training.chat import Conversation, Message, Tool, exchange
from shoal.server.demo.training.checkpoint import SHAPE, write_configuration
from shoal.server.demo.training.prepare import train_tokenizer
from shoal.server.demo.training.tool_calls import with_tools


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    trained: Tokenizer = train_tokenizer(corpus.documents(1, 50), 400)
    write_configuration(path, SHAPE, trained)
    return AutoTokenizer.from_pretrained(path)


def as_openai(conversation: Conversation) -> dict[str, Any]:
    """Return the arguments of ``apply_chat_template`` for a conversation."""
    system = (
        [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    )
    return {
        "conversation": [*system, *map(_message, conversation.messages)],
        "tools": [_tool(tool) for tool in conversation.tools] or None,
    }


def _message(message: Message) -> dict[str, Any]:
    if not message.content.startswith("<tool_call>"):
        return {"role": message.role, "content": message.content}
    call = json.loads(message.content.splitlines()[1])
    return {"role": message.role, "content": None, "tool_calls": [{"function": call}]}


def _tool(tool: Tool) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in tool.parameters}
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": {"type": "object", "properties": properties},
        },
    }


def test_template_and_training_text_are_the_same(tokenizer: Any) -> None:
    draw = random.Random(5)
    conversations = [with_tools(draw) for _ in range(100)]
    conversations += [corpus.conversation(draw) for _ in range(100)]
    assert any(conversation.system and conversation.tools for conversation in conversations)
    for conversation in conversations:
        text = tokenizer.apply_chat_template(**as_openai(conversation), tokenize=False)
        assert text == chat.render(conversation)


def test_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    messages = (*exchange("Hi", "Hello!"), Message("user", "Bye"))
    text = tokenizer.apply_chat_template(
        **as_openai(Conversation(messages)), tokenize=False, add_generation_prompt=True
    )
    assert text == chat.prompt(messages)
    assert text.endswith("<|im_start|>assistant\n")


def test_a_tool_without_parameters_or_description_is_shown(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Go"}],
        tools=[{"type": "function", "function": {"name": "look_up"}}],
        tokenize=False,
    )
    assert "- look_up(): " in text
