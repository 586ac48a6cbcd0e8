"""The embeddings and the LM head of a model, of which each engine keeps the rows of some tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.weights.rules.unquantised import STOCK
from shoal.runtime.engine.weights.sharing.nested_order import rank_order
from shoal.runtime.engine.weights.sharing.pages import Pages
from shoal.runtime.engine.weights.sharing.shared_weight import (
    EMBEDDING,
    HEAD,
    WORD,
    Degree,
    SharedWeight,
)
from shoal.runtime.engine.weights.sharing.vocabulary_methods import (
    Piece,
    SharedTokens,
    StreamedHead,
    gather,
    parameter,
)
from shoal.runtime.engine.weights.sharing.weight_keeper import Keeper
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights
from shoal.runtime.engine.weights.store import layers_of
from shoal.runtime.vocabulary_sharing import head_pieces


@dataclass
class _Layer:
    """One layer of the DP model."""

    module: nn.Module
    at: torch.Tensor
    """Addresses of all of it, ``[rows, columns]``, behind which there is nothing."""
    weights: Mapping[str, SharedWeight]
    """The embeddings, or the pieces of the LM head, which the engine keeps side by side."""
    names: list[str] = field(default_factory=list)
    """Of the layer in the model, once that is complete."""

    @property
    def kind(self) -> str:
        """``EMBEDDING`` or ``HEAD``."""
        return next(iter(self.weights.values())).kind

    def kept_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return an engine's part, ``[rows, columns]``, as a view of that engine's memory."""
        weights = [*self.weights.values()]
        end = weights[-1].begin + weights[-1].part_bytes
        return weights[0].stored(memory[weights[0].begin : end])


