"""The exchange of ``head_exchange.py`` without collectives: by members' memory.

Members write and read each other's memory over NVLink. A member writes queries, keys and values
straight to where another member computes attention from, and reads that member's outputs from where
attention left them. One barrier of all members separates writing from reading. The memory is two
slots that take turns: a member that is past an exchange's barrier knows that all members are done
with the exchange before, so the next exchange may write to that one's slot again.

NCCL needs a message buffer for every pair and channel, hundreds of megabytes for each layout, also
for the many small steps of a reduction; this exchange needs none. NCCL also takes more host time:
here an exchange is one kernel of our own (``peer_exchange_kernel.py``) and the barrier.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch
from vllm.platforms import current_platform

from shoal.runtime.engine.groups.communicators import SpGroups
from shoal.runtime.engine.groups.peer_memory import (
    WORD,
    NotSharedError,
    PeerMemory,
    Slot,
    SymmetricMemory,
    shared_memory,
)
from shoal.runtime.engine.sequence.head_exchange import HeadExchange, words_of
from shoal.runtime.engine.sequence.sp_settings import EXCHANGE, SettingError

log = logging.getLogger("shoal.engine")

_WITHOUT = f"{EXCHANGE}=nccl goes without"


def _by_nvlink(devices: Sequence[int]) -> bool:
    """Return whether NVLink connects every two, as vLLM asks for its custom all-reduce."""
    physical = current_platform.visible_device_id_to_physical_device_id
    return bool(current_platform.is_fully_connected([physical(device) for device in devices]))


def exchanges_by_peers(
    setting: str,
    devices: Sequence[int],
    *,
    can_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
    by_nvlink: Callable[[Sequence[int]], bool] = _by_nvlink,
) -> bool:
    """Return whether a group exchanges through its members' memory, not by collectives.

    Members need not ask each other: each sees all of the node's devices, so all decide alike.

    Args:
        setting: see ``exchange_setting``.
        devices: the group members' GPUs, in order; empty if they have none.
        can_access: whether a device can access another device's memory.
        by_nvlink: whether NVLink connects every two of these devices.

    Raises:
        SettingError: the setting is ``peer``, and they cannot.
    """
    if setting == "nccl" or (setting == "auto" and not devices):
        return False
    pairs = permutations(devices, 2)
    barred = next((pair for pair in pairs if not can_access(*pair)), None)
    problem = ""
    if not devices:
        problem = "there are no GPUs"
    elif barred is not None:
        problem = "GPU {} cannot access the memory of GPU {}".format(*barred)
    elif setting == "auto" and not by_nvlink(devices):
        # Members wait for each other by atomic operations, which PCIe peers may not support.
        problem = "NVLink does not connect every two of them"
    if problem and setting == "peer":
        raise SettingError(f"{EXCHANGE}=peer: {problem}")
    if problem:
        names = ", ".join(map(str, devices))
        log.info("steps by sequence of GPUs %s exchange by NCCL: %s", names, problem)
    return not problem


class PeerExchange(HeadExchange):
    """See the module. What ``to_heads`` returns is valid until the exchange after the next.

    Args:
        groups: this member's process groups; nothing is sent in them.
        memory: shared by the members of ``groups.sp``, in its order.
    """

    def __init__(self, groups: SpGroups, memory: PeerMemory) -> None:
        super().__init__(groups)
        from shoal.runtime.engine.sequence import peer_exchange_kernel  # where there is a GPU

        self._kernels = peer_exchange_kernel
        self._memory = memory
        # Views of slots in the shapes of this step. Layers are alike, so each view is made once.
        self._inputs: dict[object, tuple[list[int], Sequence[torch.Tensor]]] = {}
        self._outputs: dict[object, torch.Tensor] = {}

    def begin(self, num_tokens: int, share: int | None = None) -> None:
        """See ``HeadExchange.begin``."""
        super().begin(num_tokens, share)
        self._inputs.clear()
        self._outputs.clear()

    def connect(self, device: torch.device) -> None:
        """Exchange a token for heads and back, which compiles the kernels. Collective."""
        self.begin(self.sp)
        query, key, value = (
            torch.zeros(1, heads, WORD.itemsize, dtype=torch.uint8, device=device)
            for heads in (self.sp, self.kv_parts, self.kv_parts)
        )
        self.to_heads(query, key, value)
        self.to_tokens(self.new_heads(query, 1), query)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadExchange.gather``."""
        mine = hidden.contiguous().view(hidden.shape[0], -1).view(WORD)
        slot = self._memory.slot()
        slot.own[: mine.numel()].view_as(mine).copy_(mine)
        self._memory.publish()
        gathered = hidden.new_empty((self.sp * self.share, *hidden.shape[1:]))
        width = mine.shape[1]
        strides = (width, self.share * width)
        self._kernels.take(gathered, self.share, strides, width, slot.addresses, self._place, 0)
        return gathered[: self.num_tokens]

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See ``HeadExchange.to_heads``."""
        tensors = [_by_token(tensor) for tensor in (query, key, value)]
        slot = self._memory.slot()
        kind = (slot.own.data_ptr(), *((tensor.shape, tensor.dtype) for tensor in tensors))
        if kind not in self._inputs:
            self._inputs[kind] = self._received(slot, tensors)
        widths, heads = self._inputs[kind]
        neighbours = self.sp // self.kv_parts
        self._kernels.give(tensors, widths, slot.addresses, self._place, neighbours)
        self._memory.publish()
        return heads

    def _received(
        self, slot: Slot, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[int], Sequence[torch.Tensor]]:
        """Return how many words of a token this member keeps of each tensor, and where they go."""
        parts = (self.sp, self.kv_parts, self.kv_parts)
        widths = [words_of(t) // part for t, part in zip(tensors, parts, strict=True)]
        rows, width = self.sp * self.share, sum(widths)
        return widths, self._as_heads(slot.own[: rows * width].view(rows, width), tensors, widths)

    def new_heads(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """See ``HeadExchange.new_heads``: a tensor in memory that peers can read."""
        slot = self._memory.slot()
        kind = (slot.own.data_ptr(), heads, output.shape[2], output.dtype)
        if kind not in self._outputs:
            rows, words = self.sp * self.share, words_of(output) // output.shape[1] * heads
            own = slot.own[: rows * words].view(output.dtype)
            self._outputs[kind] = own.view(rows, heads, output.shape[2])
        return self._outputs[kind]

    def to_tokens(self, heads: torch.Tensor, output: torch.Tensor) -> None:
        """See ``HeadExchange.to_tokens``; ``heads`` came from ``new_heads``."""
        addresses = self._memory.slot().addresses
        self._memory.publish()
        width, first = words_of(heads), self._place * self.share
        strides = (self.sp * width, width)
        self._kernels.take(output, self.share, strides, width, addresses, self._place, first)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, heads, size]`` with each token's heads one after the other."""
    size = tensor.shape[2]
    return tensor if tensor.stride()[1:] == (size, 1) else tensor.contiguous()


def exchange_memory(
    group: Any, words: int, device: torch.device, *, tried: bool, required: bool
) -> SymmetricMemory | None:
    """Return the memory that a group exchanges through, or None: then it goes by collectives.

    Arguments and errors are those of ``groups.peer_memory.shared_memory``.
    """
    try:
        memory, problem = shared_memory(group, words, device, tried=tried, required=required)
    except NotSharedError as error:
        raise NotSharedError(f"{error}; {_WITHOUT}") from error
    if memory is None:
        log.warning("steps by sequence exchange by NCCL, which takes longer: %s", problem)
    return memory
