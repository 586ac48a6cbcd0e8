"""Speculative decoding by n-grams over HTTP, with the demo model on two real engines on CPUs."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.node import ServedNode, served_node

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
TOKENS = 48
LAYOUTS = {"dp": [[0], [1]], "tp2": [[0, 1]]}
QUESTION = "What is the capital of France?"
"""After its answer the model goes on with questions and answers of its own, which say some words
twice."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with served_node(
        tmp_path_factory.mktemp("cache"),
        *("--speculative-config", json.dumps(NGRAMS), "--dtype", "float32"),
        *("--structured-outputs-config", json.dumps(COMPACT)),
        real=True,
    ) as served:
        yield served


@pytest.fixture(params=LAYOUTS)
def http(node: ServedNode, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with node.client() as client:
        switched = client.post("/admin/layout", json={"units": LAYOUTS[request.param]})
        assert switched.status_code == 200, switched.text
        yield client


def ask(http: httpx.Client, **terms: Any) -> dict[str, Any]:
    body = {
        "model": "shoal-demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": TOKENS,
        **terms,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def drafts(http: httpx.Client) -> Counter[str]:
    """Return vLLM's counts of drafts, over all engines."""
    found = Counter[str]()
    for family in text_string_to_metric_families(http.get("/metrics").text):
        if family.name.startswith("vllm:spec_decode_num_"):
            for sample in family.samples:
                if sample.name.endswith("_total") and "position" not in sample.labels:
                    found[sample.name] += int(sample.value)
    return found


def test_accepted_drafts_are_counted(http: httpx.Client) -> None:
    before = drafts(http)
    assert ask(http, ignore_eos=True)["usage"]["completion_tokens"] == TOKENS
    made = drafts(http) - before
    proposed = made["vllm:spec_decode_num_draft_tokens_total"]
    assert proposed >= made["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert made["vllm:spec_decode_num_drafts_total"] > 0


def test_an_answer_follows_its_schema(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    message = ask(http, response_format=form)["choices"][0]["message"]
    assert json.loads(message["content"])["a"] in ("yes", "no")


def test_what_vllm_cannot_sample_with_drafts_is_refused(http: httpx.Client) -> None:
    body = {"model": "shoal-demo", "prompt": "a", "min_p": 0.5}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "not yet supported with speculative decoding" in answer.json()["error"]["message"]
