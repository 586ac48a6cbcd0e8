"""Large answers of a server with fake engines: whole, and sent in pieces."""

from collections.abc import Iterator
from typing import Any

import pytest

from shoal.server.gate.logprob_answers import LARGE_VALUES
from tests.server.node import ServedNode, served_node

TOP = 20
MANY = LARGE_VALUES // TOP + 1
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": TOP}
RESPONSE = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": TOP}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with served_node(tmp_path_factory.mktemp("cache"), "--engines", "2") as node:
        yield node


def of_a_chat(answer: Any) -> list[Any]:
    return [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]]


def of_a_completion(answer: Any) -> list[Any]:
    values: list[Any] = answer["choices"][0]["logprobs"]["top_logprobs"]
    return values


def of_a_response(answer: Any) -> list[Any]:
    (text,) = (part for item in answer["output"] for part in item["content"])
    return [entry["top_logprobs"] for entry in text["logprobs"]]


@pytest.mark.parametrize(("tokens", "whole"), [(3, True), (MANY, False)])
@pytest.mark.parametrize(
    ("path", "body", "length", "found"),
    [
        ("/v1/chat/completions", CHAT, "max_completion_tokens", of_a_chat),
        ("/v1/completions", {"prompt": "hi", "logprobs": TOP}, "max_tokens", of_a_completion),
        ("/v1/responses", RESPONSE, "max_output_tokens", of_a_response),
    ],
)
def test_every_token_has_its_log_probabilities(
    node: ServedNode, path: str, body: Any, length: str, found: Any, tokens: int, whole: bool
) -> None:
    with node.client() as http:
        response = http.post(path, json={**body, length: tokens, "temperature": 0})
    assert response.status_code == 200, response.text
    values = found(response.json())
    assert len(values) == tokens
    assert all(values)
    assert ("content-length" in response.headers) == whole
