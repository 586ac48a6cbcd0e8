"""Memory that outlives its owner, and that nobody else can write to."""

import mmap
import os

import pytest
import torch

from shoal.runtime.engine.weights.sharing.shard_memory import HostShards

SIZE = 8192


def test_others_read_what_was_written_also_when_its_owner_has_gone() -> None:
    memory = HostShards("test")
    file, own = memory.create(SIZE)
    own.copy_(torch.arange(SIZE) % 251)
    other = os.dup(file)
    seen = memory.open(other, SIZE)
    os.close(file)
    del own
    assert torch.equal(seen, (torch.arange(SIZE) % 251).to(torch.uint8))
    os.close(other)


def test_sealed_memory_is_read_only_and_is_sealed_once() -> None:
    memory = HostShards("test")
    file, _ = memory.create(SIZE)
    mmap.mmap(file, SIZE).close()  # not sealed yet
    memory.seal(file)
    memory.seal(file)
    with pytest.raises(PermissionError):
        mmap.mmap(file, SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    assert memory.open(file, SIZE).numel() == SIZE
    os.close(file)


def test_memory_of_another_size_is_refused() -> None:
    memory = HostShards("test")
    file, _ = memory.create(SIZE)
    with pytest.raises(ValueError, match="8192 bytes, not 4096"):
        memory.open(file, SIZE // 2)
    os.close(file)
