import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shoal.runtime.protocol.messages import Outcome
from tests.server.node import ServedNode, key_file, run_shoal, served_node, told_of_work

MODEL = "shoal-demo"
KEY = "one"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def node(cache: Path) -> Iterator[ServedNode]:
    keys = key_file(cache / "admin.json", KEY)
    with served_node(
        cache,
        *("--api-key", KEY, "two", "--admin-key-file", str(keys), "--max-model-len", "256"),
    ) as served:
        yield served


@pytest.fixture
def http(node: ServedNode) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with node.client(headers=headers) as client:
        yield client


@pytest.fixture
def client(node: ServedNode) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="two", max_retries=0) as client:
        yield client


@pytest.fixture
def single(http: httpx.Client) -> Iterator[httpx.Client]:
    """A client, and every engine alone before and after."""
    assert http.post("/admin/layout", json={"units": [[0], [1]]}).status_code == 200
    yield http
    assert http.post("/admin/layout", json={"units": [[0], [1]]}).status_code == 200


def error_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return str(error["message"])


# --- the start ---


def test_the_start_is_told_by_one_clock(node: ServedNode) -> None:
    assert node.lines[0] == "Starting Shoal"
    told = [re.search(r"^  (.*) after ([\d.]+) s", line) for line in node.lines]
    phases = [(found[1], float(found[2])) for found in told if found]
    assert [name for name, _ in phases if not name.startswith("engine")] == [
        *("imports done", "configuration done", "controller up", "front end up", "ready")
    ]
    assert phases == sorted(phases, key=lambda phase: phase[1])


# --- the OpenAI routes ---


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, seed=1, temperature=0.5
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_streamed_chat_completion_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_a_completion_with_echo_and_n(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=4, n=3, echo=True, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.text.startswith("Hello") for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_a_list_of_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=2)
    assert len(answer.choices) == 2


def test_stop_ends_a_text_and_is_left_out(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Hello", max_tokens=16)
    text = whole.choices[0].text
    stop = next(c for c in text[4:] if c.isascii() and text.index(c) >= 4)
    cut = client.completions.create(model=MODEL, prompt="Hello", max_tokens=16, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=6)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6


def test_models_tokens_and_version(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in models] == [(MODEL, MODEL)]
    tokens = http.post("/tokenize", json={"model": MODEL, "prompt": "Hello"}).json()["tokens"]
    text = http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"]
    assert text.endswith("Hello")
    assert http.get("/version").json()["version"].startswith("0.32")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "shoal-demo"}', 400),
        (b'{"model": "shoal-demo", "prompt": "x", "max_tokens": -1}', 400),
        (b'{"model": "shoal-demo", "prompt": "x", "temperature": "hot"}', 400),
        (b'{"model": "shoal-demo", "prompt": "x", "max_tokens": 100000}', 400),
        (json.dumps({"model": MODEL, "prompt": [5] * 300}).encode(), 400),
        (b'{"model": "shoal-demo", "prompt": "x", "priority": 1.5}', 400),
        (b'{"model": "nobody", "prompt": "x"}', 404),
    ],
)
def test_errors_of_a_request_are_the_callers(http: httpx.Client, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status
    assert error_of(response)
    assert "x-shoal-unit" not in response.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": [{"type": "text"}]}, "messages.text: it is missing"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.id: it is missing"),
        ({"role": "assistant", "tool_calls": [5]}, "messages: Input should be "),
    ],
)
def test_a_wrong_part_of_a_message_is_named_on_one_line(
    http: httpx.Client, path: str, message: dict[str, Any], told: str
) -> None:
    response = http.post(path, json={"model": MODEL, "messages": [message]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert told in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(("priority", "status"), [("-5", 200), ("soon", 400)])
def test_the_priority_header(http: httpx.Client, priority: str, status: int) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "priority": 3}
    response = http.post("/v1/completions", json=body, headers={"X-Vllm-Priority": priority})
    assert response.status_code == status


# --- policies ---


def test_the_policy_changes_live(http: httpx.Client) -> None:
    before = http.get("/admin/policy").json()
    assert before["policy"] == "manual"
    assert {"adaptive", "flying", "static-dp", "static-tp"} <= set(before["policies"])
    assert http.post("/admin/policy", json={"policy": "static-tp"}).json()["policy"] == "static-tp"
    refused = http.post("/admin/layout", json={"units": [[0], [1]]})
    assert refused.status_code == 409
    assert http.post("/admin/policy", json={"policy": "manual"}).status_code == 200
    assert "shoal_policy_errors_total 0.0" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "named"),
    [({"policy": "no-such"}, "choose one of"), ({}, "policy"), ({"policy": "manual", "x": 1}, "x")],
)
def test_a_policy_that_is_none_is_named(
    http: httpx.Client, body: dict[str, object], named: str
) -> None:
    response = http.post("/admin/policy", json=body)
    assert response.status_code == 400
    assert named in error_of(response)


