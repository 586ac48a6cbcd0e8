"""Where layouts of few members find whole weights of MLPs, and what memory is behind them.

While engines share weights, all layers of a kind have two slots' memory behind them, alternately.
When an engine has whole weights, each layer has copies of its peers' parts, in memory that KV lends
it. The addresses stay the same, so models need not know of a change.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch

from shoal.runtime.clock import Clock
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.pages import Exchange, Pages
from shoal.runtime.engine.weights.sharing.shared_weight import SharedWeight
from shoal.runtime.engine.weights.sharing.slots import SLOTS

_COMPARED = 32 << 20
"""Bytes that are compared at once: the comparison needs as much memory again."""
_AWAITED = 16
"""Copies that are begun before the host waits for them. While steps stream, a wait takes about as
long as a step, because a GPU takes up copies in the order in which they were begun."""


class _Place(NamedTuple):
    """The addresses of one weight, and its slot. Both are uint8, and fill whole pages."""

    at: torch.Tensor
    slot: torch.Tensor
    moving: slice
    """The part behind which a copy can be, in whole pages."""


class WholeWeights:
    """The whole weights of one engine's shared MLPs.

    DP computes with the engine's own part where it is kept. So if two engines share weights, only
    the other one's part is copied. Among more engines there are TP layouts that need this engine's
    part beside others, so the whole weight is.

    Args:
        pages: makes the slots, and exchanges what is behind addresses.
        clock: seconds.
    """

    def __init__(self, pages: Pages, clock: Clock = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._slots: dict[tuple[str, int, tuple[int, int]], torch.Tensor] = {}
        """By the kind of weight, the number of the slot, and the shape of the whole weight."""
        self._weights: dict[str, SharedWeight] = {}
        self._places: dict[str, _Place] = {}
        """Of each weight, by its name."""
        self._lent: Sequence[torch.Tensor] | None = None
        """What KV has lent for each weight: it is being filled, filled, or in use."""
        self._filling = threading.Lock()
        self.are_whole = False
        """Whether each layer has its own weights, and none is streamed."""

    def add(self, name: str, weight: SharedWeight) -> None:
        """Make addresses for a weight, with a slot behind them."""
        page = self._pages.page
        size = -(-weight.whole_bytes // page) * page
        begin, end = 0, size
        if weight.degree.parts == 2:
            begin = (1 - weight.own) * weight.part_bytes // page * page
            end = -(-(2 - weight.own) * weight.part_bytes // page) * page
        edges = sorted({0, begin, end, size})
        slot = self._slot(weight, [after - before for before, after in pairwise(edges)])
        self._weights[name] = weight
        place = self._places[name] = _Place(self._pages.reserve(size), slot, slice(begin, end))
        parts = (slice(*part) for part in pairwise(edges))
        self._pages.put([Exchange(place.at[part], slot[part]) for part in parts])

    def _slot(self, weight: SharedWeight, pieces: Sequence[int]) -> torch.Tensor:
        key = (weight.kind, weight.layer % SLOTS, weight.shape)
        if key not in self._slots:
            # Written, so that its pages count as used before the rest is given to KV.
            self._slots[key] = self._pages.create(pieces).zero_()
        return self._slots[key]

    def slot(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored, in its slot: ``[rows, columns]``."""
        return self._stored(name, self._places[name].slot)

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored, where models find it: ``[rows, columns]``."""
        return self._stored(name, self._places[name].at)

    def _stored(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        weight = self._weights[name]
        return weight.stored(memory[: weight.whole_bytes])

    # --- bytes --------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots.values())

    @property
    def moving_bytes(self) -> list[int]:
        """Bytes of memory that each weight needs for its copy, in whole pages."""
        return [place.moving.stop - place.moving.start for place in self._places.values()]

    @property
    def alias_bytes(self) -> int:
        """Bytes of addresses whose memory is a slot's, and counts to this process once more."""
        return sum(place.at.nbytes for place in self._places.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes that the engine has beside the part that it keeps."""
        return self.slot_bytes + (sum(self.moving_bytes) if self.are_whole else 0)

    # --- changes ------------------------------------------------------------------------------

    def fill(
        self, kept: Mapping[int, torch.Tensor], lent: Sequence[torch.Tensor]
    ) -> Callable[[], list[float]]:
        """Take memory for copies of what engines keep; nothing happens if copies are in use.

        Args:
            kept: what engines keep, by their places among those that share weights.
            lent: memory for each weight, of ``moving_bytes``, which nothing else uses.

        Returns:
            Copies, in any thread, while slots are in use; returns the seconds that each round of
            copies took. Raises ``ValueError`` if a copy differs from what its engine keeps, or if
            the memory has been given back meanwhile.
        """
        if self.are_whole:
            return list
        self._lent = lent
        beside = _beside(lent[0].device)

        def copy() -> list[float]:
            times = [self._clock()]
            with self._filling, beside, torch.inference_mode():
                copies = self._copies(kept, lent)
                while begun := list(islice(copies, _AWAITED)):
                    if self._lent is not lent:
                        raise ValueError("the change of memory has been given up")
                    for _, parts in begun:
                        self._copy(*parts)
                    differ = torch.stack([self._differ(*parts) for _, parts in begun]).tolist()
                    if any(differ):
                        name, _ = begun[differ.index(True)]
                        raise ValueError(f"the copy of {name} differs from what its engine keeps")
                    times.append(self._clock())
            return [after - before for before, after in pairwise(times)]

        return copy

    def _copies(
        self, kept: Mapping[int, torch.Tensor], lent: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield where each part comes to lie, and where it is, by the name of its weight.

        The next engine's part comes first (peak shifting), this engine's own comes last.
        """
        for (name, weight), memory in zip(self._weights.items(), lent, strict=True):
            size, parts = weight.part_bytes, weight.degree.parts
            own = nested_shard(weight.own, parts)  # the order is its own inverse
            for step in range(1, parts if parts == 2 else parts + 1):
                holder = (own + step) % parts
                begin = nested_shard(holder, parts) * size - self._places[name].moving.start
                source = kept[holder][weight.begin : weight.begin + size]
                yield name, (memory[begin : begin + size], source)

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    @staticmethod
    def _differ(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return whether any byte differs, as a tensor: the device may not have looked yet."""
        pairs = zip(target.split(_COMPARED), source.split(_COMPARED), strict=True)
        return torch.stack([(copy != kept).any() for copy, kept in pairs]).any()

    def use_copies(self) -> None:
        """Put each layer's own weights behind its addresses; slots are not used any more."""
        if self.are_whole:
            return
        assert self._lent is not None, "there are no copies"
        pairs = zip(self._places.values(), self._lent, strict=True)
        self._pages.put([Exchange(place.at[place.moving], memory) for place, memory in pairs])
        self.are_whole = True

    def use_slots(self) -> None:
        """Put the slots behind the addresses of all layers, and give KV its memory back, zeroed."""
        lent, self._lent = self._lent, None
        if lent is None:
            return
        with self._filling, torch.inference_mode():  # whoever copies into it has noticed
            for memory in lent:
                memory.zero_()  # attention multiplies what it masks, too: nothing may be NaN
        places = self._places.values()
        moving = [Exchange(p.at[p.moving], p.slot[p.moving]) for p in places]
        self._pages.put(moving)  # and waits for the zeros
        self.are_whole = False


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """On GPUs, return a stream beside steps, which is after all that this thread has begun."""
    if device.type == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    beside: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return beside
