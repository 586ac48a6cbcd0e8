"""What engines keep weights in, what copies them, and what moves memory: on CPUs, and on GPUs."""

import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.weights.sharing.cuda_driver import CudaDriver
from shoal.runtime.engine.weights.sharing.device_pages import DevicePages
from shoal.runtime.engine.weights.sharing.device_shards import DeviceShards
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.sharing.shard_memory import HostShards, ShardMemory
from shoal.runtime.engine.weights.sharing.slots import Copier, HostCopier
from shoal.runtime.engine.weights.sharing.stream_copier import StreamCopier


def memory_and_copier(name: str, device: torch.device) -> tuple[ShardMemory, Copier]:
    """Return both for a device.

    Args:
        name: see ``HostShards``.
        device: this engine's, on GPUs with its number.

    Raises:
        DriverError: CUDA's driver cannot be called.
    """
    if device.type == "cpu":
        return HostShards(name), HostCopier()
    driver = CudaDriver()
    return DeviceShards(device, driver), StreamCopier(device, driver)


def pages_on(device: torch.device) -> HostPages | DevicePages:
    """Return what exchanges memory on a device; errors are those of ``memory_and_copier``."""
    return HostPages() if device.type == "cpu" else DevicePages(device, CudaDriver())


def check_reach(engine: int, share: int) -> None:
    """Find out before anything is loaded that a GPU cannot read the others' weights.

    Args:
        engine: whose GPU it is; engines and GPUs have the same numbers.
        share: how many adjacent engines share weights.

    Raises:
        NotSharedError: it cannot reach the memory of one of them.
    """
    first = engine - engine % share
    for peer in set(range(first, first + share)) - {engine}:
        if not torch.cuda.can_device_access_peer(engine, peer):
            raise NotSharedError(
                f"--share-weights {share}: GPU {engine} cannot reach the memory of GPU {peer}"
            )