# --- where a request ran ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_headers_say_where_a_request_ran(single: httpx.Client, path: str, stream: bool) -> None:
    body = {"model": MODEL, "max_tokens": 2, "stream": stream}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    alone = single.post(path, json=body)
    assert alone.headers["x-shoal-unit"] in ("0", "1")
    assert alone.headers["x-shoal-layout"] == "dp"
    single.post("/admin/layout", json={"units": [[0, 1]]}).raise_for_status()
    together = single.post(path, json=body)
    assert together.headers["x-shoal-unit"] == "0,1"
    assert together.headers["x-shoal-layout"] == "tp2"


def test_several_prompts_name_several_units(single: httpx.Client) -> None:
    # So many tokens that none has ended when the last one comes.
    body = {"model": MODEL, "prompt": ["a", "b", "c", "d"], "max_tokens": 200}
    response = single.post("/v1/completions", json=body)
    assert sorted(response.headers["x-shoal-unit"].split(";")) == ["0", "1"]
    assert response.headers["x-shoal-layout"] == "dp;dp"


# --- admin ---


def test_a_switch_answers_with_what_it_did(single: httpx.Client) -> None:
    switch = single.post("/admin/layout", json={"units": [[1, 0]], "preempt": "hard"}).json()
    assert switch["before"] == [[0], [1]]
    assert switch["after"] == [[0, 1]]
    assert switch["preempt"] == "hard"
    assert switch["outcome"] == "done"
    assert switch["duration_seconds"] >= 0
    assert set(switch["requests"]) == {
        *("paused", "resumed", "drained", "moved"),
        *("carried", "recomputed"),
    }
    view = single.get("/admin/layout").json()
    assert [unit["engines"] for unit in view["units"]] == [[0, 1]]
    assert view["switches"][-1] == switch
    assert all(engine["lent_blocks"]["0,1"] > 0 for engine in view["engines"])
    assert single.post("/admin/audit").json() == {"clean": True, "problems": []}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"units": [[0], [1]], "treatment": "hard"}, "treatment"),
        ({"units": [[0], [1]], "preempt": "gently"}, "gently"),
        ({"units": [[0], [1]], "timeout": 0}, "timeout"),
        ({}, "units"),
        ({"units": [[0]]}, r"\[1\]"),
        ({"units": [[0, 1], [1]]}, "engine 1"),
        ({"units": [[0], [1], [2]]}, "engine 2"),
        ({"units": [[0], [1], []]}, "empty"),
        ({"units": [[0, 1, 2]]}, "engine 2"),
    ],
)
def test_a_partition_that_cannot_be_is_a_400_that_says_why(
    http: httpx.Client, body: dict[str, object], named: str
) -> None:
    response = http.post("/admin/layout", json=body)
    assert response.status_code == 400
    assert re.search(named, error_of(response))


