"""Where layouts of few members find whole weights of MLPs, and what memory is behind them.

While engines share weights, all layers of a kind have two slots' memory behind them, alternately.
When an engine has whole weights, each layer has its own: the part that the engine keeps, and
copies of its peers' parts. The addresses stay the same, so models need not know of a change.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.pages import Pages
from shoal.runtime.engine.weights.sharing.shard_memory import ShardMemory
from shoal.runtime.engine.weights.sharing.shared_weight import SharedWeight
from shoal.runtime.engine.weights.sharing.slots import SLOTS


class _Slot(NamedTuple):
    """Memory for one weight of one layer."""

    bytes: torch.Tensor
    file: int = -1
    """Its descriptor, if it can be behind other addresses."""


class _Copies(NamedTuple):
    """Memory of this engine's alone for copies of its peers' parts."""

    file: int
    bytes: torch.Tensor


class WholeWeights:
    """The whole weights of one engine's shared MLPs.

    Args:
        memory: makes the memory of slots and copies.
        pages: exchanges what is behind addresses; None: that cannot be done, and the addresses are
            those of the slots.
    """

    def __init__(self, memory: ShardMemory, pages: Pages | None) -> None:
        self._memory, self._pages = memory, pages
        self._slots: dict[tuple[str, int, tuple[int, int]], _Slot] = {}
        """By the kind of weight, the number of the slot, and the shape of the whole weight."""
        self._weights: dict[str, SharedWeight] = {}
        self._places: dict[str, torch.Tensor] = {}
        """The addresses of each weight that has some of its own, by its name."""
        self._copies: _Copies | None = None
        """What is filled and not in use yet."""
        self.are_whole = False
        """Whether each layer has its own weights, and none is streamed."""
        self.problem = "" if pages is not None else "this device cannot exchange memory"
        """Why the engine cannot have whole weights, in one line; "": it can."""

    def add(self, name: str, weight: SharedWeight) -> None:
        """Make addresses for a weight, with a slot behind them."""
        self._weights[name] = weight
        slot = self._slot(weight)
        if self._pages is None:
            return
        if weight.part_bytes % self._pages.page:
            self.problem = self.problem or f"the parts of {name} do not fill whole pages"
            return
        place = self._places[name] = self._pages.reserve(weight.whole_bytes)
        # Its pages count once more for these addresses, before the rest is given to KV.
        self._pages.map(place, slot.file, 0, writable=True, now=True)

    def _slot(self, weight: SharedWeight) -> _Slot:
        key = (weight.kind, weight.layer % SLOTS, weight.shape)
        if key not in self._slots:
            # Written, so that its pages count as used before the rest is given to KV.
            if self._pages is None:
                slot = _Slot(torch.zeros(weight.whole_bytes, dtype=torch.uint8))
            else:
                file, memory = self._memory.create(weight.whole_bytes)
                slot = _Slot(memory.zero_(), file)
            self._slots[key] = slot
        return self._slots[key]

    def slot(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored, in its slot: ``[rows, columns]``."""
        weight = self._weights[name]
        return weight.stored(self._slot(weight).bytes)

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored, where models find it: ``[rows, columns]``."""
        weight = self._weights[name]
        place = self._places.get(name)
        return self.slot(name) if place is None else weight.stored(place)

    # --- bytes --------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.bytes.nbytes for slot in self._slots.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of all parts that peers keep."""
        return sum(weight.whole_bytes - weight.part_bytes for weight in self._weights.values())

    @property
    def alias_bytes(self) -> int:
        """Bytes of addresses whose memory is a slot's, and counts to this process once more."""
        return sum(place.nbytes for place in self._places.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes that the engine has beside the part that it keeps."""
        return self.copied_bytes if self.are_whole else self.slot_bytes

    # --- changes ------------------------------------------------------------------------------

    def fill(self, kept: Mapping[int, torch.Tensor], place: int) -> None:
        """Copy what peers keep, while slots are in use, and compare the copies.

        If each layer has its own weights already, there is nothing to do.

        Args:
            kept: what engines keep, by their places among those that share weights.
            place: this engine's.

        Raises:
            ValueError: a copy differs from what its peer keeps.
        """
        if self.are_whole:
            return
        self.forget_copies()
        file, memory = self._memory.create(self.copied_bytes)
        self._copies = _Copies(file, memory)
        end = 0
        for name, weight in self._weights.items():
            for other in _others(weight, place):
                begin, end = end, end + weight.part_bytes
                source = kept[other][weight.begin : weight.begin + weight.part_bytes]
                self._copy(memory[begin:end], source)
                if not torch.equal(memory[begin:end], source):
                    raise ValueError(f"the copy of {name} differs from what its engine keeps")

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def forget_copies(self) -> None:
        """Give back what ``fill`` has taken, if it is not in use."""
        if self._copies is not None:
            os.close(self._copies.file)
            self._copies = None

    def use_copies(self, own: int, place: int) -> None:
        """Put each layer's own weights behind its addresses; slots are not used any more.

        Args:
            own: a descriptor of what this engine keeps.
            place: this engine's place among those that share weights.
        """
        if self.are_whole:
            return
        copies, pages = self._copies, self._pages
        assert copies is not None, "there are no copies"
        assert pages is not None, self.problem
        begin = 0
        for name, weight in self._weights.items():
            size = weight.part_bytes
            parts = self._places[name].split(size)
            pages.map(parts[weight.own], own, weight.begin, writable=False)
            for other in _others(weight, place):
                part = parts[nested_shard(other, weight.degree.parts)]
                pages.map(part, copies.file, begin, writable=False)
                begin += size
        os.close(copies.file)  # the addresses hold its memory now
        self._copies, self.are_whole = None, True
        for slot in self._slots.values():
            pages.discard(slot.bytes)

    def use_slots(self) -> None:
        """Put the slots behind the addresses of all layers, and give all copies back."""
        self.forget_copies()
        if self.are_whole and self._pages is not None:
            for name, weight in self._weights.items():
                self._pages.map(self._places[name], self._slot(weight).file, 0, writable=True)
            self.are_whole = False


def _others(weight: SharedWeight, place: int) -> list[int]:
    """Return the places of the engines that keep the other parts, in the order of reading."""
    parts = weight.degree.parts
    return [(place + step) % parts for step in range(1, parts)]
