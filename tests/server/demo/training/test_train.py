"""Training learns, and what it writes is the model it trained."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.server.demo.training import prepare
from shoal.server.demo.training.checkpoint import SHAPE, Shape
from shoal.server.demo.training.corpus import documents
from shoal.server.demo.training.model import Llama
from shoal.server.demo.training.train import Batches, Settings, answer, save, train

TINY = Shape(vocab_size=400, hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=8)
SHORT = Settings(max_steps=40, batch_tokens=512, lengths=(32, 64), learning_rate=1e-2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return prepare.train_tokenizer(documents(1, 200), TINY.vocab_size)


def test_prepared_tokens_are_the_documents(tmp_path: Path) -> None:
    prepare.main(["--out", str(tmp_path), "--documents", "30", "--seed", "7"])
    tokenizer = Tokenizer.from_file(str(tmp_path / prepare.TOKENIZER))
    text = tokenizer.decode(prepare.read_tokens(tmp_path).tolist(), skip_special_tokens=False)
    assert text.split("<|endoftext|>")[:-1] == list(documents(7, 30))


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert "".join(tokenizer.encode("1000 12").tokens) == "1000Ġ12"
    assert len(tokenizer.encode("1000").ids) == 4


def test_rows_begin_where_documents_do() -> None:
    tokens = torch.tensor([5, 6, 0, 7, 8, 9, 0], dtype=torch.int32)
    inputs, targets = Batches(tokens, torch.Generator().manual_seed(1)).draw(50, 5)
    assert {tuple(row) for row in inputs.tolist()} == {(5, 6, 0, 7, 8), (7, 8, 9, 0, 5)}
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_training_learns(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    ids = torch.from_numpy(prepare.encode(tokenizer, documents(1, 300)).astype(np.int32))
    model = Llama(TINY)
    untrained = train(model, ids, replace(SHORT, max_steps=0))
    assert train(model, ids, SHORT) < 0.8 * untrained


def test_transformers_reads_the_model_that_was_trained(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    torch.manual_seed(0)
    model = Llama(TINY).bfloat16().float()
    save(model, tokenizer, tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("Once upon a time").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-5, rtol=1e-5)


def test_an_answer_is_text(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    text = answer(Llama(TINY), tokenizer, "Hello", max_tokens=5)
    assert len(tokenizer.encode(text).ids) <= 10


def test_the_shape_fits_every_layout() -> None:
    for degree in (2, 4, 8):
        assert SHAPE.heads % degree == SHAPE.intermediate % degree == SHAPE.vocab_size % degree == 0
    for degree in (2, 4):
        assert SHAPE.kv_heads % degree == 0