def test_streams_go_on_over_many_switches(node: ServedNode, single: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
    expected = single.post("/v1/completions", json=body).json()["choices"][0]["text"]

    async def stream(http: httpx.AsyncClient) -> str:
        text = ""
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def switch(http: httpx.AsyncClient, streams: asyncio.Future[list[str]]) -> int:
        switches = 0
        while not streams.done() or switches < 50:
            units = [[[0, 1]], [[0], [1]]][switches % 2]
            reply = await http.post("/admin/layout", json={"units": units, "preempt": "hard"})
            assert reply.status_code == 200, reply.text
            switches += 1
        return switches

    async def both() -> list[str]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with node.async_client(headers=headers) as http:
            streams = asyncio.gather(*(stream(http) for _ in range(6)))
            assert await switch(http, streams) >= 50
            return await streams

    assert asyncio.run(both()) == [expected] * 6


# --- the node ---


def test_alive_and_ready_need_no_key_and_all_else_does(node: ServedNode) -> None:
    with node.client() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").json() == {"ready": True}
        for path in ("/metrics", "/admin/layout", "/v1/models", "/version", "/nothing"):
            assert http.get(path).status_code == 401


def test_metrics_are_vllms_and_ours(client: openai.OpenAI, http: httpx.Client) -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
    text = http.get("/metrics").text
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}}' in text
    assert "vllm:time_to_first_token_seconds_bucket" in text
    assert 'shoal_engines{state="serving"} 2.0' in text
    assert 'shoal_pool_waiting{priority="normal"} 0.0' in text
    assert 'shoal_pool_waiting_tokens{priority="normal"} 0.0' in text
    for outcome in Outcome:
        assert f'shoal_requests_total{{outcome="{outcome}"}}' in text
    assert "shoal_ready 1.0" in text


def test_the_start_is_printed_by_phase_and_nothing_else_is(node: ServedNode) -> None:
    starts = [line.strip().split(" ")[0] for line in node.lines]
    assert starts[:3] == ["Starting", "imports", "configuration"]
    assert sorted(starts[3:7]) == ["controller", "engine", "engine", "front"]
    assert starts[7:] == ["ready", "Shoal", "admin", "try", "switch:"]


def test_an_interrupted_server_leaves_nothing_and_says_nothing(
    node: ServedNode, http: httpx.Client
) -> None:
    # Last of those that share the server. Done or aborted, a running stream ends well.
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        output = node.stop(signal.SIGINT)
        assert "data: [DONE]" in list(lines)
    # Only what the tests before this one did.
    said = ("controller: switch ", "controller: the policy is now ")
    left = [line for line in output if not line.startswith(said) and not told_of_work(line)]
    assert left == []
    assert node.process.returncode == 0
    assert node.leftovers() == []


def test_the_printed_switch_works_under_a_policy_that_decides_the_layout(tmp_path: Path) -> None:
    """A user copies the line, so it must take the layout from the policy first."""
    with served_node(tmp_path, "--policy", "flying") as node:
        calls = re.findall(r"curl -X POST (\S+) -d '(.+?)'", node.lines[-1])
        answers = [httpx.post(url, content=body, timeout=60) for url, body in calls]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[-1].json()["after"] == [[0, 1]]


def test_a_lost_engine_is_left_out_and_a_lost_controller_ends_the_server(cache: Path) -> None:
    node = ServedNode(cache, "--api-server-count", "2", "--restart-limit", "0")
    with node.client() as http:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert "vllm:generation_tokens_total" in http.get("/metrics").text
        node.kill("engine 1")
        while http.get("/admin/layout").json()["engines"][1]["state"] != "dead":
            pass  # bounded by the test's time limit
        answers = [http.post("/v1/completions", json=body) for _ in range(3)]
        assert [answer.headers["x-shoal-unit"] for answer in answers] == ["0"] * 3
        refused = http.post("/admin/layout", json={"units": [[0, 1]]})
        assert refused.status_code == 503
        assert "[1]" in error_of(refused)
    node.kill("controller")
    lost, ended = [line for line in node.wait() if line.startswith("shoal: ")]
    assert lost.startswith("shoal: engine 1 is lost")
    assert ended == "shoal: controller: killed by SIGKILL"
    assert node.process.returncode == 1
    assert node.leftovers() == []


def test_a_port_in_use_is_refused_with_one_line(cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = run_shoal(["serve", "--port", str(port)], dict(os.environ))
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert said == f"shoal: cannot listen on 127.0.0.1:{port}: the port is in use\n"
