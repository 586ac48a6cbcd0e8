"""Engines that keep the rows of some tokens each, held against the whole embeddings and LM head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from shoal.runtime import vocabulary_sharing
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.sharing import shared_vocabulary
from shoal.runtime.engine.weights.sharing.pages import HostPages
from tests.runtime.engine.weights.sharing.sharing_engines import (
    DECODER,
    ENGINES,
    LANGUAGE,
    LAYERS,
    PLAIN,
    STAGES,
    Kind,
    SharingEngine,
    close_all,
    node,
    on_cpu,
    on_simulated_gpu,
    pipeline_outputs,
)
from tests.runtime.engine.weights.sharing.simulated_cuda import simulate_streams

PADDED = 256
ROW = PLAIN.hidden * 4
PAGE = HostPages.page
EMBEDDED, LOGITS = 0, -1
"""Which of a step's outputs are the embeddings and the logits."""


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have pieces of 16 rows with two engines, and of 32 for each of four."""
    monkeypatch.setattr(vocabulary_sharing, "PIECE_BYTES", 16 * ROW)
    with set_current_vllm_config(VllmConfig()):
        yield
    close_all()


@pytest.fixture
def stock() -> list[torch.Tensor]:
    """Return what the whole model computes."""
    return LANGUAGE.outputs(LANGUAGE.whole())


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-3)


def assert_right(engines: list[SharingEngine], stock: list[torch.Tensor], widest: int) -> None:
    for tp in (1, 2, 4, 1):
        if tp > widest:
            continue
        for first in range(0, ENGINES, tp):
            members = [engine.outputs(tp) for engine in engines[first : first + tp]]
            sums = [torch.stack(parts).sum(0) for parts in zip(*members, strict=True)]
            assert all(map(is_close, sums, stock))
            if 2 * tp <= ENGINES and first % (2 * tp) == 0:
                found = pipeline_outputs(engines[first : first + 2 * tp], tp)
                assert all(map(is_close, found, stock)), "a pipeline"


@pytest.mark.parametrize("kind", [on_cpu, on_simulated_gpu])
@pytest.mark.parametrize("share", [2, 4])
def test_all_layouts_compute_what_the_whole_model_does(
    tmp_path: Path,
    stock: list[torch.Tensor],
    share: int,
    kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_streams(monkeypatch, [])
    engines = node(tmp_path, share, kind, LANGUAGE)
    assert_right(engines, stock, share)
    for engine in engines[1:]:  # the first one shares weights beside them
        engine.be_whole()
    assert_right(engines, stock, share)
    for engine in engines[1:]:
        engine.mlps.be_shared()
    assert_right(engines, stock, share)
    for engine in engines:
        engine.be_whole(2)
        pieces = len(engine.slots.copies[1]) - LAYERS
        own = {*STAGES[engine.number % 2], *range(LAYERS, LAYERS + pieces * (engine.number % 2))}
        assert engine.slots.whole == own, "the second stage has the LM head"
    assert_right(engines, stock, share)


def test_an_engine_keeps_a_part_and_slots_for_two_pieces(tmp_path: Path) -> None:
    engine = node(tmp_path, 2, weights=LANGUAGE)[1]
    (tmp_path / "without").mkdir()
    without = node(tmp_path / "without", 2, weights=DECODER)[1]
    pieces = PADDED // 2 // 16
    parts = 2 * PADDED // 2 * ROW
    slots = 2 * -(-2 * 16 * ROW // 2 // PAGE) * PAGE
    checksums = 2 * 256
    bias = PADDED * 4
    found = engine.store.resident_bytes - without.store.resident_bytes
    assert found == parts + slots + checksums + bias
    copies = engine.slots.copies[1]
    assert len(copies) == LAYERS + pieces
    for piece in range(LAYERS, LAYERS + pieces):
        (copy,) = copies[piece]
        assert copy.source.shape == (16, PLAIN.hidden)
    own = engine.mlps.kept.own.untyped_storage().data_ptr()
    member = engine.member(2)
    for layer in (member.embedding.tokens, member.head.lm_head):
        assert layer.weight.untyped_storage().data_ptr() == own, "a group has nothing of its own"
        assert layer.weight.shape == (PADDED // 2, PLAIN.hidden)


def test_pieces_that_are_not_in_their_slot_change_the_logits(
    tmp_path: Path, stock: list[torch.Tensor]
) -> None:
    engine = node(tmp_path, 2, weights=LANGUAGE)[0]
    engine.slots.copies[1][LAYERS + 1].clear()  # type: ignore[attr-defined]
    found = engine.outputs(1)
    wrong = ~torch.isclose(found[LOGITS], stock[LOGITS], rtol=1e-4, atol=1e-3).all(0)
    assert wrong.nonzero().flatten().tolist() == [*range(128 + 16, 128 + 32)], "the second piece"
    assert [is_close(*pair) for pair in zip(found, stock, strict=True)].count(False) == 2


def test_parts_in_another_order_change_what_is_computed(
    tmp_path: Path, stock: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = shared_vocabulary.gather
    monkeypatch.setattr(
        shared_vocabulary, "gather", lambda layer, parts: gather(layer, parts[::-1])
    )
    engine = node(tmp_path, 2, weights=LANGUAGE)[0]
    found = engine.outputs(1)
    assert not is_close(found[EMBEDDED], stock[EMBEDDED])
    assert is_close(found[LOGITS], stock[LOGITS])


def test_layouts_in_which_an_engine_lacks_its_rows_are_refused(tmp_path: Path) -> None:
    engine = node(tmp_path, 2, weights=LANGUAGE._replace(heads=None))[1]
    with pytest.raises(UnviewableWeights, match="engine 1 does not keep its part of TP-4"):
        engine.member(4)


def test_an_lm_head_that_is_the_embeddings_is_refused(tmp_path: Path) -> None:
    engine = SharingEngine(tmp_path, 0, 2, weights=LANGUAGE)
    head: Any = engine.dp.head
    with pytest.raises(UnviewableWeights, match="is the embeddings"):
        head.lm_head.tie_weights(engine.dp.embedding)


def test_the_rows_are_read_within_one_graph(tmp_path: Path) -> None:
    """vLLM compiles a model whole, with its embeddings."""
    engine = node(tmp_path, 4, weights=LANGUAGE)[1]
    tokens, numbers = engine.dp.embedding.tokens, torch.arange(250)  # type: ignore[union-attr]
    compiled = torch.compile(tokens, backend="eager", fullgraph=True)
    assert torch.equal(compiled(numbers), tokens(numbers))
