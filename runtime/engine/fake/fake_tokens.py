"""The tokens that the fake engine makes up.

A token is a pure function of all tokens before it, as a greedy model's is, so that a lost, repeated
or reordered token shows.
"""

import zlib
from array import array
from collections.abc import Sequence

_FIRST_TOKEN = 3
_NUM_TOKENS = 253
"""Tokens lie in [3, 256): every tokenizer has them, and the first few are usually special."""


def digest_of(tokens: Sequence[int], digest: int = 0) -> int:
    """Return the digest of a sequence, or of one whose first part has this digest."""
    return zlib.crc32(array("I", tokens).tobytes(), digest)


def next_token(digest: int) -> int:
    """Return the token that follows a sequence of this digest."""
    return _FIRST_TOKEN + digest % _NUM_TOKENS


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first ``count`` output tokens of a prompt."""
    tokens: list[int] = []
    digest = digest_of(prompt)
    for _ in range(count):
        tokens.append(next_token(digest))
        digest = digest_of(tokens[-1:], digest)
    return tokens
