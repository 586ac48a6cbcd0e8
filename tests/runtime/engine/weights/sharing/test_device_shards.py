"""Memory of GPUs that others read, with a driver that is simulated on the host."""

import os
import subprocess
import sys

import pytest
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.weights.sharing.device_shards import DeviceShards
from tests.runtime.engine.weights.sharing.simulated_cuda import GRANULE, HostDriver

SIZE = GRANULE + 512
VALUES = (torch.arange(SIZE) % 251).to(torch.uint8)
HOST = torch.device("cpu")


def test_others_read_what_was_written_also_when_its_owner_has_let_go() -> None:
    driver = HostDriver()
    memory = DeviceShards(HOST, driver)
    file, own = memory.create(SIZE)
    assert own.numel() == SIZE
    own.copy_(VALUES)
    memory.seal(file)
    other = os.dup(file)
    os.close(file)
    seen = memory.open(other, SIZE)
    assert torch.equal(seen, VALUES)
    assert seen.device == HOST
    os.close(other)
    whole = 2 * GRANULE
    assert driver.seen == [
        *[("create", whole, 0), ("export",), ("map", whole), ("allow", whole, 0, True)],
        ("settle",),  # all is written before others are given the descriptor
        *[("import",), ("map", whole), ("allow", whole, 0, False)],
    ]


WRITES = """
import torch
from shoal.runtime.engine.weights.sharing.device_shards import DeviceShards
from tests.runtime.engine.weights.sharing.simulated_cuda import HostDriver
memory = DeviceShards(torch.device("cpu"), HostDriver())
file, own = memory.create(64)
own.fill_(1)
print("filled", flush=True)
memory.open(file, 64).fill_(1)
print("written", flush=True)
"""


@pytest.mark.slow
def test_what_an_engine_has_opened_it_cannot_write() -> None:
    ended = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("filled\n", -11)


@pytest.mark.parametrize("call", ["create", "export", "map", "allow"])
def test_memory_that_cannot_be_made_is_named_in_one_line(call: str) -> None:
    driver = HostDriver()
    driver.refuses = call
    line = rf"^GPU 0 cannot keep 0.00 GB of weights that others read \({call}: NOT_PERMITTED\)$"
    with pytest.raises(NotSharedError, match=line):
        DeviceShards(HOST, driver).create(SIZE)


@pytest.mark.parametrize("call", ["import", "map", "allow"])
def test_a_gpu_that_cannot_reach_it_is_named_in_one_line(call: str) -> None:
    driver = HostDriver()
    memory = DeviceShards(HOST, driver)
    file, _ = memory.create(SIZE)
    driver.refuses = call
    line = rf"^GPU 0 cannot read 0.00 GB of .* \({call}: NOT_PERMITTED\); the GPUs that share "
    with pytest.raises(NotSharedError, match=line):
        memory.open(file, SIZE)
    os.close(file)


def test_memory_that_is_too_small_is_refused() -> None:
    memory = DeviceShards(HOST, HostDriver())
    file, _ = memory.create(SIZE)
    with pytest.raises(NotSharedError, match="too large"):
        memory.open(file, SIZE + 2 * GRANULE)
    os.close(file)
