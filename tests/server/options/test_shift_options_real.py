"""A model whose attention cannot be exchanged between engines, served with ``--max-sp``."""

import json
from pathlib import Path

import pytest

from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.server.node import ServedNode

BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 256,
    "n_layer": 2,
    "n_head": 8,
    "vocab_size": 2048,
    "layer_norm_epsilon": 1e-5,
    "dtype": "float32",
}
"""A small BLOOM: its attention adds to each head's scores what only that head has (ALiBi)."""
OPTIONS = (
    *("--engines", "2", "--load-format", "dummy", "--enforce-eager"),
    *("--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20)),
)


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose weights are made up when it is loaded."""
    path = tmp_path_factory.mktemp("models") / "bloom"
    write_checkpoint(path, CheckpointSpec(layers=1))
    (path / "config.json").write_text(json.dumps(BLOOM))
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of a short name: sockets are below it."""
    return tmp_path_factory.mktemp("c")


def test_it_is_refused_at_the_start_with_one_line(bloom: Path, cache: Path) -> None:
    node = ServedNode(cache, str(bloom), *OPTIONS, "--max-sp", "2", real=True)
    lines = [*node.lines, *node.wait()]
    assert node.process.returncode == 1
    assert node.url == ""
    (line,) = [line for line in lines if line.startswith("shoal: ")]
    assert line.endswith(
        f"{bloom} cannot run by sequence: transformer.h.0.self_attention.attn has ALiBi slopes for "
        "each head; use --max-sp 1"
    )
    assert not any("Traceback" in line for line in lines)
    assert node.leftovers() == []


def test_without_it_the_same_model_is_served(bloom: Path, cache: Path) -> None:
    node = ServedNode(cache, str(bloom), *OPTIONS, real=True)
    try:
        assert node.url, "\n".join(node.lines)
    finally:
        node.stop()
    assert node.process.returncode == 0
    assert node.leftovers() == []
