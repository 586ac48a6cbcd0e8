"""Every layout's weights in the bytes of one: zero-copy views of the DP model's parameters.

Flying Serving, 4.1 (model weights manager). The DP model is loaded by vLLM and owns every byte. The
TP-p model is vLLM's own model class with parameters that are views for this member's rank:

- row-parallel weights: a strided range of columns;
- column-parallel and vocabulary weights: a range of rows;
- ``gate_up_proj``: the DP rows are regrouped once, ``[gate_0|up_0|gate_1|up_1|...]`` with one group
  per member of the largest group, so that every rank's shard is one range and one GEMM, and the
  activation behind it reads the grouped output in place;
- ``qkv_proj`` and any other fused layer: one range per logical part (``partitioned_linear``). This
  leaves the DP layout exactly vLLM's and covers replicated KV heads, where parts repeat across
  ranks.

How a layer applies its weights is vLLM's ``quant_method`` seam, so no vLLM class is changed. Which
ranges a quantised layer's tensors have, ``fp8`` knows; what multiplies them, ``fp8_methods``.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
    resolve_quant_method,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from shoal.runtime.engine.kernels import fp8_methods, partitioned_linear
from shoal.runtime.engine.kernels.linear_tiles import MAX_RANGES
from shoal.runtime.engine.weights import fp8
from shoal.runtime.engine.weights.shards import PLAIN, Axes, UnviewableWeights

VIEW_LOAD_FORMAT = "shoal_view"
"""``load_format`` of every layout but DP."""

WEIGHT_SCHEME = "gate_up=grouped,other_fused=partitioned_linear"
"""Order of the rows that a layout's code was compiled for, and what multiplies them.

vLLM's compile cache does not see weight order: this string, with the number of groups, goes into
``VllmConfig.additional_config`` and so into its key.
"""


# --- how layers apply weights ---------------------------------------------------------------------


def _plain_gemm() -> Callable[..., torch.Tensor]:
    """Return vLLM's GEMM for this platform, without the CPU backend's weight prepacking.

    Prepacking empties the parameter, and with it every view.
    """
    if current_platform.is_cpu():
        return lambda _layer, x, weight, bias: nn.functional.linear(x, weight, bias)
    return dispatch_unquantized_gemm()  # type: ignore[no-any-return]


class PlainLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """Owns (DP) or receives (``meta``: other layouts) one plain weight."""

    def __init__(self, *, meta: bool) -> None:
        self._meta = meta
        self._gemm_impl = _plain_gemm()

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the weight, without storage if it is to become a view."""
        with _meta_if(self._meta):
            super().create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weight as it is: views need its bytes in place."""


class PlainEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """``PlainLinear`` for vocabulary embeddings and the LM head."""

    def __init__(self, *, meta: bool) -> None:
        self._meta = meta
        self._gemm_impl = _plain_gemm()

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the weight, without storage if it is to become a view."""
        with _meta_if(self._meta):
            super().create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weight as it is: views need its bytes in place."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of ``x``, ``[tokens, hidden]``, over this rank's vocabulary."""
        return self._gemm_impl(layer, x, layer.weight, bias)


class Part(nn.Module):  # type: ignore[misc]
    """One logical part of a fused layer, such as this rank's keys: tensors and no code."""


class SplitLinear(PlainLinear):
    """A fused layer as one GEMM for each of ``layer.parts``."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        outputs = [self._gemm_impl(layer, x, part.weight, part.bias) for part in layer.parts]
        return torch.cat(outputs, dim=-1)


class RowRangesLinear(PlainLinear):
    """A fused layer as one operator over the ranges of rows of ``layer.parts``."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        return partitioned_linear.linear(x, *_ranges(layer))


