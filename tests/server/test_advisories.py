"""What has been found in vLLM and its peers since 2024, one test per class, by number.

A node of fake engines stands for the front end, which is where strangers arrive; what happens to
grammars there is vLLM's own code. Tests of single parts stand beside them where a part is all.
"""

import ast
import asyncio
import json
import re
import socket
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from vllm.config.cache import CacheConfig, PrefixCachingHashAlgo
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shoal.runtime.config import Addresses, NodeConfig
from shoal.server.errors import UserError
from shoal.server.frontend.grammars import REMEMBERED, GrammarCheck
from shoal.server.gate.access import add_access_options, take_access
from shoal.server.gate.key_ring import KeyRing
from shoal.server.gate.keys import plain_key
from shoal.server.gate.placement import Placement, Placements
from tests.server.listeners import reachable
from tests.server.node import ServedNode, key_file, served_node

ROOT = Path(__file__).parents[2]
MODEL = "shoal-demo"
KEY = "s3cret"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with served_node(
        tmp_path_factory.mktemp("node"),
        *("--api-key", KEY, "--max-model-len", "256"),
        *("--max-grammar-seconds", "1", "--max-waiting-grammars", "1"),
        last_line="try it:",
    ) as served:
        yield served


@pytest.fixture
def http(node: ServedNode) -> Iterator[httpx.Client]:
    """A client; the node must serve as before when it is done."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=node.url, headers=headers, timeout=60) as client:
        yield client
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert node.process.poll() is None


def refused(response: httpx.Response, status: int = 400) -> str:
    """Check that a request was turned away, and return what for."""
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


# --- code in what should be data ---


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_cve_2024_50050_2024_11041_2025_29783_2025_30165_2025_32444_2026_3059_pickle_over_zmq(
    tmp_path: Path,
) -> None:
    sources = [
        path for top in ("runtime", "server", "policies") for path in ROOT.glob(f"{top}/**/*.py")
    ]
    assert len(sources) > 80
    unpicklers = {str(path.relative_to(ROOT)) for path in sources if imports(path) & UNPICKLERS}
    # Instructions go between an engine's two processes, which are one trust: nobody else knows the
    # socket. vLLM's configurations go over no socket: a child process is handed them as it starts.
    own = {"runtime/engine/link/instructions.py", "runtime/layout_configs.py"}
    assert unpicklers == own
    users = {
        str(path.relative_to(ROOT))
        for path in sources
        if re.search(r"\binstructions(\.loads\(| import loads)", path.read_text())
    }
    assert users == {f"runtime/engine/link/{name}.py" for name in ("executor", "step_queues")}
    addresses = Addresses(tmp_path)
    sockets = (addresses.engines, addresses.control, addresses.front_input(0), addresses.runner(1))
    assert all(address.startswith(f"ipc://{tmp_path}/") for address in sockets)


@pytest.mark.parametrize("code", [1, 2], ids=["pickle", "cloudpickle"])
def test_cve_2025_32444_2026_7301_a_pickle_in_vllm_s_own_messages_is_not_opened(code: int) -> None:
    bomb = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, b"cos\nsystem\n(S'true'\ntR."))
    with pytest.raises(NotImplementedError):
        MsgpackDecoder().decode(bomb)
    with pytest.raises(TypeError):
        MsgpackEncoder().encode(object())


def test_cve_2025_62164_prompt_embeddings_are_never_decoded(http: httpx.Client) -> None:
    body = {**BODY, "prompt_embeds": "gASVAAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOULg=="}
    assert "prompt_embeds" in refused(http.post("/v1/completions", json=body))
    part = {"type": "prompt_embeds", "data": body["prompt_embeds"]}
    chat = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
    assert "prompt_embeds" in refused(http.post("/v1/chat/completions", json=chat))


# --- who gets in ---


def test_cve_2025_30202_2025_47277_2026_7301_nothing_listens_for_other_machines(
    node: ServedNode,
) -> None:
    assert reachable(node.process.pid) == {}


def test_cve_2025_59425_every_key_is_compared_and_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("secrets.compare_digest", compare)
    ring = KeyRing([plain_key(text) for text in ("first", "second", "third")])
    assert ring.find("first") is not None
    assert ring.find("fir") is None
    assert ring.find("x" * 10_000) is None
    assert len(compared) == 9
    assert {len(text) for pair in compared for text in pair} == {32}


@pytest.mark.parametrize(
    "host", ["a/health?", "a/health#", "a/ready?x=", "/health", "a\\health", "health", "a/metrics"]
)
def test_cve_2026_48746_a_host_header_does_not_stand_in_for_the_path(
    node: ServedNode, host: str
) -> None:
    port = int(node.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        assert connection.recv(12) in (b"HTTP/1.1 401", b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "path",
    [
        *("/invocations", "/v1/invocations", "/pause", "/collective_rpc", "/scale_elastic_ep"),
        *("/update_weights", "/update_weights_from_tensor", "/update_weights_from_disk"),
        *("/admin/layout", "/metrics", "//v1/models", "/v1/models/", "/V1/MODELS", "/health/"),
        *("/health/../v1/models", "/health%2f..%2fv1/models", "/health;/v1/models"),
    ],
)
def test_cve_2025_10164_no_route_is_open_by_oversight(node: ServedNode, path: str) -> None:
    for method in ("GET", "POST"):
        response = httpx.request(method, f"{node.url}{path}", json={}, timeout=60)
        assert response.status_code == 401, (method, path)


# --- one request that takes the server down ---


def test_cve_2025_48956_a_head_without_end_is_cut_off(node: ServedNode, http: httpx.Client) -> None:
    port = int(node.url.rpartition(":")[2])
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: ")
        try:
            while sent < 64 << 20:
                sent += connection.send(b"x" * 65536)
        except ConnectionError:
            pass
    assert sent < 16 << 20  # what the kernel buffers on the way


@pytest.mark.parametrize("n", [10**6, 2**31, 10**18])
def test_cve_2026_34756_answers_per_request_are_bounded(http: httpx.Client, n: int) -> None:
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        assert refused(http.post(path, json={**body, "n": n})).startswith("n: ")


def test_cve_2024_8939_best_of_is_bounded(http: httpx.Client) -> None:
    assert "best_of" in refused(http.post("/v1/completions", json={**BODY, "best_of": 10**6}))


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], None])
def test_cve_2024_8768_an_empty_prompt_hurts_nobody(http: httpx.Client, prompt: Any) -> None:
    for stream in (False, True):
        body = {**BODY, "prompt": prompt, "stream": stream}
        assert http.post("/v1/completions", json=body).status_code < 500


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "cve_2025_48942_schema": {"json": {"properties": {"reason": {"type": "stsring"}}}},
    "cve_2025_48942_key": {"json": {"type": "object", "properties": {"foo": "bar"}}},
    "cve_2025_48943_regex": {"regex": "[z-a"},
    "cve_2025_48943_group": {"regex": "(" * 1000},
    "cve_2026_25048_brackets": {"grammar": "root ::= " + "(" * 30_000},
    "no_grammar": {"grammar": "\x00"},
    "no_choice": {"choice": []},
    "no_tag": {"structural_tag": "{}"},
    "two": {"regex": "a", "json": {}},
}


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_cve_2025_48942_2025_48943_2026_25048_a_broken_grammar_hurts_nobody(
    http: httpx.Client, constraint: dict[str, Any], stream: bool
) -> None:
    body = {**BODY, "structured_outputs": constraint, "stream": stream}
    assert refused(http.post("/v1/completions", json=body))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "*"}}},
        {"type": "object", "properties": {"a": {"type": ["nonsense"]}}},
        {"type": {}},
        {"properties": []},
    ],
)
def test_cve_2025_48944_a_broken_tool_hurts_nobody(
    http: httpx.Client, parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = {**CHAT, "tools": [tool], "tool_choice": choice}
        assert http.post("/v1/chat/completions", json=body).status_code < 500


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_caller_with_too_many_grammars_that_wait_is_told_so(
    node: ServedNode, stream: bool
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=60) as client:
        heavy = [{"enum": [f"{stream} {which} {k}" for k in range(10_000)]} for which in "ab"]
        bodies = [{**BODY, "stream": stream, "structured_outputs": {"json": h}} for h in heavy]
        sent = [client.post("/v1/completions", json=body) for body in bodies]
        compiled, too_many = sorted(await asyncio.gather(*sent), key=lambda r: r.status_code)
        page = (await client.get("/metrics")).text
    assert "more than 1 s" in refused(compiled)
    assert refused(too_many, 429) == "1 grammars of this API key wait to be compiled: no more may"
    assert too_many.headers["retry-after"] == "1"
    count = 1 + stream
    assert f'shoal_rejected_requests_total{{reason="caller_limit"}} {float(count)}' in page


async def test_cve_2025_29770_what_is_remembered_of_grammars_is_bounded() -> None:
    class Accepting:
        async def run(self, caller: str | None, job: bytes) -> None:
            del caller, job

    grammars = GrammarCheck(Accepting())  # type: ignore[arg-type]
    for k in range(REMEMBERED + 50):
        await grammars.check(None, StructuredOutputsParams(regex=f"a{k}"))
    assert len(grammars._verdicts) == REMEMBERED


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"x": [["x"] * 100] * 100}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_cve_2025_61620_2025_62426_templates_and_their_engine_are_the_server_s(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    assert "chat_template" in refused(http.post(path, json={**CHAT, **fields}))


# --- requests that the server would make, and media ---


def part(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
@pytest.mark.parametrize(
    "make", [lambda url: url, lambda url: url.replace("//", "//example.com\\@", 1)]
)
def test_cve_2025_6242_2026_24779_no_url_of_a_client_is_fetched(
    http: httpx.Client, kind: str, make: Callable[[str], str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(0)
        url = make(f"http://127.0.0.1:{target.getsockname()[1]}/secret")
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part(kind, url)]}]
        assert kind in refused(
            http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
        )
        assert kind in refused(http.post("/tokenize", json={"model": MODEL, "messages": messages}))
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        refused(http.post("/v1/responses", json={"model": MODEL, "input": items}))
        tool = {"type": "mcp", "server_label": "x", "server_url": url}
        refused(http.post("/v1/responses", json={"model": MODEL, "input": "x", "tools": [tool]}))
        with pytest.raises(BlockingIOError):
            target.accept()


def test_cve_2026_5497_2026_22773_media_are_not_even_decoded(http: httpx.Client) -> None:
    frames = ",".join(["/9j/4AAQ"] * 20_000)
    for kind, url in (
        ("video_url", f"data:video/jpeg;base64,{frames}"),
        ("image_url", "data:image/png;base64,iVBORw0KGgo="),
    ):
        messages = [{"role": "user", "content": [part(kind, url)]}]
        assert kind in refused(
            http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
        )


# --- what one tenant learns of another ---


def test_cve_2025_46570_a_salt_of_the_server_s_keeps_tenants_prefixes_apart() -> None:
    placements = Placements()

    def salt(tenant: str | None, own: str | None = None) -> str | None:
        placement: Placement = placements.open()
        placement.tenant = tenant
        return placements.salt(own)

    assert salt("a") == salt("a")
    # Nobody gets another's by choosing a salt: neither plainly nor by shifting the boundary.
    salts = [salt("a"), salt("b"), salt("a", "x"), salt("ax"), salt("a:x"), salt("b", "x"), "x"]
    assert len(set(salts)) == len(salts)
    assert salt("b", salt("a")) != salt("a")
    assert salt(None, "x") == "x"


def test_cve_2025_25183_tenants_prefixes_are_told_apart_by_a_cryptographic_hash(
    tmp_path: Path,
) -> None:
    parser = ArgumentParser()
    add_access_options(parser.add_argument_group())
    args = parser.parse_args(["--api-key-file", str(key_file(tmp_path / "keys.json", "a"))])
    vars(args).update(api_key=None, prefix_caching_hash_algo=CacheConfig().prefix_caching_hash_algo)
    assert take_access(args, {}).needs_key
    weak = {name for name in get_args(PrefixCachingHashAlgo) if not name.startswith("sha256")}
    assert weak
    for name in weak:
        args.prefix_caching_hash_algo = name
        with pytest.raises(UserError, match=f"--prefix-caching-hash-algo {name}: "):
            take_access(args, {})
    args.api_key_file = None
    take_access(args, {})  # without several keys there is nobody to keep apart


# --- parsers ---


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "\\ud800"}',
        json.dumps(BODY).encode("utf-16"),
    ],
    ids=["objects", "lists", "nan", "digits", "surrogate", "utf-16"],
)
def test_json_that_parsers_disagree_on_or_choke_on_is_refused(
    http: httpx.Client, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
        refused(http.post(path, content=body, headers=headers))


def test_a_node_s_own_configuration_holds_no_key() -> None:
    assert not [name for name in NodeConfig.__struct_fields__ if "key" in name]
