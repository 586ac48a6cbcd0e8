from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shoal.server.gate.bounds import DEFAULTS, BoundsError
from shoal.server.gate.logprob_bounds import OPEN_TOKENS, LogprobBudget, check_logprobs
from tests.server.node import served_node

SMALL = replace(DEFAULTS, logprob_values=1000, prompt_tokens=500, vocabulary=300)
CHAT = {"messages": [{"role": "user", "content": "x"}]}
INCLUDE = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "n": 5, "max_tokens": 50, "logprobs": 3},
        {"prompt": "x", "n": 128, "max_tokens": 500},
        {"prompt": ["x"] * 10, "max_tokens": 50, "logprobs": 1},
        {"prompt": "x", "n": 128, "max_tokens": 1, "logprobs": 0},
        {"prompt": "x", "n": 2, "logprobs": 20},  # 16 tokens each
        {"prompt": "x", "n": 3, "max_tokens": None, "logprobs": 20},  # open
        {"prompt": [1] * 100, "prompt_logprobs": 9, "max_tokens": 500},
        {"prompt": "x" * 9999, "prompt_logprobs": 20},  # of unknown length
        {**CHAT, "n": 5, "max_tokens": 50, "logprobs": True, "top_logprobs": 3},
        {**CHAT, "n": 128, "logprobs": True, "top_logprobs": 20},  # open
        {**CHAT, "n": 128, "max_tokens": 500, "top_logprobs": 20},  # without logprobs
        {"messages": [[1], [2]], "max_tokens": 250, "logprobs": True},
        {"input": "x", "max_output_tokens": 50, "top_logprobs": 19, **INCLUDE},
        {"input": "x", "max_output_tokens": 500, "top_logprobs": 19},  # not included
        {"prompt": "x", "n": "two", "logprobs": [], "max_tokens": "x", "prompt_logprobs": "x"},
        {"messages": "x", "logprobs": True, "include": 3, "logprob_token_ids": 3, "n": None},
    ],
)
def test_what_is_within_the_product_passes(fields: dict[str, Any]) -> None:
    check_logprobs(fields, SMALL)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "prompt_logprobs": 0},
        {**CHAT, "prompt_logprobs": 3},
        {"prompt": "x", "echo": True, "logprobs": 0},
    ],
)
def test_those_of_prompts_are_refused_where_engines_compute_none(fields: dict[str, Any]) -> None:
    check_logprobs(fields, SMALL)
    with pytest.raises(BoundsError, match="prompt_logprobs: engines on CPUs compute no"):
        check_logprobs(fields, replace(SMALL, prompt_logprobs=False))
    check_logprobs({"prompt": "x", "logprobs": 3}, replace(SMALL, prompt_logprobs=False))


@pytest.mark.parametrize(
    ("fields", "factors"),
    [
        (
            {"prompt": "x", "n": 5, "max_tokens": 51, "logprobs": 3},
            "5 answers x 51 tokens x 4 values = 1020",
        ),
        (
            {"prompt": ["x"] * 5, "n": 2, "max_tokens": 51, "logprobs": 1},
            "10 answers x 51 tokens x 2 values = 1020",
        ),
        ({"prompt": "x", "n": 4, "logprobs": 20}, "4 answers x 16 tokens x 21 values = 1344"),
        ({"prompt": "x", "max_tokens": 10**9, "logprobs": 2}, "1 answers x 500 tokens x 3"),
        ({"prompt": "x", "max_tokens": 4, "logprobs": -1}, "x 4 tokens x 300 values = 1200"),
        (
            {**CHAT, "max_completion_tokens": 50, "logprobs": True, "top_logprobs": 20},
            "1 answers x 50 tokens x 21 values = 1050",
        ),
        (
            {**CHAT, "max_tokens": 50, "logprobs": True, "logprob_token_ids": [1] * 20},
            "x 50 tokens x 21 values",
        ),
        (
            {"messages": [[1], [2], [3]], "max_tokens": 400, "logprobs": True},
            "3 answers x 400 tokens x 1 values = 1200",
        ),
        ({"input": "x", "max_output_tokens": 60, "top_logprobs": 19, **INCLUDE}, "60 tokens x 20"),
        ({"prompt": "x", "n": 4, "use_beam_search": True, "max_tokens": 50}, "x 9 values = 1800"),
        ({**CHAT, "n": 2, "use_beam_search": True}, "2 answers x 500 tokens x 5 values"),
        ({"prompt": [1] * 101, "prompt_logprobs": 9}, "1010 values for the prompts"),
        ({"prompt": [[1] * 60] * 2, "prompt_logprobs": 9}, "1200 values for the prompts"),
        ({"prompt": [1] * 60, "n": 2, "prompt_logprobs": 9}, "1200 values for the prompts"),
        ({"prompt": [1] * 400, "echo": True, "logprobs": 2, "max_tokens": 0}, "1200 values for"),
        (
            {"prompt": [1] * 60, "prompt_logprobs": 9, "logprobs": 9, "max_tokens": 50},
            "1 answers x 50 tokens x 10 values = 500 and 600 values for the prompts",
        ),
    ],
)
def test_what_is_beyond_it_is_told_by_its_factors(fields: dict[str, Any], factors: str) -> None:
    with pytest.raises(BoundsError) as refused:
        check_logprobs(fields, SMALL)
    assert factors in str(refused.value)
    assert "at most 1000" in str(refused.value)
    assert refused.value.param == "logprobs"


