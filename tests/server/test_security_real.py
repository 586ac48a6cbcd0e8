"""What only real engines can show: what torch listens on, and what their prefix caches tell."""

from collections.abc import Iterator

import httpx
import pytest

from shoal.loadgen.bench.process_memory import tree
from tests.server.listeners import listeners, reachable
from tests.server.node import ServedNode, key_file, served_node

PROMPT = "Once upon a time there was a boat that sailed to the island and back again. " * 8
"""Several blocks of the KV cache."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("node")
    with served_node(
        folder,
        *("--api-key-file", str(key_file(folder / "keys.json", "one", "two"))),
        *("--admin-key-file", str(key_file(folder / "admin.json", "operator"))),
        "--enable-prompt-tokens-details",
        real=True,
    ) as served:
        yield served


def cached(node: ServedNode, key: str, salt: str | None = None) -> int:
    """Return how many tokens of the prompt were found in the cache."""
    body = {"model": "shoal-demo", "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    answer = httpx.post(
        f"{node.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def switch(node: ServedNode, units: list[list[int]]) -> None:
    answer = httpx.post(
        f"{node.admin_url}/admin/layout",
        json={"units": units},
        headers={"Authorization": "Bearer operator"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text


def test_cve_2025_46570_one_key_s_prefixes_are_not_found_by_another(node: ServedNode) -> None:
    switch(node, [[0, 1]])  # one cache, whichever engine is free
    assert cached(node, "one") == 0
    assert cached(node, "one") > 0
    assert cached(node, "two") == 0
    assert cached(node, "two") > 0
    assert cached(node, "one", salt="mine") == 0
    assert cached(node, "one", salt="mine") > 0
    assert cached(node, "two", salt="mine") == 0


def test_cve_2025_30202_2025_47277_torch_and_gloo_listen_on_this_machine_only(
    node: ServedNode,
) -> None:
    assert len(list(tree(node.process.pid))) >= 7
    switch(node, [[0], [1]])
    switch(node, [[0, 1]])
    ports = {url.rpartition(":")[2] for url in (node.url, node.admin_url)}
    found = {address.rpartition(":")[2] for address in listeners(node.process.pid)}
    assert ports <= found
    assert found > ports, "gloo's own listeners are not seen: this test would show nothing"
    assert reachable(node.process.pid) == {}
