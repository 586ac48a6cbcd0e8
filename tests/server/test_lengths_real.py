"""How long requests may be is what was asked for, or is said: real engines with little memory."""

from pathlib import Path

import pytest

from tests.server.node import ServedNode

BLOCK_BYTES = 6 * 2 * 4 * 32 * 4 * 32
"""Of the demo model: layers, keys and values, heads, their size, bytes of float32, tokens."""
ASKED = 2048


def node_with(cache: Path, blocks: int, *arguments: str) -> ServedNode:
    """Return a node, started or failed, of which each engine has so many KV blocks."""
    memory = ("--kv-cache-memory-bytes", str(blocks * BLOCK_BYTES))
    return ServedNode(cache, *memory, *arguments, real=True)


def ended(node: ServedNode) -> list[str]:
    return [*node.lines, *node.wait()]


def test_a_length_that_no_layout_holds_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    node = node_with(tmp_path_factory.mktemp("c"), 20, "--max-model-len", str(ASKED))
    lines = ended(node)
    assert node.process.returncode == 1
    (line,) = [line for line in lines if line.startswith("shoal: ")]
    assert f"requests may have {ASKED} tokens, and the KV cache of tp2" in line
    assert "holds 1216: give a smaller --max-model-len" in line
    assert not any("Traceback" in line for line in lines)
    assert node.leftovers() == []


@pytest.mark.parametrize(
    ("blocks", "options", "held"),
    [
        pytest.param(40, (), "1248 in dp, 2048 in tp2", id="of the model"),
        pytest.param(20, ("--max-model-len", "-1"), "608 in dp, 1216 in tp2", id="what fits"),
    ],
)
def test_what_narrow_layouts_hold_less_of_is_said(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, options: tuple[str, ...], held: str
) -> None:
    node = node_with(tmp_path_factory.mktemp("c"), blocks, *options)
    with node.process:
        (line,) = [line for line in node.lines if "longest" in line]
        node.process.kill()
    assert line == f"  not every layout holds the longest requests: up to {held} (tokens)"
