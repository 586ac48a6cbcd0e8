"""Make the training data: draw the corpus, train the tokenizer on it, turn it into token ids."""

import argparse
import lzma
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.server.demo.training.chat import END_OF_TEXT, SPECIAL_TOKENS
from shoal.server.demo.training.checkpoint import SHAPE
from shoal.server.demo.training.corpus import documents

TOKENS = "tokens.u16.xz"
TOKENIZER = "tokenizer.json"
SEED = 11
DOCUMENTS = 300_000
TOKENIZER_DOCUMENTS = 20_000
"""The tokenizer learns from this many documents; more would not change it much."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer; every digit is a token of its own, for arithmetic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.uint16]:
    """Return the ids of all texts in one row, each text with an end-of-text token behind it."""
    end = [SPECIAL_TOKENS.index(END_OF_TEXT)]
    ids = (np.array(tokenizer.encode(text).ids + end, dtype=np.uint16) for text in texts)
    return np.concatenate(list(ids))


def read_tokens(directory: Path) -> NDArray[np.uint16]:
    """Return the ids that ``main`` wrote to ``directory``.

    Raises:
        OSError: they cannot be read.
    """
    return np.frombuffer(lzma.decompress((directory / TOKENS).read_bytes()), dtype="<u2")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tokenizer and the token ids to the directory named in ``argv``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    first = islice(documents(args.seed, args.documents), TOKENIZER_DOCUMENTS)
    tokenizer = train_tokenizer(first, SHAPE.vocab_size)
    tokenizer.save(str(args.out / TOKENIZER))
    tokens = encode(tokenizer, documents(args.seed, args.documents))
    (args.out / TOKENS).write_bytes(lzma.compress(tokens.astype("<u2").tobytes()))
    print(f"{args.documents} documents, {len(tokens)} tokens")


if __name__ == "__main__":
    main()
