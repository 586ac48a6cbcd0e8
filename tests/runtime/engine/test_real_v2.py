"""The V2 model runner, vLLM's default on GPUs: stock, DP, TP2 and SP2 generate the same tokens.

Sampled at random, those of a group's members are the same. With a seed, penalties, a grammar or log
probabilities they are stock's too, in requests that are carried to other layouts and back. Four
engines go through a few random operations. For many of them, run ``v2_main`` with their number.
"""

from typing import Any

import pytest

from tests.runtime.engine import v2_program

pytestmark = pytest.mark.timeout(1200)

OPERATIONS = 24
"""Random ones. ``test_real_random`` goes through more: interpreted kernels are slow."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One program for all of it: interpreted kernels are slow."""
    directory = tmp_path_factory.mktemp("v2")
    return v2_program.run("tests.runtime.engine.v2_main", directory, OPERATIONS)


def test_every_layout_generates_stocks_tokens(result: dict[str, Any]) -> None:
    assert result["runners"] == ["vllm.v1.worker.gpu.model_runner"]
    assert result["takes arrays"] == [True, True]
    tokens = result["tokens"]
    assert len({tuple(output) for output in tokens["stock"]}) == 4
    assert min(len(set(output)) for output in tokens["stock"]) >= 8
    for layout, outputs in tokens.items():
        assert outputs == tokens["stock"], layout
    assert_sampled_as_stock_does(result)
    assert result["streamed"] == [True, False]
    assert result["modes"] == ["sp", "tp"]
    assert result["sample alike"] == {"one has drawn": False, "bound again": True}
    assert result["owned"] == [{"dp": 0, "tp2": 0}] * 2
    assert result["problems"] == []


def assert_sampled_as_stock_does(result: dict[str, Any]) -> None:
    expected, greedy = result["sampled"]["stock"], result["tokens"]["stock"]
    assert result["sampled"]["sampled"] == expected
    changed = [
        tokens[: len(plain)] != plain for tokens, plain in zip(expected, greedy, strict=True)
    ]
    assert changed == [True, True, True, False], "log probabilities alone change no token"
    for other, tokens in zip(result["sampled"]["others"], expected, strict=False):
        assert other != tokens, "another seed, or no penalties, would not be noticed"
    assert result["log probabilities differ"] < 1e-4
    assert result["switches"] == {
        "moved": 2,
        "lease grew": True,
        "carried": [True, True],
        "not carried": [[0, 0, {}]] * 2,
    }


def test_pipelines_and_steps_by_sequence_have_adapters(result: dict[str, Any]) -> None:
    found = result["adapted"]
    assert found["by sequence"] == found["pipeline"] == found["dp"]
    assert len({tuple(tokens) for outputs in found["dp"] for tokens in outputs}) == 6
    assert [modes.get("tp", 0) for modes in found["modes"]] == [0, 0]
    assert all(modes["sp"] > 0 for modes in found["modes"])


def test_no_random_operation_changes_a_token(result: dict[str, Any]) -> None:
    life = result["life"]
    assert life["wrong"] == []
    assert life["problems"] == []
    assert life["lent"] == 0
    assert sum(life["counts"].values()) >= OPERATIONS
    assert life["steps_ahead"], "scheduling was not asynchronous"
    assert life["seated"] > 0
    assert {"dp to tp2", "tp4 to dp"} <= life["directions"].keys()
