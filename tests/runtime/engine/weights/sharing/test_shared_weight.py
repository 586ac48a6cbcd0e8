"""Which damage to a part of a weight its checksum shows."""

import pytest
import torch

from shoal.runtime.engine.weights.sharing.shared_weight import checksum

CHUNK = 4096


def drawn(size: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize("size", [3 * CHUNK, CHUNK + 512, 8, 6, 5])
def test_a_byte_anywhere_changes_it(size: int) -> None:
    part = drawn(size)
    before = int(checksum(part))
    assert int(checksum(part.clone())) == before
    for at in {0, 1, 7 % size, size // 2, size - 1}:
        part[at] ^= 0x80
        assert int(checksum(part)) != before, at
        part[at] ^= 0x80


def test_chunks_that_changed_places_change_it() -> None:
    part = drawn(4 * CHUNK)
    assert int(checksum(part.roll(CHUNK))) != int(checksum(part))


def test_the_highest_byte_counts_in_every_chunk() -> None:
    """An even number times it would vanish in some chunks."""
    part = torch.zeros(600 * CHUNK, dtype=torch.uint8)
    for chunk in (0, 255, 256, 511, 512):
        part[chunk * CHUNK + 7] = 0x80
        assert int(checksum(part)) != 0, chunk
        part[chunk * CHUNK + 7] = 0


def test_words_of_a_chunk_that_changed_places_do_not_change_it() -> None:
    part = drawn(CHUNK)
    assert int(checksum(part.roll(8))) == int(checksum(part))
