"""Where layouts of few members find whole weights, and what memory is behind them.

While engines share weights, all layers of a kind have two slots' memory behind them, alternately.
When an engine has a layer whole, this has copies of its peers' parts, in memory that KV lends it.
The addresses stay the same, so models need not know of a change. The layers that are whole are
those of the engine's stage in one of the node's pipelines, or all: a pipeline of one stage.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index

from shoal.runtime.engine.weights.sharing.filling import PATIENCE_SECONDS, Filling, Part
from shoal.runtime.engine.weights.sharing.pages import Exchange, Pages
from shoal.runtime.engine.weights.sharing.shared_weight import HEAD, SharedWeight
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
        self._lent: Mapping[str, torch.Tensor] = {}
        """What KV has lent, by the weight's name: it is being filled, filled, or in use."""
        self._filling: Filling | None = None
        """What copies into it."""
        self.patience = PATIENCE_SECONDS
        """How long copies wait for steps that stream (``filling``)."""
        self.layers: frozenset[int] = frozenset()
        """The numbers of the layers that have their own weights; others are streamed."""
        self.stages: dict[int, Collection[int]] = {}
        """The numbers of the layers of this engine's stage in pipelines, by their stages."""

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

    def find_stages(self, engine: int, pipelines: Iterable[int]) -> None:
        """Find the layers of an engine's stages; all weights are known.

        The stages need not be there: an engine that comes back has no groups at first.

        Args:
            engine: its number.
            pipelines: for each pipeline of engines alone, its number of stages.
        """
        layers = {n: extract_layer_index(n) for n, w in self._weights.items() if w.kind != HEAD}
        for pp in pipelines:
            stage = engine % pp
            here = range(*get_pp_indices(max(layers.values()) + 1, stage, pp))
            # The LM head belongs to the last stage.
            self.stages[pp] = {
                weight.layer
                for name, weight in self._weights.items()
                if (layers[name] in here if name in layers else stage == pp - 1)
            }

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

    def moving_bytes(self, stages: int = 1) -> list[int]:
        """Return the bytes of memory that each weight of a stage needs, in whole pages.

        Args:
            stages: of the pipeline; 1: all weights.
        """
        return [self._places[name].slot.nbytes for name in self._of(stages)]

    def _of(self, stages: int) -> list[str]:
        """Return the names of the weights of this engine's stage."""
        if stages == 1:
            return list(self._weights)
        layers = self.stages[stages]
        return [name for name, weight in self._weights.items() if weight.layer in layers]

    @property
    def alias_bytes(self) -> int:
        """Bytes of addresses whose memory is a slot's, and counts to this process once more."""
        return sum(self.moving_bytes())

    @property
    def resident_bytes(self) -> int:
        """Bytes that the engine has beside the part that it keeps: of slots, and copies in use."""
        copies = self._lent.values() if self.layers else ()
        return sum(int(memory.nbytes) for memory in (*self._slots.values(), *copies))

    # --- changes ------------------------------------------------------------------------------

    def fill(
        self, kept: Mapping[int, torch.Tensor], lent: Sequence[torch.Tensor], stages: int = 1
    ) -> Filling | None:
        """Take memory for copies of what engines keep; return None if copies are in use.

        Args:
            kept: what engines keep, by their places among those that share weights.
            lent: memory for each weight, of ``moving_bytes``, which nothing else uses.
            stages: see ``moving_bytes``. Copies that are in use are of the same stage.
        """
        names = self._of(stages)
        if self.layers:
            assert names == list(self._lent), "copies of other layers are in use"
            return None
        if self._filling is not None:
            self._filling.give_up()
        self._lent = dict(zip(names, lent, strict=True))
        self._filling = Filling(self._parts(kept), self.patience)
        return self._filling

    def _parts(self, kept: Mapping[int, torch.Tensor]) -> dict[int, list[Part]]:
        """Return what is to be copied of each layer.

        The next engine's part comes first (peak shifting), this engine's own comes last.
        """
        layers: dict[int, list[Part]] = {}
        for name, memory in self._lent.items():
            weight, place = self._weights[name], self._places[name]
            parts = weight.degree.parts
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
        """Put the own weights of layers behind their addresses, in place of the slots."""
        if self.layers:
            return
        assert self._lent, "there are no copies"
        pairs = [(self._places[name], memory) for name, memory in self._lent.items()]
        self._pages.put([Exchange(place.at[place.moving], memory) for place, memory in pairs])
        self.layers = frozenset(self._weights[name].layer for name in self._lent)

    def use_slots(self) -> None:
        """Put the slots behind the addresses of all layers, and give KV its memory back, zeroed."""
        lent, self._lent = self._lent, {}
        filling, self._filling = self._filling, None
        if not lent:
            return
        if filling is not None:
            filling.give_up()
        with torch.inference_mode():
            for memory in lent.values():
                memory.zero_()  # attention multiplies what it masks, too: nothing may be NaN
        places = [self._places[name] for name in lent]
        moving = [Exchange(p.at[p.moving], p.slot) for p in places]
        self._pages.put(moving)  # and waits for the zeros
        self.layers = frozenset()
