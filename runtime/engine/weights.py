"""Every layout's weights in the bytes of one: zero-copy views of the DP model's parameters.

Flying Serving, 4.1 (model weights manager). The DP model is loaded by vLLM and owns every byte. The
TP-p model is vLLM's own model class with parameters that are views for this member's rank:

- row-parallel weights: a strided range of columns;
- column-parallel and vocabulary weights: a range of rows;
- ``gate_up_proj``: the DP rows are regrouped once, ``[gate_0|up_0|gate_1|up_1|...]`` with one group
  per member of the largest group, so that every rank's shard is one range and one GEMM, and the
  activation behind it reads the grouped output in place;
- ``qkv_proj`` and any other fused layer: one range, and one GEMM, per logical part. This leaves the
  DP layout exactly vLLM's and covers replicated KV heads, where parts repeat across ranks.

How a layer applies its weights is vLLM's ``quant_method`` seam, so no vLLM class is changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
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
)
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

VIEW_LOAD_FORMAT = "shoal_view"
"""``load_format`` of every layout but DP."""

WEIGHT_SCHEME = "gate_up=grouped,other_fused=split"
"""Order of the rows that a layout's code was compiled for.

vLLM's compile cache does not see weight order: this string, with the number of groups, goes into
``VllmConfig.additional_config`` and so into its key.
"""


class UnviewableWeights(ValueError):
    """A layer whose weights another layout cannot view; the message names it."""


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


class SplitLinear(PlainLinear):
    """A fused layer as one GEMM per logical part: ``part_weights[i]`` views the full weight."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        outputs = [
            self._gemm_impl(layer, x, weight, part_bias)
            for weight, part_bias in zip(layer.part_weights, layer.part_biases, strict=True)
        ]
        return torch.cat(outputs, dim=-1)


class SharedWeights(QuantizationConfig):  # type: ignore[misc]
    """vLLM's ``quant_config`` of a layout: picks the methods above for its linear layers."""

    def __init__(self, *, views: bool) -> None:
        super().__init__()
        self._views = views

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear or vocabulary layer; None for anything else."""
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
        grouped = x.view(-1, x.shape[-1] // self.groups)
        return self.activation(grouped).view(*x.shape[:-1], x.shape[-1] // 2)


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
    """
    if groups == 1:
        return
    for module in list(model.modules()):
        if not _groupable(module):
            continue
        projection = module.gate_up_proj
        for tensor in (projection.weight, projection.bias):
            if tensor is not None:
                tensor.data.copy_(regroup_rows(tensor.data, groups))
        module.act_fn = GroupedActivation(module.act_fn, groups)
        projection.shoal_grouped = True


# --- views ----------------------------------------------------------------------------------------


def _view(tensor: torch.Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)


def _rows(tensor: torch.Tensor, rank: int, degree: int) -> torch.Tensor:
    size = tensor.shape[0] // degree
    return tensor[rank * size : (rank + 1) * size]


def _part_rows(
    tensor: torch.Tensor, layer: LinearBase, sizes: list[int], rank: int, degree: int
) -> list[torch.Tensor]:
    """Return this rank's rows of each logical part of a fused DP tensor in stock order."""
    parts = list(tensor.split(sizes, dim=0))
    if not isinstance(layer, QKVParallelLinear):
        return [_rows(part, rank, degree) for part in parts]
    # With more members than KV heads, neighbours hold the same head (num_kv_head_replicas).
    replicas = max(1, degree // layer.total_num_kv_heads)
    query, key, value = parts
    return [
        _rows(query, rank, degree),
        _rows(key, rank // replicas, degree // replicas),
        _rows(value, rank // replicas, degree // replicas),
    ]


def _view_split(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    sizes = list(full.output_sizes)
    weights = _part_rows(full.weight.data, full, sizes, rank, degree)
    layer.part_weights = nn.ParameterList([_view(weight) for weight in weights])
    if full.bias is None:
        layer.part_biases = [None] * len(sizes)
    else:
        biases = _part_rows(full.bias.data, full, sizes, rank, degree)
        layer.part_biases = nn.ParameterList([_view(bias) for bias in biases])
    # The layer's own forward passes ``self.bias``; the parts have theirs.
    layer.bias = None
    del layer.weight
    layer.quant_method = SplitLinear(meta=True)


def _view_rows(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    layer.weight = _view(_rows(full.weight.data, rank, degree))
    if getattr(full, "bias", None) is not None:
        layer.bias = _view(_rows(full.bias.data, rank, degree))


def _view_columns(layer: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    size = full.weight.shape[1] // degree
    layer.weight = _view(full.weight.data[:, rank * size : (rank + 1) * size])
    if full.bias is not None:
        layer.bias = full.bias  # vLLM adds it on rank 0 only


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


def view_weights(model: nn.Module, full: nn.Module, rank: int, degree: int) -> None:
    """Turn the parameters of a TP-``degree`` model into views of the DP model's.

    Args:
        model: vLLM's model for this rank, built with ``SharedWeights(views=True)``.
        full: the DP model, loaded and grouped.
        rank: tensor parallel rank.
        degree: tensor parallel size.

    Raises:
        UnviewableWeights: a layer's split is not one of those the module names.
    """
    full_modules = dict(full.named_modules())
    layers = list(model.named_modules())
    for name, layer in layers:
        other = full_modules.get(name)
        if other is None:
            raise UnviewableWeights(f"{name} exists in TP-{degree} only")
        if isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
            grouped = getattr(other, "shoal_grouped", False)
            (_view_rows if grouped else _view_split)(layer, other, rank, degree)
        elif isinstance(layer, RowParallelLinear):
            _view_columns(layer, other, rank, degree)
        elif isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding):
            _view_rows(layer, other, rank, degree)
        elif isinstance(layer, LinearBase) and not isinstance(layer, ReplicatedLinear):
            raise UnviewableWeights(f"{name} ({type(layer).__name__}) cannot be viewed")
        else:
            _view_replicated(layer, other, name)
    for name, layer in layers:
        activation = getattr(full_modules.get(name), "act_fn", None)
        if isinstance(activation, GroupedActivation):
            layer.act_fn = GroupedActivation(layer.act_fn, activation.groups // degree)
    _check_no_meta(model)


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


def register_view_loader(full_model: Callable[[], nn.Module]) -> None:
    """Register ``VIEW_LOAD_FORMAT`` with vLLM's model loaders.

    Args:
        full_model: returns this process's DP model.
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
            view_weights(model, full_model(), group.rank_in_group, group.world_size)
            process_weights_after_loading(model, model_config, device)
            return model.eval()

    register_model_loader(VIEW_LOAD_FORMAT)(ViewLoader)
