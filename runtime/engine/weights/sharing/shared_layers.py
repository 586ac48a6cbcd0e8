"""The layers of a model of which each engine keeps a part, and gets the others from its peers.

SiDP, section 4. What is shared are the gated MLPs (FFN), most of a dense model's weights,
attention's projections where engines keep whole KV heads (``shared_attention``), and the vocabulary
where members have ranges of it that engines keep (``vocabulary_sharing``). Loading fills only the
engine's own part. The DP model and other layouts with fewer members than there are parts have whole
weights (``whole_weights``): slots, or copies. Wider layouts view the engine's own part.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.model_executor.utils import set_weight_attrs

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.weights.rules.fused import GroupedActivation, check_shared_mlp
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights
from shoal.runtime.engine.weights.rules.unquantised import STOCK
from shoal.runtime.engine.weights.sharing.filling import Filled, Part, rehearse
from shoal.runtime.engine.weights.sharing.kept_parts import KeptParts
from shoal.runtime.engine.weights.sharing.nested_order import (
    Heads,
    Order,
    nested_shard,
    rank_order,
    sources,
)
from shoal.runtime.engine.weights.sharing.pages import Pages
from shoal.runtime.engine.weights.sharing.shard_memory import ShardMemory
from shoal.runtime.engine.weights.sharing.shared_experts import SharedExperts
from shoal.runtime.engine.weights.sharing.shared_vocabulary import SharedVocabulary
from shoal.runtime.engine.weights.sharing.shared_weight import (
    ALIGNMENT,
    DOWN,
    EMBEDDING,
    GATE_UP,
    OUTPUT,
    QKV,
    Degree,
    SharedWeight,
)
from shoal.runtime.engine.weights.sharing.slot_fp8 import SlotFp8, divides_heads, slot_fp8
from shoal.runtime.engine.weights.sharing.slot_methods import (
    PartRange,
    SlotFused,
    SlotLinear,
    SlotMethod,
)
from shoal.runtime.engine.weights.sharing.slots import Copy, WeightSlots, stream_by, streamed
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights
from shoal.runtime.engine.weights.store import layers_of

_NUMBERED = re.compile(r".*?\.\d+(?=\.)")
"""The name of a layer of the model, in the names of its modules."""
_OF_MLPS = {GATE_UP: MergedColumnParallelLinear, DOWN: RowParallelLinear}


class SharedLayers:
    """The layers of one engine's model of which it keeps a part.

    Args:
        engine: this engine.
        degree: how many engines share weights, and the groups of ``gate_up_proj``.
        directory: the node's private directory.
        memory: what the part is kept in.
        slots: the engine's.
        pages: let the engine have whole weights, too.
    """

    def __init__(
        self,
        engine: int,
        degree: Degree,
        directory: Path,
        memory: ShardMemory,
        slots: WeightSlots,
        pages: Pages,
    ) -> None:
        self._engine, self._degree, self._place = engine, degree, engine % degree.parts
        self.slots = slots
        self.kept = KeptParts(engine, degree.parts, directory, memory)
        self.heads: Heads | None = None
        """What engines share of attention; None: each has all of it. To be set before layers."""
        self.shares_vocabulary = False
        """Whether engines share the embeddings and the LM head. To be set before layers, too."""
        self.has_adapters = False
        """Whether outputs are in vLLM's order: adapters need it. To be set before layers, too."""
        self._weights: dict[str, SharedWeight] = {}
        """By the name of the layer in the model."""
        self._methods: dict[str, SlotMethod] = {}
        self._layers: dict[str, nn.Module] = {}
        """The same layers of the DP model, once it is complete."""
        self._numbers: dict[str, int] = {}
        """Each layer's number, by the name of the module that has its MLP, or by the MLP's own."""
        self._mlps: dict[str, int] = {}
        """The number of each MLP's layer, by the MLP's name in the model."""
        self.whole = WholeWeights(pages)
        self._vocabulary = SharedVocabulary(self._place, degree, pages, self.whole, self)
        self._experts = SharedExperts(self._place, degree, self.whole, self)
        stream_by(slots)

    # --- loading ----------------------------------------------------------------------------------

    def method(self, layer: nn.Module, name: str, stock: Any) -> QuantizeMethodBase | None:
        """Return the method of a layer of the DP model; None if the layer is not shared.

        Args:
            layer: the layer, which is being made.
            name: of the layer.
            stock: what vLLM would take for the checkpoint.

        Raises:
            UnviewableWeights: weights that are quantised so cannot be shared.
        """
        if self.shares_vocabulary and (of_tokens := self._vocabulary.method(layer, stock)):
            return of_tokens
        if (of_experts := self._experts.method(layer, name, stock)) is not None:
            return of_experts
        kind, is_plain = name.rpartition(".")[2], isinstance(stock, STOCK)
        if not self._is_shared(layer, name) or not (
            is_plain or kind != QKV or divides_heads(stock, layer, self._degree.parts)
        ):
            return None
        add, is_fused = partial(self.add, name), self._is_fused(kind)
        method: SlotLinear | SlotFp8
        if is_plain:
            method = SlotFused(add) if is_fused else SlotLinear(add)
        else:
            method = slot_fp8(stock, layer, name, add, is_fused=is_fused)
        self._methods[name] = method
        return method

    def _is_fused(self, kind: str) -> bool:
        """Return whether a part of such a layer has one range of each of its matrices."""
        return kind == QKV or (kind == GATE_UP and self.has_adapters)

    def _is_shared(self, layer: nn.Module, name: str) -> bool:
        """Return whether engines keep a part of a linear layer, as far as its kind says."""
        owner, _, kind = name.rpartition(".")
        if kind == OUTPUT:
            return f"{owner}.{QKV}" in self._weights
        if kind == QKV and isinstance(layer, QKVParallelLinear):
            return self.heads is not None and layer.total_num_kv_heads == self.heads.kv_heads
        return isinstance(layer, _OF_MLPS.get(kind, ()))

    def number(self, name: str) -> int:
        """Return the number of what is in a slot at a time, which may be a new one."""
        return self._numbers.setdefault(name, len(self._numbers))

    def keep(self, name: str, weight: SharedWeight) -> None:
        """Keep a part of one more weight."""
        self._weights[name] = weight

    def number_of(self, name: str) -> int:
        """Return the number of a weight's layer, in which attention, an MLP and experts are one."""
        owner, _, kind = name.rpartition(".")
        numbered = _NUMBERED.match(owner)
        number = self.number(numbered[0] if numbered else owner)
        if any((known.layer, known.kind) == (number, kind) for known in self._weights.values()):
            number = self.number(owner)
        if kind in (GATE_UP, DOWN):
            self._mlps[owner] = number
        return number

    def add(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        packed: bool = False,
        sections: tuple[int, ...] = (),
    ) -> tuple[SharedWeight, Parameter]:
        """Return a layer's weight, and the parameter, which is a slot.

        Args:
            name: of the layer.
            shape: ``[outputs, inputs]``.
            dtype: of the elements.
            packed: see ``SharedWeight``.
            sections: see ``SharedWeight``.

        Raises:
            UnviewableWeights: it has no so many equal parts.
        """
        kind, degree = name.rpartition(".")[2], self._degree
        order: Order = nested_shard
        if kind == GATE_UP and self._is_fused(kind):
            degree = degree._replace(groups=degree.parts)
        if kind in (QKV, OUTPUT):
            assert self.heads is not None, "attention is not shared"
            order = self.heads.order
        elif (size := shape[0] // 2 if kind == GATE_UP else shape[1]) % self._degree.groups:
            raise UnviewableWeights(
                f"{name}: {size} inner units do not make {self._degree.groups} equal parts"
            )
        weight = SharedWeight(
            layer=self.number_of(name),
            kind=kind,
            shape=shape,
            dtype=dtype,
            degree=degree,
            own=order(self._place, self._degree.parts),
            begin=self.size,
            packed=packed,
            order=order,
            sections=sections,
        )
        self.keep(name, weight)
        self.whole.add(name, weight)

        def load(_: Parameter, loaded: torch.Tensor, half: Any = None) -> None:
            self.allocate()
            weight.load(loaded, half)

        parameter = Parameter(weight.of_layer(self.whole.weight(name)), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": load, "output_dim": 0, "input_dim": 1})
        return weight, parameter

    @property
    def size(self) -> int:
        """Bytes of the memory in which this engine keeps its part of all weights."""
        last = next(reversed(self._weights.values()), None)
        end = 0 if last is None else last.begin + last.kept_bytes
        return -(-end // ALIGNMENT) * ALIGNMENT

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that count to this process and that other engines keep, or that count twice."""
        return self.whole.alias_bytes + self.kept.peer_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of shared weights in the engine's own memory."""
        return self.size + self.whole.resident_bytes

    def has(self, name: str) -> bool:
        """Return whether a tensor of the DP model is one of the shared weights, or of a piece."""
        layer, _, key = name.replace(".base_layer", "").rpartition(".")
        of_layer = layer.partition(".pieces.")[0] in self._weights and key in ("weight", "own")
        of_experts = name.removesuffix("_packed") in self._weights
        return of_layer or of_experts or self._vocabulary.has(layer, key)

    def allocate(self) -> None:
        """Find or make memory for this engine's part: all layers are known, none is loaded."""
        if self.kept.allocate(self.size):
            for weight in self._weights.values():
                weight.keep_in(self.kept.own, filled=self.kept.is_found)

    def complete(self, model: nn.Module, *, dummy: bool) -> None:
        """Give this engine's part to its peers, and get theirs. The model's weights are loaded.

        Args:
            model: the DP model, arranged.
            dummy: whether weights were made up instead of loaded.

        Raises:
            UnviewableWeights: an MLP cannot be shared, or was not loaded.
            TimeoutError: a peer did not come.
            ValueError: what a peer keeps is not what it has taken the checksum of.
        """
        self._check(model)
        self.allocate()
        if dummy:
            self._experts.make_up(initialize_single_dummy_weight)
        for name, weight in self._weights.items():
            if dummy:
                weight.make_up(initialize_single_dummy_weight)
            if weight.missing or weight.kept is None:
                raise UnviewableWeights(f"{name}: the checkpoint has not all of it")
        modules = layers_of(model)
        for name, method in self._methods.items():
            self._layers[name] = modules[name]
            method.keep(self._layers[name], self._weights[name], self.whole.weight(name))
        self._vocabulary.complete(model)
        self._experts.complete()
        if not self.kept.is_found:
            with torch.inference_mode():
                for weight in self._weights.values():
                    weight.keep_checksum(self.kept.own)
        self.kept.hand_out()
        self.kept.meet_peers(self._rehearse)

    def _check(self, model: nn.Module) -> None:
        mlps = {name: m for name, m in model.named_modules() if name in self._mlps}
        if not mlps and not self._experts:
            raise UnviewableWeights(
                f"{type(model).__name__} has no gated MLPs or experts to be shared"
            )
        for name, mlp in mlps.items():
            check_shared_mlp(name, mlp, grouped=not self.has_adapters)

    def _rehearse(self, memory: torch.Tensor) -> None:
        """Hold what a peer keeps against its checksums (``filling.rehearse``)."""
        parts = [(n, w.bytes_in(memory), w) for n, w in self._weights.items()]
        rehearse([Part(n, kept, kept, None, w.checksum_in(memory)) for n, kept, w in parts])

    # --- layouts ----------------------------------------------------------------------------------

    def part(self, full: FullLayer, shard: Shard) -> tuple[FullLayer, Shard]:
        """Return of which layer a member's layer is a part, and which part.

        Args:
            full: a layer of the DP model.
            shard: what part of it a member of a layout has, if the layer is not shared.
        """
        order: Order = nested_shard
        if full.name in self._mlps and self.has_adapters:
            return full, shard  # activations are vLLM's
        if full.name in self._mlps:
            # What the rule needs of an MLP is how many groups of rows its activation reads.
            kept = nn.Module()
            groups = self._degree.groups // min(shard.of, self._degree.parts)
            kept.act_fn = GroupedActivation(nn.Identity(), groups)
        elif full.name in self._weights:
            weight, layer = self._weights[full.name], self._layers[full.name]
            stored, parts = self._of_member(full.name, shard.of)
            kept, order = self._methods[full.name].part(layer, weight, stored, parts), weight.order
        elif (rows := self._vocabulary.part(full.name, shard.of, self.kept.own)) is not None:
            kept, order = rows, rank_order
        elif (experts := self._experts.part(full.name, shard.of)) is not None:
            kept = experts
        else:
            return full, shard
        within = self._within(shard.of, order)
        kept.shoal_grouped = getattr(kept, "shoal_grouped", True) or within.of == 1
        find = lambda name: kept.get_parameter(name.rpartition(".")[2])  # noqa: E731
        return FullLayer(full.name, kept, find), within

    def place(self, name: str, tp: int) -> int | None:
        """Return which of its parts this engine computes of a layer; None if none is shared."""
        weight = self._weights.get(name)
        return None if weight is None else weight.order(self._engine % tp, tp)

    def _of_member(self, name: str, tp: int) -> tuple[torch.Tensor, PartRange]:
        """Return the parts that this engine computes in a layout, or that these are a part of."""
        weight, parts = self._weights[name], self._degree.parts
        if tp >= parts:
            assert weight.kept is not None, "its weights are not there yet"
            return weight.kept, PartRange(weight.own, 1)
        count, wanted = parts // tp, weight.order(self._place % tp, tp)
        stored = weight.within(self.whole.weight(name), wanted, tp)
        return stored, PartRange(wanted * count, count)

    def _within(self, tp: int, order: Order) -> Shard:
        """Return the part that this engine computes in a layout, of what it keeps or has streamed.

        Raises:
            UnviewableWeights: it is not among what the engine keeps.
        """
        parts = self._degree.parts
        if tp <= parts:
            return Shard(0, 1)
        kept = order(self._place, parts) * (tp // parts)
        wanted = order(self._engine % tp, tp)
        if not 0 <= wanted - kept < tp // parts:
            raise UnviewableWeights(f"engine {self._engine} does not keep its part of TP-{tp}")
        return Shard(wanted - kept, tp // parts)

    # --- changes ----------------------------------------------------------------------------------

    def fill_whole(self, lent: Sequence[torch.Tensor], stages: int = 1) -> Callable[[], Filled]:
        """Take memory for copies of what engines keep; see ``WholeWeights.fill``.

        Returns:
            Copies, in any thread, and says how; steps that stream take part (``Filling.finish``).
        """
        filling = self.whole.fill(self.kept.by_place, lent, stages)
        if filling is None:
            return partial(Filled, 0, 0, 0.0, 0.0)
        self.slots.keep(filling)
        return partial(filling.finish, self.slots.copier)

    def be_whole(self) -> None:
        """Compute with whole weights where there are copies, which have been made, from now on."""
        self.slots.settle()
        self.whole.use_copies()
        self.slots.leave_out(self.whole.layers)

    def be_shared(self) -> None:
        """Stream from now on what peers keep, and give the memory of all copies of it back."""
        self.slots.keep(None)
        self.whole.use_slots()
        self.slots.leave_out(())

    def stream_in(self, model: nn.Module, layout: Layout) -> None:
        """Have a layout's model stream what its engine does not keep: in layouts with few members.

        Args:
            model: the layout's model, whose weights are there; it has run no step.
            layout: the layout.
        """
        if layout.tp >= self._degree.parts:
            return
        tp, pp = layout.tp, layout.pp
        self.slots.copies[tp] = self._copies(tp)
        modules = layers_of(model)  # of a stage: those of its own layers
        here = [name for name in self._methods if name in modules]
        if layout != DP:
            for name in here:
                of_member = self._of_member(name, tp)
                self._methods[name].stream(
                    modules[name], self._layers[name], self._weights[name], *of_member, pp
                )
        is_last = self._engine % layout.world_size >= layout.answering_member
        pieces = self._vocabulary.stream_in(model, layout, self.kept.by_place, has_head=is_last)
        waits = {weight.layer for weight in self._weights.values() if weight.kind == QKV}
        of_experts = self._experts.stream_in(modules, layout, waits)
        if pp > 1:
            numbers = sorted({self._weights[name].layer for name in here} | of_experts)
            self.slots.stages[tp, pp] = [*numbers, *pieces]
            known = self.whole.stages if tp == DP.tp else {}
            assert known.get(pp, {*numbers, *pieces}) == {*numbers, *pieces}, "of another stage"
        for name, number in self._mlps.items():
            if name in modules and number not in waits:  # else its attention waits (``InSections``)
                mlp = modules[name]
                mlp.forward = streamed(mlp.forward, tp, number, pp)

    def _copies(self, tp: int) -> dict[int, list[Copy]]:
        """Return how each layer gets into its slot, and pieces of the LM head: attention first."""
        copies: dict[int, list[Copy]] = {number: [] for number in self._numbers.values()}
        by_order: dict[Order, list[str]] = {}
        for name, weight in self._weights.items():
            if weight.kind != EMBEDDING:  # its rows are read where they are kept
                by_order.setdefault(weight.order, []).append(name)
        for order, names in by_order.items():
            for source in sources(self._place, self._degree.parts, tp, order):
                is_own = source.place == self._place
                if tp == DP.tp and is_own:
                    continue  # its layers use it where it is kept (``SlotLinear``)
                for name in names:
                    weight = self._weights[name]
                    target = self.whole.slot(name, order(source.place, self._degree.parts))
                    kept = weight.part_in(self.kept.by_place[source.place])
                    copies[weight.layer].append(Copy(target, kept, is_own))
        return copies
