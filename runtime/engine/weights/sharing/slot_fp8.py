"""FP8 layers of which an engine keeps a part: one of vLLM's products for each piece of the weight.

FP8 tensor cores need both operands with the inner dimension in a row. So a part of ``down_proj`` or
``o_proj``, which has some of the inputs, cannot be stored transposed as those in 16 bits are: it is
a packed matrix of its own, ``[outputs, inputs of the part]``, and is multiplied by itself. Inputs
are quantised once, with the scales that they have without sharing. Every engine has all scales.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.utils.w8a8_utils import requantize_with_max_scale

from shoal.policies.values.layouts import DP
from shoal.runtime.engine.kernels.fp8_methods import (
    ViewedFp8,
    fp8_owner,
    multiply,
    piece_kernel,
    quantised_input,
    quantising_kernel,
)
from shoal.runtime.engine.weights.rules import fp8
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights, named
from shoal.runtime.engine.weights.sharing.shared_weight import (
    BY_INPUTS,
    DOWN,
    GATE_UP,
    QKV,
    SharedWeight,
)
from shoal.runtime.engine.weights.sharing.slot_methods import (
    Add,
    InSections,
    PartRange,
    SlotInSections,
    note_parts,
    order_by_parts,
    register_slot,
)

_LOADED = (Fp8LinearMethod, CompressedTensorsW8A8Fp8)
"""vLLM's methods and schemes of checkpoints in FP8. Those that quantise what they load need whole
weights."""
_UNIT = 16
"""What CUTLASS needs the sides of an FP8 weight to be a multiple of; vLLM would pad others."""


class SplitFp8(ViewedFp8):
    """The method of layers with ``pieces``, each of which is some of the outputs, or of the inputs.

    Args:
        method: vLLM's own method for the layer.
        kind: of the weight; of the inputs if it is one of ``BY_INPUTS``, else of the outputs.
    """

    def __init__(self, method: LinearMethodBase, kind: str) -> None:
        super().__init__(method)
        self._kind = kind

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output, ``[tokens, outputs]``.

        Args:
            layer: has its pieces.
            x: ``[tokens, inputs]``.
            bias: is added to the output. Pieces of outputs have their parts of it.
        """
        data, scale, shape = quantised_input(layer, x)
        if self._kind not in BY_INPUTS:
            outputs = [
                multiply(piece, data, scale, shape, piece.bias if bias is not None else None)
                for piece in layer.pieces
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        # Summed as members of a group sum what they have computed, but in 32 bits.
        products = (
            multiply(piece, *_inputs(piece, data, scale), shape).float() for piece in layer.pieces
        )
        total = next(products)
        for product in products:
            total = total + product
        total = total if bias is None else total + bias
        return total.to(fp8_owner(layer).fp8_linear.config.out_dtype)


class SlotFp8(SplitFp8):
    """``slot_methods.SlotMethod`` of FP8 weights with scales by tensor, channel or block.

    Args:
        method: vLLM's own method for the layer.
        name: of the layer.
        add: makes the weight.
    """

    def __init__(self, method: LinearMethodBase, name: str, add: Add) -> None:
        super().__init__(method, name.rpartition(".")[2])
        self.name, self._add = name, add
        self._weight: SharedWeight

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *rest: Any,
        **attributes: Any,
    ) -> None:
        """Create what vLLM does, and a slot in place of the weight.

        Raises:
            UnviewableWeights: vLLM's kernel keeps weights or scales in a form of its own.
        """
        # Which vLLM gives to layers by the name of their method's class.
        attributes["weight_loader"] = layer.weight_loader_v2
        self.method.create_weights(
            layer, input_size_per_partition, output_partition_sizes, *rest, **attributes
        )
        shape, dtype = tuple(layer.weight.shape), layer.weight.dtype
        with named(self.name):
            if isinstance(_kernel(layer), DeepGemmFp8BlockScaledMMKernel):
                raise UnviewableWeights(
                    "DeepGEMM keeps scales in a form of its own, of which no part can be taken; "
                    "with VLLM_USE_DEEP_GEMM=0 vLLM takes another kernel"
                )
        sections = tuple(output_partition_sizes) if isinstance(self, SlotInSections) else ()
        self._weight, parameter = self._add(shape, dtype, packed=True, sections=sections)
        with named(self.name):
            self._check_units(shape)
        register_slot(layer, parameter)
        layer.shoal_grouped = True

    def _check_units(self, shape: tuple[int, ...]) -> None:
        weight, parts = self._weight, self._weight.degree.parts
        own = [size // parts for size in weight.sections or shape[1:]]
        if self._kind in (GATE_UP, DOWN):
            own = [(shape[0] // 2 if self._kind == GATE_UP else shape[1]) // weight.degree.groups]
        for size in (*own, *shape):
            if size % _UNIT:
                raise UnviewableWeights(f"FP8 weights of {size} rows or columns would be padded")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Let vLLM process what is loaded. Of the weight itself, it changes this engine's part.

        For the rest it finds a stand-in, which it may read: there need be no memory for a slot's
        own part.

        Raises:
            UnviewableWeights: vLLM has put the weight elsewhere.
        """
        slot = layer.weight.data
        layer.weight.data = stand_in = torch.empty_like(slot)
        self._take_one_scale(layer)
        self.method.process_weights_after_loading(layer)
        with named(self.name):
            fp8.axes(layer)  # refuses kernels that change the weight's form
            if layer.weight.data_ptr() != stand_in.data_ptr():
                raise UnviewableWeights(f"{type(_kernel(layer)).__name__} repacks FP8 weights")
        layer.weight.data = slot.as_strided(layer.weight.shape, layer.weight.stride())

    def _take_one_scale(self, layer: nn.Module) -> None:
        """Give the weights of a fused layer that have a scale each the largest one.

        vLLM would do so to the whole weight, which no engine has. Here it does to the part that is
        kept, and afterwards finds scales as those of a checkpoint in which all are one weight.
        """
        scales = getattr(layer, "weight_scale", None)
        fused = {GATE_UP: 2, QKV: 3}.get(self._kind)
        if layer.weight_block_size is not None or scales is None or scales.numel() != fused:
            return
        lowest = torch.finfo(torch.float8_e4m3fn).min
        if scales[1] <= lowest:  # they are one weight already
            return
        weight = self._weight
        if weight.kept is not None and not weight.was_filled:
            times = weight.degree.groups // weight.degree.parts if self._kind == GATE_UP else 1
            widths = [weight.kept.shape[0] // (2 * times)] * 2 * times
            if self._kind == QKV:
                widths = [size // weight.degree.parts for size in weight.sections]
            requantize_with_max_scale(weight.kept, scales.data.repeat(times), widths)
        scales.data[0] = scales.max()
        scales.data[1:] = torch.finfo(torch.float32).min

    # --- ``SlotMethod`` ---------------------------------------------------------------------------

    def keep(self, layer: nn.Module, weight: SharedWeight, whole: torch.Tensor) -> None:
        """See ``SlotMethod.keep``."""
        own, parts = weight.own, weight.degree.parts
        ranges = [PartRange(0, own), PartRange(own, 1), PartRange(own + 1, parts - own - 1)]
        if weight.is_by_inputs:
            ranges = [PartRange(part, 1) for part in range(parts)]
        rows = whole.shape[0] // parts
        layer.pieces = nn.ModuleList()
        for some in ranges:
            if some.size:
                stored = whole.narrow(0, some.first * rows, some.size * rows)
                kept = weight.kept if some == (own, 1) else stored
                assert kept is not None
                layer.pieces.append(_piece(layer, weight, kept, some))

    def part(
        self, layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, parts: PartRange
    ) -> nn.Module:
        """See ``SlotMethod.part``. Several parts of inputs have only the shape of a weight."""
        return _part(layer, weight, stored, parts)

    def stream(
        self,
        target: nn.Module,
        layer: nn.Module,
        weight: SharedWeight,
        stored: torch.Tensor,
        parts: PartRange,
        pp: int,
    ) -> None:
        """See ``SlotMethod.stream``."""
        if parts.size == weight.degree.parts:
            target.pieces = layer.pieces
            target.input_scale = getattr(target, "input_scale", None)
            target.quant_method = SplitFp8(target.quant_method.method, weight.kind)
            return
        if not weight.is_by_inputs or parts.size == 1:
            return  # it is one packed matrix, of which the layer has a view
        rows = stored.shape[0] // parts.size
        pieces = (
            _piece(layer, weight, some, PartRange(parts.first + number, 1), parts.first)
            for number, some in enumerate(stored.split(rows))
        )
        target.pieces = nn.ModuleList(pieces)
        target.quant_method = SplitFp8(target.quant_method.method, weight.kind)


class SlotFusedFp8(SlotInSections, SlotFp8):
    """``slot_methods.SlotFused`` of FP8 weights. Scales are ordered as the bias is."""

    def keep(self, layer: nn.Module, weight: SharedWeight, whole: torch.Tensor) -> None:
        """See ``SlotMethod.keep``."""
        note_parts(layer, weight, PartRange(0, weight.degree.parts), DP.pp)
        with named(self.name):
            for key, axes in fp8.axes(layer).items():
                parameter = layer._parameters.get(key)
                if key == "weight" or parameter is None or axes.outputs is None:
                    continue
                rows = parameter.data.movedim(axes.outputs, 0)
                sections = [size // axes.output_block for size in weight.sections]
                order_by_parts(rows, sections, weight.degree.parts)
        super().keep(layer, weight, whole)

    def _streamed(self, target: nn.Module) -> "StreamedFusedFp8":
        return StreamedFusedFp8(target.quant_method.method)


class StreamedFusedFp8(InSections, ViewedFp8):
    """``slot_methods.StreamedFused`` of FP8 weights."""


def slot_fp8(stock: Any, layer: nn.Module, name: str, add: Add, *, is_fused: bool) -> SlotFp8:
    """Return the method of a layer for which vLLM would take ``stock``.

    Args:
        stock: that method.
        layer: of the DP model, which is being made.
        name: of the layer.
        add: makes the weight.
        is_fused: whether a part has one range of each of the layer's matrices.

    Raises:
        UnviewableWeights: the layer is quantised in another way.
    """
    scheme = fp8.scheme_of(stock, layer)
    if type(scheme) not in _LOADED:
        raise UnviewableWeights(
            f"{name}: {type(scheme).__name__} weights cannot be shared; FP8 checkpoints can"
        )
    return SlotFusedFp8(stock, name, add) if is_fused else SlotFp8(stock, name, add)


def divides_heads(stock: Any, layer: QKVParallelLinear, parts: int) -> bool:
    """Return whether the heads of so many parts are whole blocks of an FP8 layer's scales.

    Args:
        stock: what vLLM would take for the layer.
        layer: of the DP model, which is being made.
        parts: how many engines share weights.
    """
    scheme = fp8.scheme_of(stock, layer)
    if type(scheme) not in _LOADED:
        return False
    block = max(scheme.weight_block_size or [_UNIT])
    return all(size % (parts * block) == 0 for size in layer.output_sizes)


def _kernel(layer: nn.Module) -> Any:
    return quantising_kernel(fp8_owner(layer).fp8_linear)


def _inputs(
    piece: nn.Module, data: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a piece's inputs, packed, and their scales, which may be those of all inputs."""
    first, size, block = piece.begin, piece.input_size, piece.input_block
    if block > 1:
        scale = scale.narrow(1, first // block, size // block)
    return data.narrow(1, first, size).contiguous(), scale


def _part(
    layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, parts: PartRange
) -> nn.Module:
    """Return some parts of a layer, with their scales, as a processed layer has them."""
    axes = fp8.axes(layer)
    tensor = weight.of_layer(stored).detach()
    part = nn.Module()
    part.output_size, part.input_size = tensor.shape
    whole = layer.input_size if weight.is_by_inputs else layer.output_size
    size = whole // weight.degree.parts
    begin, length = parts.first * size, parts.size * size
    with named(layer.quant_method.name):
        for key, parameter in layer._parameters.items():
            value = parameter
            if key == "weight":
                value = tensor if axes[key].outputs == 0 else tensor.t()
            elif parameter is not None:
                taken = axes[key].take_inputs if weight.is_by_inputs else axes[key].take_outputs
                value = taken(parameter.data, begin, length)
            kept = None if value is None else Parameter(value, requires_grad=False)
            part.register_parameter(key, kept)
    part.quant_method, part.shoal_grouped = layer.quant_method, True
    part.weight_block_size = layer.weight_block_size
    for name in ("scheme", "input_scale"):
        if hasattr(layer, name) and not hasattr(part, name):
            setattr(part, name, getattr(layer, name))
    return part


def _piece(
    layer: nn.Module,
    weight: SharedWeight,
    stored: torch.Tensor,
    parts: PartRange,
    before: int = 0,
) -> nn.Module:
    """Return a piece of a layer with its kernel, and with scales that are packed.

    Args:
        layer: of the DP model.
        weight: its weight.
        stored: the piece, as it is stored.
        parts: which parts it is.
        before: parts of the whole weight before the first of which inputs are given.
    """
    piece = _part(layer, weight, stored, parts)
    for key, parameter in piece._parameters.items():
        if key != "weight" and parameter is not None:
            parameter.data = parameter.data.contiguous()
    piece.begin = (parts.first - before) * piece.input_size
    piece.input_block = max(axes.input_block for axes in fp8.axes(layer).values())
    piece.kernel = piece_kernel(fp8_owner(layer).fp8_linear, piece)
    return piece
