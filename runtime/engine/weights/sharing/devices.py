"""What engines keep their parts of the weights in, and what copies them: on CPUs, and on GPUs."""

import torch

from shoal.runtime.engine.weights.sharing.cuda_driver import CudaDriver
from shoal.runtime.engine.weights.sharing.device_shards import DeviceShards
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
