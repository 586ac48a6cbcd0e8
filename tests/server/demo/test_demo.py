"""The demo checkpoint: small enough to ship, and worth talking to."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.server.demo.training import corpus
from shoal.server.demo.training.chat import CHAT_TEMPLATE, SPECIAL_TOKENS, Message, prompt
from shoal.server.demo.training.checkpoint import SHAPE, WEIGHTS, write_configuration
from shoal.server.options.serve_options import DEMO_CHECKPOINT

MAX_PARAMETERS = 12_000_000
MAX_BYTES = 25_000_000

ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is 3 plus 4?": "7",
    "What is tensor parallelism?": "GPUs",
    "Who was Napoleon?": "know",
    "What is your name?": "tiny",
}
"""Questions, and a word of any good answer."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype="float32")


def continued(model: Any, tokenizer: Any, text: str, tokens: int = 120) -> str:
    """Return the most likely continuation of a text."""
    ids = tokenizer(text, return_tensors="pt")
    output = model.generate(
        **ids, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None
    )
    return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def answer(model: Any, tokenizer: Any, question: str, tokens: int = 120) -> str:
    """Return the most likely answer."""
    return continued(model, tokenizer, prompt([Message("user", question)]), tokens)


@cache
def words_of_the_corpus() -> frozenset[str]:
    return frozenset(word for text in corpus.documents(seed=1, count=5000) for word in words(text))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_it_is_small(model: Any) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS
    assert sum(file.stat().st_size for file in DEMO_CHECKPOINT.iterdir()) <= MAX_BYTES


def test_its_weights_are_all_there_and_in_bf16() -> None:
    _, report = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with safe_open(DEMO_CHECKPOINT / WEIGHTS, "np") as weights:
        types = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert types == {"BF16"}


def test_its_files_are_those_the_training_code_writes(tmp_path: Path, tokenizer: Any) -> None:
    write_configuration(tmp_path, SHAPE, tokenizer.backend_tokenizer)
    for file in tmp_path.iterdir():
        if file.name != "tokenizer.json":
            assert file.read_text() == (DEMO_CHECKPOINT / file.name).read_text(), file.name
    names = {file.name for file in DEMO_CHECKPOINT.iterdir()}
    assert names == {WEIGHTS} | {file.name for file in tmp_path.iterdir()}


def test_tokenizer_gives_text_back(tokenizer: Any) -> None:
    assert len(tokenizer) == SHAPE.vocab_size
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    for text in ("Hello", "def main():\n    return 12.5", "Grüße, 世界 \U0001f41f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_is_the_one_it_was_trained_with(tokenizer: Any) -> None:
    assert tokenizer.chat_template.strip() == CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == prompt([Message("user", "Hi")])


@pytest.mark.parametrize("question", ANSWERS)
def test_it_knows_the_answer(model: Any, tokenizer: Any, question: str) -> None:
    assert ANSWERS[question] in answer(model, tokenizer, question)


def test_it_answers_in_english(model: Any, tokenizer: Any) -> None:
    for question in ("Hello!", "Tell me about the sea.", "Why does it rain?", "I am sad."):
        said = answer(model, tokenizer, question)
        assert len(words(said)) > 5, said
        assert set(words(said)) <= words_of_the_corpus(), said
        assert said.rstrip().endswith((".", "!", "?")), said


def test_the_english_check_sees_a_model_that_babbles(tokenizer: Any) -> None:
    babble = tokenizer.decode(list(range(1000, 1100)))
    assert not set(words(babble)) <= words_of_the_corpus()


def test_a_story_is_about_what_was_asked_for(model: Any, tokenizer: Any) -> None:
    said = answer(model, tokenizer, "Tell me a story about a fox named Zuri.", tokens=500)
    assert "fox" in said
    assert said.count("Zuri") > 2
    assert len(words(said)) > 100


def test_it_remembers_a_name(model: Any, tokenizer: Any) -> None:
    talk = (
        Message("user", "My name is Bekal."),
        Message("assistant", "Nice to meet you, Bekal!"),
        Message("user", "What is my name?"),
    )
    assert "Bekal" in continued(model, tokenizer, prompt(talk))


def test_it_calls_the_tool_that_fits(model: Any, tokenizer: Any) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the weather of a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    said = continued(model, tokenizer, text)
    call = json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call == {"name": "get_weather", "arguments": {"city": "Oslo"}}