def _ranges(layer: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = [part.weight for part in layer.parts]
    biases = [part.bias for part in layer.parts]
    return weights, [] if biases[0] is None else biases


class SharedWeights(QuantizationConfig):  # type: ignore[misc]
    """vLLM's ``quant_config`` of a layout: picks the methods of its layers.

    Args:
        views: whether the layout's tensors are views of the DP model's.
        inner: vLLM's own configuration of a quantised checkpoint; answers all that is not about
            this layout.
    """

    def __init__(self, *, views: bool, inner: QuantizationConfig | None = None) -> None:
        self._inner = inner
        super().__init__()
        self._views = views

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """Parts of each fused layer; vLLM sets it."""
        return self._mapping

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self._mapping = mapping
        if self._inner is not None:
            self._inner.packed_modules_mapping = mapping

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers that the checkpoint's configuration names."""
        if self._inner is not None:
            self._inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        """Return how the checkpoint names its KV cache scales."""
        return (self._inner or QuantizationConfig).get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return which of the checkpoint's tensors have other names, or are not needed."""
        return (self._inner or QuantizationConfig).get_checkpoint_weight_mapper()

    def __getattr__(self, name: str) -> Any:
        """Answer from the checkpoint's configuration what only some configurations have."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear, vocabulary or attention layer; None for anything else.

        Raises:
            UnviewableWeights: the checkpoint's quantisation of the layer is not supported.
        """
        method = resolve_quant_method(self._inner, layer, prefix) if self._inner else None
        if isinstance(method, BaseKVCacheMethod):
            return fp8.ViewedKVScales(method.quant_config) if self._views else method
        plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if not isinstance(method, plain):
            fp8.check_method(method, layer, prefix)
            return fp8_methods.ViewedFp8(method) if self._views else method
        if isinstance(layer, LinearBase):
            return PlainLinear(meta=self._views)
        if isinstance(layer, VocabParallelEmbedding):
            return PlainEmbedding(meta=self._views)
        return None

    def get_name(self) -> str:
        """Return the name vLLM logs."""
        return "shoal"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the activation types that plain GEMMs take."""
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device will do."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """There is no file behind this configuration."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SharedWeights":
        """Not made from a checkpoint.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("SharedWeights is set by the layout, not read from a checkpoint")


@contextmanager
def _meta_if(meta: bool) -> Iterator[None]:
    if not meta:
        yield
        return
    with torch.device("meta"):
        yield


# --- grouped gate_up ------------------------------------------------------------------------------


class GroupedActivation(nn.Module):  # type: ignore[misc]
    """``SiluAndMul`` on grouped rows: ``[T, G*(g|u)]`` read in place as ``[T*G, g|u]``."""

    def __init__(self, activation: nn.Module, groups: int) -> None:
        super().__init__()
        self.activation = activation
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, intermediate]`` in stock order for ``x`` of ``[T, 2*intermediate]``."""
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        if torch.compiler.is_compiling():
            # Of the two-dimensional view Inductor makes a kernel that takes twice as long.
            gate, up = x.view(*x.shape[:-1], self.groups, 2, -1).unbind(-2)
            return (nn.functional.silu(gate) * up).view(shape)
        return self.activation(x.view(-1, x.shape[-1] // self.groups)).view(shape)


def regroup_rows(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return ``[gate|up]`` rows as ``[gate_0|up_0|...]``: group g holds the g-th part of each.

    Args:
        weight: ``[2 * intermediate, ...]``, gate rows first.
        groups: number of groups; must divide ``intermediate``.
    """
    halves = weight.view(2, groups, -1, *weight.shape[1:])
    return halves.transpose(0, 1).reshape(weight.shape)


def _groupable(module: nn.Module) -> bool:
    return isinstance(getattr(module, "gate_up_proj", None), MergedColumnParallelLinear) and (
        isinstance(getattr(module, "act_fn", None), SiluAndMul)
    )


def group_gate_up(model: nn.Module, groups: int) -> None:
    """Regroup every ``gate_up_proj`` of the DP model in place and mend the activation behind it.

    Args:
        model: the DP model, loaded.
        groups: size of the largest group the node can form.

    Raises:
        UnviewableWeights: the groups would cut through blocks of a block-wise scale.
    """
    if groups == 1:
        return
    for name, module in list(model.named_modules()):
        if not _groupable(module):
            continue
        projection = module.gate_up_proj
        with _named(f"{name}.gate_up_proj"):
            for key, axes in _axes_of(projection).items():
                _regroup(projection._parameters.get(key), axes.outputs, groups)
        module.act_fn = GroupedActivation(module.act_fn, groups)
        projection.shoal_grouped = True


def _regroup(tensor: torch.Tensor | None, outputs: int | None, groups: int) -> None:
    if tensor is None or outputs is None:
        return
    if tensor.shape[outputs] % (2 * groups):
        raise UnviewableWeights(f"its rows, or whole blocks of them, do not make {groups} groups")
    rows = tensor.data.movedim(outputs, 0)
    rows.copy_(regroup_rows(rows, groups))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the layer's name before what is wrong with it."""
    try:
        yield
    except UnviewableWeights as error:
        raise UnviewableWeights(f"{name.lstrip('.')}: {error}") from error


# --- views ----------------------------------------------------------------------------------------


def _axes_of(full: nn.Module) -> Mapping[str, Axes]:
    return fp8.axes(full) if fp8.is_fp8(full) else PLAIN


Take = Callable[[Axes, torch.Tensor], torch.Tensor]
"""Picks a shard of one tensor."""


def _view_tensors(target: nn.Module, full: nn.Module, take: Take) -> None:
    """Let the parameters of ``target`` be shards of those of ``full``."""
    axes = _axes_of(full)
    for key in target._parameters:
        target._parameters[key] = None
    for key, tensor in full._parameters.items():
        view = None
        if tensor is not None:
            if key not in axes:
                raise UnviewableWeights(f"{key} is split in a way Shoal does not know")
            view = Parameter(take(axes[key], tensor.data), requires_grad=False)
        target.register_parameter(key, view)


def _outputs(full: nn.Module) -> int:
    dimension = _axes_of(full)["weight"].outputs
    return int(full.weight.shape[dimension])


def _view_outputs(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    size = _outputs(full) // degree
    _view_tensors(layer, full, lambda axes, t: axes.take_outputs(t, rank * size, size))


def _view_inputs(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    # The bias has no inputs and stays whole: vLLM adds it on rank 0 only.
    size = full.input_size // degree
    _view_tensors(layer, full, lambda axes, t: axes.take_inputs(t, rank * size, size))


def _part_ranges(full: LinearBase, rank: int, degree: int) -> list[tuple[int, int]]:
    """Return the first output and the size of this rank's share of each part of a fused layer."""
    sizes = list(full.output_sizes)
    shares = [(rank, degree)] * len(sizes)
    if isinstance(full, QKVParallelLinear):
        # With more members than KV heads, neighbours hold the same head (num_kv_head_replicas).
        replicas = max(1, degree // full.total_num_kv_heads)
        shares[1:] = [(rank // replicas, degree // replicas)] * 2
    begins = itertools.accumulate(sizes, initial=0)
    return [
        (begin + index * (size // of), size // of)
        for begin, size, (index, of) in zip(begins, sizes, shares, strict=False)
    ]


def _view_parts(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    layer.parts = nn.ModuleList()
    for begin, size in _part_ranges(full, rank, degree):
        part = Part()
        _view_tensors(part, full, lambda axes, t, b=begin, n=size: axes.take_outputs(t, b, n))  # type: ignore[misc]
        layer.parts.append(part)
    for key in layer._parameters:
        layer._parameters[key] = None


def _choose_method(layer: nn.Module) -> None:
    """Let a layer be computed in a way that its views allow."""
    if fp8.is_fp8(layer):
        fp8_methods.bind_kernels(layer)
    elif hasattr(layer, "parts"):
        if _in_one_launch(layer):
            _pair_parts(layer)
            layer.quant_method = RowRangesLinear(meta=True)
        else:
            layer.quant_method = SplitLinear(meta=True)


def _pair_parts(layer: nn.Module) -> None:
    """Make two parts of QKV one, where ``partitioned_linear`` can read them as one tensor."""
    weights, biases = (partitioned_linear.paired(ranges) for ranges in _ranges(layer))
    layer.parts = nn.ModuleList()
    for index, weight in enumerate(weights):
        part = Part()
        part.weight = Parameter(weight, requires_grad=False)
        part.bias = Parameter(biases[index], requires_grad=False) if biases else None
        layer.parts.append(part)


def _in_one_launch(layer: nn.Module) -> bool:
    on_gpu: bool = layer.parts[0].weight.is_cuda
    return on_gpu and len(layer.parts) <= MAX_RANGES


def _view_replicated(layer: nn.Module, full: nn.Module, name: str) -> None:
    for key, parameter in layer._parameters.items():
        other = full._parameters.get(key)
        if parameter is None:
            continue
        if other is None or other.shape != parameter.shape:
            raise UnviewableWeights(f"{name}.{key} is split in a way Shoal does not know")
        layer._parameters[key] = other
    for key, buffer in layer._buffers.items():
        other = full._buffers.get(key)
        if buffer is not None and other is not None and other.shape == buffer.shape:
            layer._buffers[key] = other


def view_weights(
    model: nn.Module, full: nn.Module, rank: int, degree: int, heads: int | None = None
) -> None:
    """Turn the parameters of a TP-``degree`` model into views of the DP model's.

    Args:
        model: vLLM's model for this rank, built with ``SharedWeights(views=True)``.
        full: the DP model, loaded and grouped.
        rank: tensor parallel rank.
        degree: tensor parallel size.
        heads: which shard of the attention heads it holds, unless the one of its rank
            (``head_order.head_shard``).

    Raises:
        UnviewableWeights: a layer's split is not one of those the module names.
    """
    full_modules = dict(full.named_modules())
    layers = list(model.named_modules())
    attention = {_parent(name) for name, layer in layers if isinstance(layer, QKVParallelLinear)}
    for name, layer in layers:
        other = full_modules.get(name)
        if other is None:
            raise UnviewableWeights(f"{name} exists in TP-{degree} only")
        of_heads = _parent(name) in attention and isinstance(
            layer, QKVParallelLinear | RowParallelLinear
        )
        shard = heads if of_heads and heads is not None else rank
        _view_layer(name, layer, other, shard, degree)
    for name, layer in layers:
        activation = getattr(full_modules.get(name), "act_fn", None)
        if isinstance(activation, GroupedActivation):
            layer.act_fn = GroupedActivation(layer.act_fn, activation.groups // degree)
    _check_no_meta(model)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _view_layer(name: str, layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    with _named(name):
        if _view_shard(layer, full, rank, degree):
            _choose_method(layer)
            return
        if isinstance(layer, Attention):
            fp8.share_kv_scales(layer, full)
    if isinstance(layer, LinearBase) and not isinstance(layer, ReplicatedLinear):
        raise UnviewableWeights(f"{name} ({type(layer).__name__}) cannot be viewed")
    _view_replicated(layer, full, name)


def _view_shard(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> bool:
    """View this rank's shard of a layer's tensors; return False if the layer has none."""
    if isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
        grouped = getattr(full, "shoal_grouped", False)
        (_view_outputs if grouped else _view_parts)(layer, full, rank, degree)
    elif isinstance(layer, RowParallelLinear):
        _view_inputs(layer, full, rank, degree)
    elif isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding):
        _view_outputs(layer, full, rank, degree)
    elif isinstance(layer, ReplicatedLinear) and fp8.is_fp8(layer):
        _view_tensors(layer, full, lambda _axes, tensor: tensor)
    else:
        return False
    return True


def _check_no_meta(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta]
    if left:
        raise UnviewableWeights(f"no bytes behind {', '.join(left[:3])}")


def owned_bytes(model: nn.Module, full: nn.Module) -> int:
    """Return the parameter bytes of ``model`` that do not lie in storages of ``full``."""
    shared = {p.untyped_storage().data_ptr() for p in full.parameters()}
    return sum(
        p.numel() * p.element_size()
        for p in model.parameters()
        if p.untyped_storage().data_ptr() not in shared
    )


def compile_kernels(model: nn.Module) -> None:
    """Compile what the layers of a viewed model launch, once for each shape of a layer."""
    shapes: set[Any] = set()
    for layer in model.modules():
        if fp8.is_fp8(layer):
            fp8_methods.warm_up(layer, shapes)
        if isinstance(getattr(layer, "quant_method", None), RowRangesLinear):
            weights, biases = _ranges(layer)
            shape = (*(weight.shape for weight in weights), bool(biases))
            if shape not in shapes:
                shapes.add(shape)
                partitioned_linear.warm_up(weights, biases)


def register_view_loader(
    full_model: Callable[[], nn.Module], head_shard: Callable[[int, int], int]
) -> None:
    """Register ``VIEW_LOAD_FORMAT`` with vLLM's model loaders.

    Args:
        full_model: returns this process's DP model.
        head_shard: the shard of the attention heads that a rank of a degree holds.
    """

    class ViewLoader(BaseModelLoader):  # type: ignore[misc]
        """Builds a layout's model without storage and points it at the DP model's bytes."""

        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(load_config)

        def download_model(self, model_config: ModelConfig) -> None:
            """Nothing to fetch: the DP model is in memory."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            """Nothing to load: see ``load_model``."""

        def load_model(
            self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
        ) -> nn.Module:
            from vllm.distributed.parallel_state import get_tp_group

            group = get_tp_group()
            device = torch.device(vllm_config.device_config.device_type)
            with set_default_torch_dtype(model_config.dtype), device:
                model = initialize_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            rank, degree = group.rank_in_group, group.world_size
            view_weights(model, full_model(), rank, degree, head_shard(rank, degree))
            compile_kernels(model)
            process_weights_after_loading(model, model_config, device)
            return model.eval()

    register_model_loader(VIEW_LOAD_FORMAT)(ViewLoader)
