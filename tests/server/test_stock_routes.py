"""Routes of stock vLLM that are no part of OpenAI's API, over HTTP: a node of fake engines."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.node import ServedNode, key_file, served_node

MODEL = "shoal-demo"
HELLO = [{"role": "user", "content": "Hello"}]
BATCH = "/v1/chat/completions/batch"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("node")
    admin = key_file(folder / "admin.json", "operator")
    with served_node(
        folder,
        *("--api-key", "one", "--admin-key-file", str(admin), "--max-model-len", "512"),
        *("--max-choices", "4", "--enable-server-load-tracking"),
        *("--enable-tokenizer-info-endpoint", "--fake-step-ms", "1"),
    ) as served:
        yield served


@pytest.fixture
def http(node: ServedNode) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=node.url, headers={"Authorization": "Bearer one"}, timeout=60
    ) as client:
        yield client


def refused(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code == 400
    return error


# --- what is no valid value ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": "ten"}, "max_tokens: Input should be a valid integer, unable to parse"),
        ({"prompt": 3}, "prompt: Input should be a valid list, or input should be a valid string"),
        ({"stop": 5}, "stop: Input should be a valid string, or input should be a valid list"),
        ({"prompt": [-1]}, "prompt[0]: Input should be greater than or equal to 0"),
        # vLLM's own validators, and what it checks later
        ({"stream_options": {"include_usage": True}}, "Stream options can only be defined when"),
        ({"max_tokens": -1}, "max_tokens must be at least 1"),
    ],
)
def test_a_wrong_value_is_told_on_one_line(
    http: httpx.Client, body: dict[str, Any], message: str
) -> None:
    error = refused(http.post("/v1/completions", json={"model": MODEL, "prompt": "x", **body}))
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == next(iter(body)) + "[0]" * ("[0]" in message)


def test_a_wrong_message_is_told_without_the_names_of_types(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": 4}]}
    error = refused(http.post("/v1/chat/completions", json=body))
    assert error["message"].startswith("messages[0].content: Input should be a valid string")
    assert "Param" not in error["message"]


def test_a_body_of_another_type_is_refused_by_its_header(http: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    error = refused(http.post("/v1/completions", content=b'{"prompt": "x"}', headers=form))
    assert error["message"] == "the header Content-Type must be application/json"


# --- batches ---


def test_a_batch_is_answered_as_its_chats_are_one_by_one(http: httpx.Client) -> None:
    chats = [HELLO, [{"role": "user", "content": "Where is the sea?"}]]
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    batch = http.post(BATCH, json={**asked, "messages": chats}, headers={"x-vllm-priority": "4"})
    assert batch.headers["x-shoal-priority"] == "4"
    assert batch.headers["x-shoal-layout"] in ("dp", "dp;dp")
    alone = [
        http.post("/v1/chat/completions", json={**asked, "messages": chat}).json() for chat in chats
    ]
    assert [choice["message"]["content"] for choice in batch.json()["choices"]] == [
        answer["choices"][0]["message"]["content"] for answer in alone
    ]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": [HELLO] * 5}),
        ("stream", {"messages": [HELLO], "stream": True}),
        (
            "messages",
            {
                "messages": [
                    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
                ]
            },
        ),
        ("chat_template", {"messages": [HELLO], "chat_template": "x"}),
    ],
)
def test_a_batch_is_bounded(http: httpx.Client, param: str, fields: dict[str, Any]) -> None:
    response = http.post(BATCH, json={"model": MODEL, "max_tokens": 1, **fields})
    assert refused(response)["param"] == param


# --- one route for all requests ---


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invocation_is_answered_by_the_route_that_its_body_is_for(
    http: httpx.Client, path: str, fields: dict[str, Any], stream: bool
) -> None:
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "stream": stream, **fields}
    answers = [
        http.post(at, json=body, headers={"x-vllm-priority": "3"}) for at in (path, "/invocations")
    ]
    kinds = [answer.headers["content-type"] for answer in answers]
    assert kinds[0] == kinds[1]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["x-shoal-priority"] == "3"
        assert answer.headers["x-shoal-layout"] in ("dp", "dp;dp")
    first, second = (texts_of(answer, stream) for answer in answers)
    assert first == second


def texts_of(answer: httpx.Response, stream: bool) -> dict[int, str]:
    """Return the text of every choice."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"] if stream else [answer.json()]
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        told = next((choice[part] for part in ("delta", "message") if part in choice), choice)
        text = told.get("text") or told.get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"messages": "no list"}', "messages"),
        (b'{"prompt": "x", "n": 5}', "n"),
        (b'{"prompt": "x", "prompt_embeds": "x"}', "prompt_embeds"),
        (b'{"input": "x"}', "messages, prompt"),
        (b"", "messages, prompt"),
        (b"[1]", "JSON object"),
        (b"{", "JSON"),
    ],
)
def test_an_invocation_that_is_none_is_told_why(
    http: httpx.Client, content: bytes, named: str
) -> None:
    headers = {"Content-Type": "application/json"}
    response = http.post("/invocations", content=content, headers=headers)
    assert named in refused(response)["message"]


def test_what_has_no_key_is_not_invoked(node: ServedNode) -> None:
    for path in ("/invocations", BATCH, "/load", "/tokenizer_info", "/v1/messages"):
        assert httpx.post(f"{node.url}{path}", json={}, timeout=60).status_code == 401


# --- what monitors ask ---


def test_a_ping_needs_no_key(node: ServedNode) -> None:
    for method in ("GET", "POST"):
        response = httpx.request(method, f"{node.url}/ping", timeout=60)
        assert (response.status_code, response.content) == (200, b"")


def test_the_load_is_what_runs(http: httpx.Client) -> None:
    def load() -> int:
        return int(http.get("/load").json()["server_load"])

    seen = threading.Event()

    def keep_asking(path: str, **body: Any) -> None:
        while not seen.is_set():
            http.post(path, json={"model": MODEL, "max_tokens": 400, **body})

    assert load() == 0
    clients = [
        threading.Thread(target=keep_asking, args=[path], kwargs=body)
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
            ("/invocations", {"prompt": "x", "ignore_eos": True}),
        )
    ]
    for client in clients:
        client.start()
    try:
        while load() < 2:
            pass  # bounded by the test's time limit
    finally:
        seen.set()
        for client in clients:
            client.join()
    while load():
        pass  # the count ends after the response


def test_the_tokenizer_is_described_where_that_is_asked_for(http: httpx.Client) -> None:
    answer = http.get("/tokenizer_info")
    assert answer.status_code == 200
    assert "Tokenizer" in answer.json()["tokenizer_class"]
