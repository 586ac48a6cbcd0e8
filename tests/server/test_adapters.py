"""LoRA adapters over HTTP: requests name them as their model, and nobody can add others."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server.node import served_node


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    cache = tmp_path_factory.mktemp("c")
    adapters = ("--enable-lora", "--lora-modules", f"poet={cache}", "clerk=someone/clerk")
    with (
        served_node(cache, "--engines", "2", "--api-server-count", "2", *adapters) as node,
        node.client() as client,
    ):
        yield client


def test_adapters_are_models_without_their_directories(http: httpx.Client) -> None:
    found = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(found) == ["shoal-demo", "poet", "clerk"]
    assert [found[name]["root"] for name in ("poet", "clerk")] == ["poet", "someone/clerk"]
    assert {found[name]["parent"] for name in ("poet", "clerk")} == {"shoal-demo"}


@pytest.mark.parametrize(
    ("model", "status"), [("shoal-demo", 200), ("poet", 200), ("clerk", 200), ("nobody", 404)]
)
def test_requests_name_an_adapter_as_their_model(
    http: httpx.Client, model: str, status: int
) -> None:
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    for _ in range(4):  # any of the front ends
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["model"] == model


def test_adapters_cannot_be_added_or_removed(http: httpx.Client) -> None:
    for verb in ("load", "unload"):
        body = {"lora_name": "poet", "lora_path": "/tmp"}
        assert http.post(f"/v1/{verb}_lora_adapter", json=body).status_code == 404
