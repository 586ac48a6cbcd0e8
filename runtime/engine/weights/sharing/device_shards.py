"""``ShardMemory`` on GPUs: memory of CUDA's virtual memory management, handed on by descriptors.

Unlike memory of CUDA IPC it outlives its owner, as long as a process has it mapped or has its
descriptor. Other GPUs read it over NVLink or PCIe.
"""

from typing import Any

import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.weights.sharing.cuda_driver import CudaDriver, DriverError
from shoal.runtime.engine.weights.sharing.device_pages import tensor_at


class DeviceShards:
    """See the module. What is mapped stays mapped until the process ends.

    Args:
        device: this engine's, with its number.
        driver: of the GPUs.
    """

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device, self._driver = device, driver
        self._number = device.index or 0

    def create(self, size: int) -> tuple[int, torch.Tensor]:
        """See ``ShardMemory.create``.

        Raises:
            NotSharedError: there is not enough memory, or it cannot be handed out.
        """
        problem = f"GPU {self._number} cannot keep {size / 1e9:.2f} GB of weights that others read"
        try:
            handle = self._driver.create(self._whole(size), self._number)
            return self._driver.export(handle), self._map(handle, size, writes=True)
        except DriverError as error:
            raise NotSharedError(f"{problem} ({error})") from error

    def seal(self, file: int) -> None:
        """See ``ShardMemory.seal``: others map it to read only, so it has to be filled by now."""
        self._driver.settle()

    def open(self, file: int, size: int) -> torch.Tensor:
        """See ``ShardMemory.open``. No memory of this GPU is used.

        The tensor says that it is on this engine's device, wherever its bytes are: torch would
        make a context on another GPU to use tensors of that one.

        Raises:
            NotSharedError: this GPU cannot reach the memory, or there are not so many bytes.
        """
        try:
            return self._map(self._driver.import_memory(file), size, writes=False)
        except DriverError as error:
            raise NotSharedError(
                f"GPU {self._number} cannot read {size / 1e9:.2f} GB of weights that an engine "
                f"keeps ({error}); the GPUs that share weights have to reach each other's memory"
            ) from error

    def _map(self, handle: Any, size: int, *, writes: bool) -> torch.Tensor:
        whole = self._whole(size)
        address = self._driver.reserve(whole)
        self._driver.map_memory(address, whole, handle)
        self._driver.allow(address, whole, self._number, writes=writes)
        return tensor_at(address, size, self._device)

    def _whole(self, size: int) -> int:
        granule = self._driver.granule(self._number)
        return -(-size // granule) * granule