class SharedVocabulary:
    """See the module.

    Args:
        place: this engine's, among those that share weights.
        degree: how many share weights.
        pages: reserve addresses.
        whole: has the slots.
        keeper: of all weights.
    """

    def __init__(
        self, place: int, degree: Degree, pages: Pages, whole: WholeWeights, keeper: Keeper
    ) -> None:
        self._place, self._parts, self._degree = place, degree.parts, degree
        self._pages, self._whole, self._keeper = pages, whole, keeper
        self._layers: list[_Layer] = []

    def method(self, layer: nn.Module, stock: Any) -> SharedTokens | None:
        """Return the method of a layer of the DP model; None if the layer is not shared.

        Args:
            layer: the layer, which is being made.
            stock: what vLLM would take for the checkpoint.
        """
        if not isinstance(layer, VocabParallelEmbedding) or not isinstance(stock, STOCK):
            return None
        is_divided = not layer.disable_tp and layer.parallel_group is None
        rows = layer.num_embeddings_padded
        if not is_divided or layer.num_added_embeddings or rows % self._parts:
            return None
        kind = HEAD if isinstance(layer, ParallelLMHead) else EMBEDDING
        return SharedTokens(lambda shape, dtype: self._add(layer, kind, shape, dtype))

    def _add(
        self, layer: nn.Module, kind: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Parameter:
        rows, row_bytes = shape[0] // self._parts, shape[1] * dtype.itemsize
        pieces = head_pieces(rows, row_bytes, self._parts) if kind == HEAD else 1
        begin, size = self._keeper.size, rows // pieces * row_bytes
        of_layer = f"{kind} {len(self._layers)}"
        weights = {
            f"{of_layer} piece {piece}": SharedWeight(
                layer=self._keeper.number(f"{of_layer} piece {piece}") if kind == HEAD else 0,
                kind=kind,
                shape=(shape[0] // pieces, shape[1]),
                dtype=dtype,
                degree=self._degree,
                own=self._place,
                begin=begin + piece * size,
                order=rank_order,
                checksum_at=-(-(begin + pieces * size) // WORD) * WORD + piece * WORD,
            )
            for piece in range(pieces)
        }
        for name, weight in weights.items():
            self._keeper.keep(name, weight)
            if kind == HEAD:
                self._whole.add(name, weight)
        at = self._pages.reserve(-(-shape[0] * row_bytes // self._pages.page) * self._pages.page)
        at = at[: shape[0] * row_bytes].view(dtype).view(shape)
        self._layers.append(_Layer(layer, at, weights))

        def load(loaded: torch.Tensor) -> None:
            self._keeper.allocate()
            for piece, weight in enumerate(weights.values()):
                weight.load_rows(loaded, self._place * rows + piece * rows // pieces)

        return parameter(at, load)

    def complete(self, model: nn.Module) -> None:
        """Learn the names of the layers: vLLM makes embeddings without their name."""
        modules = layers_of(model)
        for layer in self._layers:
            layer.names = [name for name, found in modules.items() if found is layer.module]

    def has(self, name: str, key: str) -> bool:
        """Return whether a tensor of the DP model stands for what engines share."""
        is_one = any(name in layer.names for layer in self._layers)
        return is_one and (key == "weight" or key.startswith("rows_"))

    def part(self, name: str, tp: int, own: torch.Tensor) -> nn.Module | None:
        """Return what rules have to know of the layer of which a layout's layer is a part.

        Args:
            name: of a layer of the model.
            tp: members of the layout.
            own: what this engine keeps.

        Returns:
            The rows that a member computes with; None if the layer is not shared.
        """
        layer = next((layer for layer in self._layers if name in layer.names), None)
        if layer is None:
            return None
        # Members of wider layouts would need other rows (``is_vocabulary_shared``).
        size = layer.at.shape[0] // min(tp, self._parts)
        first = self._place % tp * size
        part = nn.Module()
        rows = layer.kept_in(own) if tp >= self._parts else layer.at.narrow(0, first, size)
        part.register_parameter("weight", Parameter(rows, requires_grad=False))
        bias = getattr(layer.module, "bias", None)
        if bias is not None:
            bias = Parameter(bias.data.narrow(0, first, size), requires_grad=False)
        part.register_parameter("bias", bias)
        return part

    def stream_in(
        self,
        model: nn.Module,
        layout: Layout,
        kept: Mapping[int, torch.Tensor],
        *,
        has_head: bool = True,
    ) -> list[int]:
        """Let a layout of few members compute with rows that several engines keep.

        Args:
            model: the layout's; a stage may have neither embeddings nor an LM head.
            layout: the layout.
            kept: what engines keep, by their places.
            has_head: whether the member computes logits. vLLM's models with experts have an LM head
                in every stage of a pipeline, and use that of the last one.

        Returns:
            The numbers of the pieces of its LM head.
        """
        numbers: list[int] = []
        count = self._parts // layout.tp
        first = self._place % layout.tp * count
        for layer in self._layers:
            target = model.get_submodule(layer.names[0])
            if not isinstance(target, VocabParallelEmbedding):
                continue  # another stage has it
            if layer.kind == HEAD and not has_head:
                continue
            if layer.kind == EMBEDDING:
                parts = [layer.kept_in(kept[part]) for part in range(first, first + count)]
                gather(target, parts)
                continue
            head = self._streamed(layer, layout, range(first, first + count), kept)
            numbers += [piece.number for piece in head.pieces]
            target.quant_method = head
        return numbers

    def _streamed(
        self, layer: _Layer, layout: Layout, parts: range, kept: Mapping[int, torch.Tensor]
    ) -> StreamedHead:
        """Return the method of an LM head of a layout's member that computes these parts."""
        rows = layer.at.shape[0] // self._parts
        # Where all rows are computed, the engine's own are used where they are kept, not copied.
        own = None
        if layout.tp == DP.tp:
            own = self._place * rows, layer.kept_in(kept[self._place])
        streamed = [part for part in parts if own is None or part != self._place]
        size = rows // len(layer.weights)
        pieces = [
            Piece(
                weight.layer,
                [
                    (
                        (part - parts.start) * rows + number * size,
                        weight.within(self._whole.weight(name), part, self._parts),
                    )
                    for part in streamed
                ],
            )
            for number, (name, weight) in enumerate(layer.weights.items())
        ]
        return StreamedHead(layout, len(parts) * rows, own, pieces)