# --- what is known of engine requests ---


def params(**given: Any) -> Any:
    none = dict.fromkeys(("logprobs", "prompt_logprobs", "logprob_token_ids"))
    return SimpleNamespace(**{"n": 1, "max_tokens": 10, **none, **given})


def budget(most: int, **fields: Any) -> LogprobBudget:
    return LogprobBudget(fields, replace(DEFAULTS, logprob_values=most))


def test_prompts_that_are_text_count_when_their_tokens_are_known() -> None:
    two = budget(1000, prompt=["a", "b"], max_tokens=1)
    two.take(params(prompt_logprobs=4), 100)
    two.take(params(prompt_logprobs=4), 100)
    with pytest.raises(BoundsError, match="1005 values for the prompts"):
        two.take(params(prompt_logprobs=4), 1)


def test_a_request_without_log_probabilities_has_any_size() -> None:
    asked = params(n=128, max_tokens=10**6)
    budget(1).take(asked, 10**6)
    assert asked.max_tokens == 10**6


def test_an_answer_of_open_length_is_cut_to_what_is_left() -> None:
    asked = params(logprobs=4, max_tokens=100_000)
    budget(10 * OPEN_TOKENS, **CHAT).take(asked, 50)
    assert asked.max_tokens == 2 * OPEN_TOKENS
    batch = budget(20 * OPEN_TOKENS, messages=[[1], [2]])
    for _ in range(2):
        asked = params(logprobs=4, max_tokens=100_000)
        batch.take(asked, 50)
        assert asked.max_tokens == 2 * OPEN_TOKENS


def test_it_is_refused_rather_than_cut_very_short() -> None:
    asked = params(n=2, logprobs=4, max_tokens=100_000)
    with pytest.raises(BoundsError, match="2 answers x 100000 tokens x 5 values"):
        budget(10 * OPEN_TOKENS - 1, **CHAT).take(asked, 50)


def test_a_length_that_was_asked_for_is_never_cut() -> None:
    asked = params(logprobs=4, prompt_logprobs=4, max_tokens=2 * OPEN_TOKENS)
    with pytest.raises(BoundsError, match="answers x"):
        budget(10 * OPEN_TOKENS, **CHAT, max_tokens=2 * OPEN_TOKENS).take(asked, 50)


# --- over HTTP ---


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("node")
    options = ("--max-model-len", "512", "--max-logprob-values", "12000")
    with served_node(folder, *options) as node, node.client() as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "n": 6, "max_tokens": 100, "logprobs": 20}),
        ("/invocations", {"prompt": "x", "n": 6, "max_tokens": 100, "logprobs": 20}),
        # These are known by the tokens of the text, and by the length that is left to an answer.
        ("/v1/completions", {"prompt": "x " * 250, "n": 3, "echo": True, "logprobs": 20}),
        ("/v1/chat/completions", {**CHAT, "n": 5, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_the_product_is_refused_with_its_factors(
    http: httpx.Client, path: str, fields: dict[str, Any], stream: bool
) -> None:
    before = refusals(http)
    response = http.post(path, json={"model": "shoal-demo", "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "at most 12000 log probabilities" in error["message"]
    if not stream:  # vLLM does not say it of a stream
        assert error["param"] == "logprobs"
    while refusals(http) == before:
        pass  # it is counted after the response
    assert refusals(http) == before + 1
    assert http.post(path, json={"model": "shoal-demo", **fields, "n": 1}).status_code == 200


def refusals(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    name = 'shoal_rejected_requests_total{reason="invalid"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 20, "prompt_logprobs": 3}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20}),
        ("/invocations", {**CHAT, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_a_large_answer_is_whole_and_says_where_it_ran(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "shoal-demo", "n": 4, "max_tokens": 100, "ignore_eos": True, **fields}
    response = http.post(path, json=body)
    assert response.status_code == 200
    assert "content-length" not in response.headers  # it came in pieces
    assert set(response.headers["x-shoal-layout"].split(";")) == {"dp"}
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == 400
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        rows = logprobs.get("content") or logprobs["tokens"]
        assert len(rows) == 100
    small = http.post(path, json={**body, "n": 1, "max_tokens": 2})
    assert "content-length" in small.headers
    assert small.json().keys() == answer.keys()
    assert small.json()["choices"][0].keys() == answer["choices"][0].keys()
