import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shoal.loadgen.bench.dummy_model import built_in_shapes, has_experts, read_shape, write_model

SHAPE = read_shape("llama-3-8b")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_model(directory, SHAPE)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Grüße, 1 + 1 = 2\n"

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_id_beyond_the_bytes_streams_as_text_of_its_own(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    beyond_bytes = range(258, SHAPE["vocab_size"])
    ids = [*beyond_bytes[:2], *draw.sample(beyond_bytes, 100), beyond_bytes[-1]]
    stream = DecodeStream(ids=draw.sample(beyond_bytes, 64), skip_special_tokens=True)

    texts = [stream.step(tokenizer, token) for token in ids]

    # A step without text leaves the stream with its whole context to decode again.
    assert all(texts)
    assert len(set(texts)) == len(ids)
    assert tokenizer.get_vocab_size() == SHAPE["vocab_size"]


def test_which_shapes_have_experts() -> None:
    assert {name for name in built_in_shapes() if has_experts(read_shape(name))} == {
        "gpt-oss-20b",
        "qwen3-30b-a3b",
    }
