"""Hashes of the beginnings of a prompt, by which the controller tells where they may be cached.

vLLM hashes every block of 16 tokens or so, because it must find the exact block. The controller
only has to guess which unit saves the most work, and its loop must not wait for that. So it hashes
fewer and longer stretches, and it hashes the prompt's bytes as they came, without decoding a token:
equal tokens are equal bytes. A stretch is ``LEAST_BYTES`` long, and further on in the prompt a
``RESOLUTION``th of what lies before it. So a common beginning is known to one part in
``RESOLUTION``, and the number of stretches grows with the logarithm of the prompt's length.

The hash is Python's own, whose key each process draws: nobody can make two prompts collide.
"""

from collections.abc import Collection
from itertools import takewhile

import msgspec

from shoal.runtime.protocol import wire

LEAST_BYTES = 384
"""Length of the first stretches: about 128 tokens of a large vocabulary."""
RESOLUTION = 16
_MOST_BYTES = 1 << 30


def _ends() -> tuple[int, ...]:
    ends = [LEAST_BYTES]
    while ends[-1] < _MOST_BYTES:
        ends.append(ends[-1] + max(LEAST_BYTES, ends[-1] // RESOLUTION))
    return tuple(ends)


ENDS = _ends()
"""Where stretches end, in bytes; the same for all prompts."""


class PromptHashes(msgspec.Struct, frozen=True):
    """The hashes of one prompt."""

    hashes: tuple[int, ...] = ()
    """One for each end of a stretch: of all that comes before it."""
    token_bytes: float = 1.0
    """Mean bytes of a token of this prompt."""
    reads_cache: bool = True
    """Whether the request may use what is cached."""
    length: int = 0
    """The prompt's bytes."""

    def tokens(self, stretches: int) -> int:
        """Return about how many tokens lie in the first ``stretches`` stretches."""
        return int(ENDS[stretches - 1] / self.token_bytes) if stretches else 0

    def common_tokens(self, stretches: int) -> int:
        """Return about how many tokens are common with a prompt that has as many common stretches.

        The next stretch differs, or ends beyond the prompt. Its first half is taken to be common,
        because where it differs may be anywhere in it.
        """
        if not stretches:
            return 0
        start = ENDS[stretches - 1]
        end = max(start, min(ENDS[stretches], self.length))
        return int((start + end) / 2 / self.token_bytes)

    def tokens_beside(self, known: Collection[int]) -> int:
        """Return how many of its tokens are in none of some stretches, whose hashes are known."""
        common = sum(1 for _ in takewhile(known.__contains__, self.hashes))
        return self.tokens(len(self.hashes)) - self.tokens(common)


NO_HASHES = PromptHashes()


def prompt_hashes(view: wire.RequestView) -> PromptHashes:
    """Return the hashes of a request's prompt.

    As in vLLM, they begin with what else decides about the KV, such as the cache salt, which keeps
    tenants apart. A stretch in which an image begins depends on the image, too: the tokens in its
    place are those of any other image. A token has at least one byte, so an image begins no earlier
    than the byte of that number, and no stretch with its tokens is hashed without it.
    """
    content = memoryview(view.prompt)[view.prompt_header_bytes :]
    state, start, hashes = hash(view.cache_keys), 0, []
    images = [(image.mm_position.offset, image.identifier) for image in view.features]
    for end in takewhile(lambda end: end <= content.nbytes, ENDS):
        if images:
            state = hash((state, *(image for image in images if start <= image[0] < end)))
        state = hash((state, bytes(content[start:end])))
        hashes.append(state)
        start = end
    reads = view.sampling_params is None or not view.sampling_params.skips_prefix_cache
    token_bytes = content.nbytes / max(1, view.prompt_tokens)
    return PromptHashes(tuple(hashes), token_bytes, reads, content.nbytes)
