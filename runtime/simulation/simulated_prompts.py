"""The prompts of a simulated node: token ids that are equal where the workload says so."""

import functools
import random
from collections.abc import Sequence

import msgspec

from shoal.runtime.protocol import wire

Block = tuple[str, int]
"""A stretch of a prompt: its id, and its number of tokens. The same id stands for the same tokens,
of which a shorter stretch has the first ones."""
_BLOCKS_KEPT = 4096
_WIDE = b"\xcd"
"""Head of an integer of two bytes in msgpack."""


class SimulatedPrompts:
    """Makes prompts. The same stretch has the same tokens in each; all others are random."""

    def __init__(self) -> None:
        self._block = functools.lru_cache(_BLOCKS_KEPT)(_draw)

    def make(self, name: str, tokens: int, prefix: Sequence[Block] = ()) -> msgspec.Raw:
        """Return a prompt in msgpack.

        Args:
            name: names the request, whose own tokens no other one has.
            tokens: how many tokens the prompt has.
            prefix: what it begins with; the prompt may end within this.
        """
        content = bytearray()
        for block, length in prefix:
            content += self._block(f"block {block}", length)
        missing = tokens - len(content) // 3
        if missing > 0:
            content += _draw(f"request {name}", missing)
        head = b"\xdd" + tokens.to_bytes(4, "big")
        return msgspec.Raw(head + bytes(content[: 3 * tokens]))


def _draw(name: str, tokens: int) -> bytes:
    """Return random ids of two bytes each, in msgpack."""
    drawn = random.Random(name).randbytes(2 * tokens)
    content = bytearray(_WIDE * 3 * tokens)
    content[1::3] = drawn[::2]
    content[2::3] = drawn[1::2]
    return bytes(content)


def wire_request(
    request_id: str,
    prompt: msgspec.Raw,
    output_tokens: int,
    priority: int,
    arrival_time: float = 0.0,
) -> bytes:
    """Return an ``EngineCoreRequest`` as vLLM encodes it."""
    sampling = {"max_tokens": output_tokens}
    return wire.encode_request(
        request_id, prompt, sampling, priority=priority, arrival_time=arrival_time
    )
