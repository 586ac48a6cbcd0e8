"""Where layouts of few members find whole weights, and what memory is behind them.

While engines share weights, all layers of a kind have two slots' memory behind them, alternately.
When an engine has whole weights, each layer has copies of its peers' parts, in memory that KV lends
it. The addresses stay the same, so models need not know of a change.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shoal.runtime.engine.weights.sharing.filling import PATIENCE_SECONDS, Filling, Part
from shoal.runtime.engine.weights.sharing.pages import Exchange, Pages
from shoal.runtime.engine.weights.sharing.shared_weight import SharedWeight
from shoal.runtime.engine.weights.sharing.slots import SLOTS


class _Place(NamedTuple):
    """The addresses of one weight, and its slot. Both are uint8, and fill whole pages."""

    at: torch.Tensor
    """Of the whole weight. Nothing is ever behind those outside of ``moving``."""
    slot: torch.Tensor
    """Memory of as many bytes as ``moving``."""
    moving: slice
    """The part behind which a slot or a copy can be, in whole pages."""


class WholeWeights:
    """The whole weights of one engine's shared layers.

    DP computes with the engine's own part where it is kept. So if two engines share weights, slots
    and copies have the other one's part only. Among more engines there are TP layouts that need
    this engine's part beside others, so they have the whole weight.

    Args:
        pages: makes the slots, and exchanges what is behind addresses.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._slots: dict[tuple[str, int, int], torch.Tensor] = {}
        """By the kind of weight, the number of the slot, and the bytes of the whole weight."""
        self._weights: dict[str, SharedWeight] = {}
        self._places: dict[str, _Place] = {}
        """Of each weight, by its name."""
        self._lent: Sequence[torch.Tensor] | None = None
        """What KV has lent for each weight: it is being filled, filled, or in use."""
        self._filling: Filling | None = None
        """What copies into it."""
        self.patience = PATIENCE_SECONDS
        """How long copies wait for steps that stream (``filling``)."""
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
        at, slot = self._pages.reserve(size), self._slot(weight, end - begin)
        self._weights[name] = weight
        place = self._places[name] = _Place(at, slot, slice(begin, end))
        self._pages.put([Exchange(place.at[place.moving], place.slot)])

    def _slot(self, weight: SharedWeight, size: int) -> torch.Tensor:
        key = (weight.kind, weight.layer % SLOTS, weight.whole_bytes)
        if key not in self._slots:
            # Written, so that its pages count as used before the rest is given to KV.
            self._slots[key] = self._pages.create([size]).zero_()
        return self._slots[key]

    def slot(self, name: str, part: int) -> torch.Tensor:
        """Return one part of a weight as it is stored, in its slot: ``[rows, columns]``."""
        weight, place = self._weights[name], self._places[name]
        begin = part * weight.part_bytes - place.moving.start
        return weight.stored(place.slot[begin : begin + weight.part_bytes])

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored, where models find it: ``[rows, columns]``.

        If two engines share weights, this engine's own part of it must not be touched.
        """
        weight = self._weights[name]
        return weight.stored(self._places[name].at[: weight.whole_bytes])

    # --- bytes --------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots.values())

    @property
    def moving_bytes(self) -> list[int]:
        """Bytes of memory that each weight needs for its copy, in whole pages."""
        return [place.slot.nbytes for place in self._places.values()]

    @property
    def alias_bytes(self) -> int:
        """Bytes of addresses whose memory is a slot's, and counts to this process once more."""
        return sum(self.moving_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the engine has beside the part that it keeps."""
        return self.slot_bytes + (sum(self.moving_bytes) if self.are_whole else 0)

    # --- changes ------------------------------------------------------------------------------

    def fill(
        self, kept: Mapping[int, torch.Tensor], lent: Sequence[torch.Tensor]
    ) -> Filling | None:
        """Take memory for copies of what engines keep; return None if copies are in use.

        Args:
            kept: what engines keep, by their places among those that share weights.
            lent: memory for each weight, of ``moving_bytes``, which nothing else uses.
        """
        if self.are_whole:
            return None
        if self._filling is not None:
            self._filling.give_up()
        self._lent = lent
        self._filling = Filling(self._layers(kept, lent), self.patience)
        return self._filling

    def _layers(
        self, kept: Mapping[int, torch.Tensor], lent: Sequence[torch.Tensor]
    ) -> dict[int, list[Part]]:
        """Return what is to be copied of each layer.

        The next engine's part comes first (peak shifting), this engine's own comes last.
        """
        layers: dict[int, list[Part]] = {}
        for (name, weight), memory in zip(self._weights.items(), lent, strict=True):
            place, parts = self._places[name], weight.degree.parts
            own = weight.holders[weight.own]
            for step in range(1, parts if parts == 2 else parts + 1):
                holder = (own + step) % parts
                begin = weight.order(holder, parts) * weight.part_bytes
                end, first = begin + weight.part_bytes, place.moving.start
                part = Part(
                    name=name,
                    target=memory[begin - first : end - first],
                    source=weight.bytes_in(kept[holder]),
                    slot=None if holder == own else place.slot[begin - first : end - first],
                    checksum=weight.checksum_in(kept[holder]),
                )
                layers.setdefault(weight.layer, []).append(part)
        return layers

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
        filling, self._filling = self._filling, None
        if lent is None:
            return
        if filling is not None:
            filling.give_up()
        with torch.inference_mode():
            for memory in lent:
                memory.zero_()  # attention multiplies what it masks, too: nothing may be NaN
        places = self._places.values()
        moving = [Exchange(p.at[p.moving], p.slot) for p in places]
        self._pages.put(moving)  # and waits for the zeros
        self.are_whole = False
