"""Prompts of an exact number of tokens, made from pieces of one token each."""

import functools
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shoal.loadgen.client import Client, ClientError, Prompt
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.workload import Arrival, Block

DEFAULT_TOKEN_IDS = range(100, 1000)
"""Ids to draw from if the server does not tell its tokenizer's ids. All but small vocabularies have
these ids, and special tokens are usually not among them."""
WORDS = (
    *(" the", " of", " and", " to", " in", " is", " that", " for", " it", " as", " was", " with"),
    *(" be", " by", " on", " not", " he", " this", " are", " or", " his", " from", " at", " which"),
    *(" but", " have", " an", " had", " they", " you", " were", " their", " one", " all", " we"),
    *(" can", " her", " has", " there", " been", " if"),
    *(" more", " when", " will", " would", " who"),
    *(" so", " no", " value", " name", " object", " string", " list", " number", " type", " class"),
)
"""Candidates for pieces of text: short common words, which are one token in most tokenizers."""
MIN_WORDS = 4
"""The fewest different pieces that make a varied text."""
_REPEATS = 8
_OWN, _SHARED = 0, 1
_CACHED_BLOCKS = 4096

CountTokens = Callable[[str], Awaitable[int]]


class Prompts:
    """Draws prompts. The same seed gives the same prompts, and the same block the same tokens.

    Args:
        pieces: token ids or texts, each of which is one token at any place in a prompt.
        seed: of what is drawn.
        overhead: tokens that the server adds to a prompt.
        probes: the requests that were sent to find the overhead.
    """

    def __init__(
        self,
        pieces: Sequence[int] | Sequence[str],
        seed: int,
        *,
        overhead: int = 0,
        probes: Sequence[Exchange] = (),
    ) -> None:
        self.probes = probes
        self._pieces = pieces
        self._seed = seed
        self._overhead = overhead
        self._block = functools.lru_cache(_CACHED_BLOCKS)(self._make_block)

    def make(self, index: int, arrival: Arrival) -> Prompt:
        """Return the prompt of the workload's request with this index.

        It is the request's own content, or else text or token ids, like the pieces, and then has
        at least one piece.
        """
        if arrival.content is not None:
            return arrival.content
        count = max(1, arrival.prompt_tokens - self._overhead)
        drawn = [self._block(block) for block in arrival.prefix]
        rest = count - sum(map(len, drawn))
        if rest > 0:
            drawn.append(self._draw(rest, _OWN, index))
        chosen = np.concatenate(drawn)[:count].tolist()
        pieces = self._pieces
        if isinstance(pieces[0], str):
            return "".join([str(pieces[k]) for k in chosen])
        return [int(pieces[k]) for k in chosen]

    def _make_block(self, block: Block) -> NDArray[np.int64]:
        return self._draw(block.tokens, _SHARED, zlib.crc32(block.id.encode()))

    def _draw(self, count: int, kind: int, which: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, kind, which))
        return rng.integers(len(self._pieces), size=count)


async def token_prompts(client: Client, seed: int) -> Prompts:
    """Return prompts of token ids, those of ``WORDS`` if the server has a ``/tokenize`` route."""
    try:
        ids: Sequence[int] = sorted(set(await _tokenize(client, "".join(WORDS))))
    except ClientError:
        ids = DEFAULT_TOKEN_IDS
    return Prompts(ids, seed)


async def text_prompts(client: Client, seed: int, tokenizer: Path | None = None) -> Prompts:
    """Return prompts of text that have exactly the asked number of tokens for the server.

    This sends the server one short request, to see how many tokens it adds.

    Args:
        client: of the server.
        seed: of what is drawn.
        tokenizer: the model's ``tokenizer.json``; None: the server's ``/tokenize`` route.

    Raises:
        ClientError: there is no such tokenizer, or too few of the words are one token.
    """
    words = await _single_tokens(_counter(client, tokenizer), seed)
    probe = Exchange(0, Arrival(0.0, _REPEATS, 1))
    await client.send(probe, client.body(words[0] * _REPEATS, 1))
    if probe.outcome is not Outcome.OK or probe.prompt_tokens is None:
        raise ClientError(
            f"a first request ended as {probe.outcome}: {probe.error or 'it tells no usage'}"
        )
    return Prompts(words, seed, overhead=probe.prompt_tokens - _REPEATS, probes=[probe])


async def _single_tokens(count: CountTokens, seed: int) -> list[str]:
    """Return the words that are one token at any place.

    Raises:
        ClientError: there are too few such words.
    """
    lengths = {word: await count(word * _REPEATS) for word in WORDS}
    # Pieces have at least one token each; what the shortest total has beyond is added to any text.
    shortest = min(lengths.values())
    words = [word for word, length in lengths.items() if length == shortest]
    mixed = random.Random(seed).choices(words, k=len(WORDS))
    if len(words) < MIN_WORDS or await count("".join(mixed)) != shortest - _REPEATS + len(mixed):
        raise ClientError("this tokenizer's texts have no exact length: send token ids")
    return words


def _counter(client: Client, tokenizer: Path | None) -> CountTokens:
    if tokenizer is None:

        async def count(text: str) -> int:
            return len(await _tokenize(client, text))

        return count
    try:
        local = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises nothing more exact
        raise ClientError(f"cannot read {tokenizer}: {error}") from error

    async def count_here(text: str) -> int:
        return len(local.encode(text))

    return count_here


async def _tokenize(client: Client, text: str) -> list[int]:
    answer = await client.ask(
        "POST",
        "/tokenize",
        {"model": client.model, "prompt": text, "add_special_tokens": False},
    )
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens:
        raise ClientError("/tokenize answered without tokens: give the model's --tokenizer")
    return tokens
