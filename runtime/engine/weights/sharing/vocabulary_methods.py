"""Embeddings and an LM head of which an engine keeps the rows of some tokens.

Rows of the embeddings are read where engines keep them, on GPUs over the link: a step needs one for
each of its tokens. The LM head is needed whole, and is streamed in pieces.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Parameter, functional
from vllm.model_executor.utils import set_weight_attrs

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.rules.unquantised import PlainEmbedding
from shoal.runtime.engine.weights.sharing.slot_methods import register_slot
from shoal.runtime.engine.weights.sharing.slots import use_weights

Add = Callable[[tuple[int, int], torch.dtype], Parameter]
"""Makes the weights of a layer, ``[rows, columns]``, and returns what stands for them in it."""


class SharedTokens(PlainEmbedding):
    """The method of a vocabulary layer of the DP model.

    Args:
        add: see ``Add``.
    """

    def __init__(self, add: Add) -> None:
        super().__init__(meta=False)
        self._add = add

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Let what is loaded for the weight go to this engine's part."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        register_slot(layer, self._add(shape, params_dtype))

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Refuse.

        Raises:
            UnviewableWeights: always.
        """
        raise UnviewableWeights("an LM head that is the embeddings cannot be shared")


# --- embeddings -----------------------------------------------------------------------------------


class GatheredRows(PlainEmbedding):
    """The method of embeddings whose rows several engines keep, in ``layer.rows_of``."""

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, ``[*, columns]``.

        Args:
            layer: has been given parts (``gather``).
            input_: numbers of rows, from the first row of the first part.
        """
        first, *others = (getattr(layer, name) for name in layer.rows_of)
        last = first.shape[0] - 1
        found = functional.embedding(input_.clamp(max=last), first)
        for number, part in enumerate(others, 1):
            rows = input_ - number * first.shape[0]
            here = functional.embedding(rows.clamp(0, last), part)
            found = torch.where((rows >= 0).unsqueeze(-1), here, found)
        return found


def gather(layer: nn.Module, parts: Sequence[torch.Tensor]) -> None:
    """Let embeddings read rows where engines keep them.

    Args:
        layer: of any layout.
        parts: what engines keep of its rows, in the order of rows.
    """
    layer.rows_of = tuple(f"rows_{number}" for number in range(len(parts)))
    for name, part in zip(layer.rows_of, parts, strict=True):
        layer.register_buffer(name, part, persistent=False)
    layer.quant_method = GatheredRows(meta=True)
    layer.use_fused_embedding = False  # which would not ask the method


# --- LM head --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What of an LM head is in a slot at a time."""

    number: int
    """What ``use_weights`` calls it."""
    rows: Sequence[tuple[int, torch.Tensor]]
    """Where in the outputs some rows begin, and these rows."""


class StreamedHead(PlainEmbedding):
    """The method of an LM head that is streamed.

    Args:
        layout: the layout.
        outputs: of the layer.
        own: where in the outputs the rows begin that the engine uses where it keeps them, and these
            rows; None: it uses none.
        pieces: the others, in the order of their numbers.
    """

    def __init__(
        self,
        layout: Layout,
        outputs: int,
        own: tuple[int, torch.Tensor] | None,
        pieces: Sequence[Piece],
    ) -> None:
        super().__init__(meta=True)
        self._tp, self._pp = layout.tp, layout.pp
        self._outputs, self._own, self.pieces = outputs, own, pieces

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of ``x``, ``[*, hidden]``, over this rank's vocabulary."""
        flat = x.reshape(-1, x.shape[-1])
        logits = x.new_empty(flat.shape[0], self._outputs)

        def multiply(begin: int, rows: torch.Tensor) -> None:
            torch.mm(flat, rows.t(), out=logits.narrow(1, begin, rows.shape[0]))

        if self._own is not None:
            multiply(*self._own)
        for piece in self.pieces:
            use_weights(flat, self._tp, piece.number, self._pp)
            for some in piece.rows:
                multiply(*some)
        logits = logits.view(*x.shape[:-1], self._outputs)
        return logits if bias is None else logits + bias


def parameter(at: torch.Tensor, load: Callable[[torch.Tensor], None]) -> Parameter:
    """Return what stands for a weight of which nothing is read.

    Args:
        at: addresses of all of it, as it is stored; there may be nothing behind them.
        load: takes what the checkpoint has of it.
    """
    made = Parameter(at, requires_grad=False)

    def load_weight(_: Parameter, loaded: torch.Tensor) -> None:
        load(loaded)

    set_weight_attrs(made, {"weight_loader": load_weight, "output_dim": 0, "input_dim": 1})
    return made
