"""LoRA adapters over HTTP: requests name them as their model, and nobody can add others."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.server.options.serve_options import DEMO_CHECKPOINT, DEMO_NAME
from tests.server.node import run_shoal, served_node


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


@pytest.mark.parametrize(
    ("model", "name"), [((), DEMO_NAME), ((str(DEMO_CHECKPOINT),), str(DEMO_CHECKPOINT))]
)
def test_an_adapter_cannot_have_the_name_by_which_the_model_is_served(
    tmp_path: Path, model: tuple[str, ...], name: str
) -> None:
    """Also where the command line does not say it by --model or --served-model-name."""
    adapters = ("--enable-lora", "--lora-modules", f"{name}={tmp_path}")
    command = ["serve", *model, "--port", "0", "--fake-engine", *adapters]
    process = run_shoal(command, {**os.environ, "TMPDIR": str(tmp_path)})
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 2
    said = f"shoal: --lora-modules: two models would have the name {name}"
    assert output.splitlines()[-1] == said
