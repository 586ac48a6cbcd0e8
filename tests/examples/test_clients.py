"""The clients of the examples get answers of a node, at the priorities that they ask for."""

import ast
import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.server.node import ServedNode, served_node

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Run a file of the examples as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    cache, store = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("store")
    options = ("--max-model-len", "512", "--engines", "2", "--batch-dir", str(store))
    with served_node(cache, *options) as served:
        yield served


def test_the_openai_client_asks_at_two_priorities(
    node: ServedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(example("openai_priorities").main(f"{node.url}/v1", "none"))
    lines = capsys.readouterr().out.splitlines()
    for priority, count in ((10, 8), (-10, 1)):
        asked = [line for line in lines if line.startswith(f"priority {priority:>3}: ")]
        assert len(asked) == count
        assert all(" s in dp on engines " in line for line in asked)


def test_the_node_takes_what_the_example_says_of_headers(node: ServedNode) -> None:
    """Were the header's name wrong, the node would not say this."""
    with httpx.Client(base_url=node.url, timeout=120) as http:
        body = {"model": "shoal-demo", "prompt": "Hello", "max_tokens": 2}
        answer = http.post("/v1/completions", json=body, headers={"X-Vllm-Priority": "-10"})
    assert answer.headers["x-shoal-priority"] == "-10"


def test_langchain_streams_a_story(node: ServedNode, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("langchain_openai") is None:
        assert "CI" not in os.environ, "CI has to run all examples"
        pytest.skip("pip install langchain-openai")
    example("langchain_chat").main(f"{node.url}/v1", "none")
    assert len(capsys.readouterr().out.strip()) > 20


def test_a_batch_is_answered_line_by_line_and_its_files_are_deleted(
    node: ServedNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = example("batch")
    monkeypatch.setitem(batch.QUESTIONS, "long", "x" * 100_000)
    batch.main(f"{node.url}/v1", "none")
    head, *answers = capsys.readouterr().out.splitlines()
    assert head == "completed: 3 of 4 lines answered"
    assert {line.partition(": ")[0] for line in answers} >= {"france", "sea", "story", "long"}
    failed = [line.partition(": ")[0] for line in answers if ": failed: " in line]
    assert failed == ["long"], "it has more tokens than the node's requests may have"
    with httpx.Client(base_url=node.url, timeout=120) as http:
        assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_what_its_head_says(path: Path) -> None:
    tree = ast.parse(path.read_text())
    head = ast.get_docstring(tree) or ""
    assert head
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name]
            top = str(names[0]).partition(".")[0]
            if top not in sys.stdlib_module_names and top != "shoal":
                package = "langchain-openai" if "langchain" in path.name else top
                assert f"pip install {package}" in head
