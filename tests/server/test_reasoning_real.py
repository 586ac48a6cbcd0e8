"""A model that thinks before it answers, on two real engines on CPUs.

The demo model with one more token, ``</think>``, which it predicts where it would end its turn.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from shoal.server.options.serve_options import DEMO_CHECKPOINT
from tests.server.node import ServedNode, served_node

MARKS = ("<think>", "</think>")
ANSWERS = ["yes", "no"]
NOT_THE_END = {"2": -100}
"""Keeps the model from its own end of a turn, so that the end of thinking comes in its place."""
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
THOUGHT = "The capital of France is Paris."


def thinking_model(path: Path) -> Path:
    """Write the checkpoint; the marks take the places of the rarest tokens."""
    shutil.copytree(DEMO_CHECKPOINT, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    places = range(len(vocabulary) - len(MARKS), len(vocabulary))
    lost = [token for token, place in vocabulary.items() if place in places]
    for token, mark, place in zip(lost, MARKS, places, strict=True):
        del vocabulary[token]
        vocabulary[mark] = place
        like = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append({**like, "id": place, "content": mark, "special": False})
    tokenizer["model"]["merges"] = [
        merge for merge in tokenizer["model"]["merges"] if _merged(merge) not in lost
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(path / "model.safetensors")
    end = tokenizer["added_tokens"][2]["id"]
    for name in weights:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weights[name][places[-1]] = weights[name][end]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _merged(merge: Any) -> str:
    return "".join(merge) if isinstance(merge, list) else merge.replace(" ", "")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    model = thinking_model(tmp_path_factory.mktemp("model") / "thinking")
    with served_node(
        tmp_path_factory.mktemp("cache"),
        *(str(model), "--served-model-name", "thinking", "--reasoning-parser", "qwen3"),
        *("--engines", "2", "--dtype", "float32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        # So small a model would fill a JSON text with white space.
        *("--structured-outputs-config", json.dumps(COMPACT)),
        real=True,
    ) as served:
        yield served


@pytest.fixture(params=[[[0], [1]], [[0, 1]]], ids=["dp", "tp2"])
def http(node: ServedNode, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with node.client() as client:
        switched = client.post("/admin/layout", json={"units": request.param})
        assert switched.status_code == 200, switched.text
        yield client


def chat(http: httpx.Client, **terms: Any) -> dict[str, Any]:
    body = {
        "model": "thinking",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 64,
        "logit_bias": NOT_THE_END,
        **terms,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_a_choice_holds_from_the_end_of_thinking_on(http: httpx.Client) -> None:
    answer = chat(http, structured_outputs={"choice": ANSWERS})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == THOUGHT
    assert message["content"] in ANSWERS
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_schema_holds_from_the_end_of_thinking_on(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ANSWERS}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    message = chat(http, response_format=form)["choices"][0]["message"]
    assert message["reasoning"] == THOUGHT
    assert json.loads(message["content"])["a"] in ANSWERS
