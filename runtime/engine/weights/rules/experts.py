"""Routed experts: a range of each expert's inner dimension, or a range of the experts.

A tensor parallel member has the same share of every expert: one range of the rows of ``w13``, which
are grouped once as those of ``gate_up_proj`` are, and a strided range of the columns of ``w2``. An
expert parallel member has a range of whole experts. Scales of rows or blocks go with their weights.
GPT-OSS has the gate and up rows in turn, so that a range needs no groups, and biases. Its experts
in MXFP4 are packed (``mxfp4_experts``): whether a share is a view depends on the kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.platforms import current_platform

from shoal.runtime.engine.kernels.expert_methods import (
    InPlaceExperts,
    PlainCompressedExperts,
    PlainFp8Experts,
    fp8_experts,
)
from shoal.runtime.engine.kernels.mxfp4_experts import Mxfp4Experts, mxfp4_experts
from shoal.runtime.engine.weights.rules.expert_ranges import (
    ExpertRange,
    have_experts,
    is_of_experts,
)
from shoal.runtime.engine.weights.rules.fused import regroup
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer, ShardRule
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights, named
from shoal.runtime.served_weights import LayerKind, is_fp8_scheme, widest_share


class ExpertsRule(ShardRule):
    """A range of ``w13``'s rows and of ``w2``'s columns, or of experts."""

    kind = LayerKind.EXPERTS
    layers = (RoutedExperts,)
    scheme = "experts=grouped"

    def stock_method(
        self, inner: QuantizationConfig | None, layer: nn.Module, name: str
    ) -> QuantizeMethodBase | None:
        """Return vLLM's method, or ours of experts in MXFP4, and of most in FP8 on CPUs.

        vLLM has none for most CPUs, or one that packs the experts.

        Raises:
            UnviewableWeights: vLLM's kernel for experts in MXFP4 is not served.
        """
        # No adapter adapts them (``limit_adapters``), so no kernel need know of adapters.
        layer.moe_config.is_lora_enabled = False
        if isinstance(inner, Fp8Config) and inner.weight_block_size and current_platform.is_cpu():
            return PlainFp8Experts(inner, layer)
        if isinstance(inner, CompressedTensorsConfig) and current_platform.is_cpu():
            plain = _plain_compressed(inner, layer, name)
            return plain or super().stock_method(inner, layer, name)
        if not isinstance(inner, GptOssMxfp4Config):
            return super().stock_method(inner, layer, name)
        with named(name), unviewable():
            return mxfp4_experts(layer.moe_config)

    def quant_method(
        self, layer: nn.Module, stock: QuantizeMethodBase | None, name: str, *, views: bool
    ) -> QuantizeMethodBase:
        """Return a method that leaves the weights in place.

        Raises:
            UnviewableWeights: the experts are of a kind that no layout but DP could compute.
        """
        with named(name), unviewable():
            _check(layer)
            if isinstance(stock, type(None) | UnquantizedFusedMoEMethod):
                return InPlaceExperts(layer.moe_config, meta=views)
            if isinstance(stock, Mxfp4Experts):
                stock.views = views
                return stock
            if layer.moe_config.has_bias:
                raise UnviewableWeights("quantised experts with biases are not supported")
            return fp8_experts(stock, views=views)

    def arrange(self, full: FullLayer, groups: int) -> None:
        """Group the rows of every expert's ``w13`` in place, for as many members as can share."""
        if full.module.moe_config.activation == MoEActivation.SWIGLUOAI or _first(full) is not None:
            return
        block = getattr(full.module, "weight_block_size", None) or [1]
        groups = widest_share(full.module.w2_weight.shape[2], block[0], groups)
        for key in full.module._parameters:
            if key.startswith("w13_") and _inner(key, full.tensor(key)) is not None:
                for expert in full.tensor(key).data:
                    regroup(expert, groups)
        set_groups(full.module, groups)

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """View the member's share of every expert, or its experts.

        The bias behind ``w2`` is added by the first member alone, as vLLM's loader has it.

        Raises:
            UnviewableWeights: vLLM divides the experts in another way.
        """
        if isinstance(layer.quant_method, Mxfp4Experts):
            with named(full.name), unviewable():
                _view_packed(layer, full, shard)
            return
        groups = getattr(full.module, "shoal_groups", 1)
        by_expert = layer.moe_config.moe_parallel_config.use_ep
        if not by_expert:
            _check_divided(full, shard)
        shapes = {key: parameter.shape for key, parameter in layer._parameters.items()}
        own = _own_experts(layer, full, shard) if by_expert else None
        for key in full.module._parameters:
            tensor = full.tensor(key)
            if is_of_experts(key):
                view = of_experts(tensor.data, own) if own else _of_each(key, tensor.data, shard)
                if key in _CHECKED and view.shape != shapes[key]:
                    raise UnviewableWeights(
                        f"{full.name}.{key} is split in a way Shoal does not know"
                    )
                tensor = Parameter(view, requires_grad=False)
            layer.register_parameter(key, tensor)
        if own is None and shard.rank > 0 and "w2_bias" in layer._parameters:
            layer.register_parameter("w2_bias", None)
        set_groups(layer, groups if own or groups == 1 else groups // shard.of)


def _plain_compressed(
    config: CompressedTensorsConfig, layer: nn.Module, name: str
) -> PlainCompressedExperts | None:
    """Return our method for CPUs; None if the experts have another format."""
    config._add_fused_moe_to_target_scheme_map()  # else "Linear" means no experts
    scheme = config.get_scheme_dict(layer, f"{name}.0.{layer.ckpt_gate_proj_name}")
    if scheme is None:
        return None
    weights, inputs = scheme["weights"], scheme["input_activations"]
    if not is_fp8_scheme(weights, inputs) or weights.strategy == "tensor":
        return None
    return PlainCompressedExperts(weights, inputs, layer)


class RunnerRule(ShardRule):
    """What surrounds routed experts: their router, which is no module, may have tensors."""

    kind = LayerKind.EXPERTS
    layers = (MoERunner,)

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Let the router read DP's tensors, which the experts have by the same names.

        Raises:
            UnviewableWeights: the router has a tensor that the experts do not have.
        """
        super().view(layer, full, shard)
        for key, value in vars(layer.router).items():
            if not isinstance(value, torch.Tensor):
                continue
            if key not in full.module.routed_experts._parameters:
                raise UnviewableWeights(f"{full.name}: its router's {key} is unknown to Shoal")
            setattr(layer.router, key, full.tensor(f"routed_experts.{key}"))


_CHECKED = ("w13_weight", "w13_bias", "w2_weight", "w2_bias")
"""Tensors whose shapes are a member's before it views them, too."""


def set_groups(layer: nn.Module, groups: int) -> None:
    """Say into how many groups the gate and up rows of a layer's experts are divided."""
    if isinstance(layer.quant_method, Mxfp4Experts):
        return  # Gate and up rows of an expert in MXFP4 come in turn: there are no groups.
    layer.shoal_groups = groups
    if layer.quant_method.moe_kernel is not None:
        layer.quant_method.moe_kernel.fused_experts.group(groups)


def _check(layer: nn.Module) -> None:
    """Refuse what a model's routed experts may be and the views do not know."""
    config = layer.moe_config
    problems = {
        f"{config.activation.value} between the GEMMs": config.activation
        not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI),
        "a limit on SwiGLU": config.swiglu_limit is not None,
    }
    for problem, holds in problems.items():
        if holds:
            raise UnviewableWeights(f"experts with {problem} are not supported")


def _inner(key: str, tensor: torch.Tensor) -> int | None:
    """Return which dimension of a tensor of all experts runs over their inner dimension, if any.

    A scale of whole experts and a bias behind ``w2`` have none, and the scale of a row of ``w2``
    has one column.
    """
    if key == "w13_bias":
        return 1
    if tensor.dim() < 3:
        return None
    if key.startswith("w13_"):
        return 1
    return 2 if tensor.shape[2] > 1 else None


def _of_each(key: str, tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return a tensor parallel member's share of every expert."""
    dimension = _inner(key, tensor)
    if dimension is None:
        return tensor
    return tensor.narrow(dimension, *shard.cut(tensor.shape[dimension]))


def _first(full: FullLayer) -> int | None:
    """Return the number of the first expert of a layer that has a part of them; None: it has all.

    Engines that share weights keep such a part each (``shared_experts``).
    """
    found: int | None = getattr(full.module, "shoal_first", None)
    return found


def _check_divided(full: FullLayer, shard: Shard) -> None:
    if _first(full) is not None and shard.of > 1:
        raise UnviewableWeights(f"{full.name}: engines that share experts keep whole ones")


def _own_experts(layer: nn.Module, full: FullLayer, shard: Shard) -> slice:
    """Return which experts of those of a full layer are an expert parallel member's.

    Raises:
        UnviewableWeights: they are no neighbours.
    """
    first = _first(full)
    if first is not None:
        begin, count = shard.cut(full.module.local_num_experts)
        device = next(full.module.parameters()).device
        numbers = ExpertRange(first + begin, count).numbers(layer.global_num_experts, device)
        have_experts(layer, numbers)
        return slice(begin, begin + count)
    own = layer.expert_map_manager.get_local_expert_ids()
    if own != list(range(own[0], own[0] + len(own))):
        raise UnviewableWeights(f"{layer.layer_name}: a member's experts are no neighbours")
    return slice(own[0], own[-1] + 1)


def _view_packed(layer: nn.Module, full: FullLayer, shard: Shard) -> None:
    """View what vLLM packed: shares of each expert or whole experts, as vLLM divides them."""
    if layer.moe_config.moe_parallel_config.use_ep:
        layer.quant_method.view(layer, full.module, _own_experts(layer, full, shard))
    elif shard.of == 1:
        layer.quant_method.view(layer, full.module, slice(0, layer.local_num_experts))
    else:
        _check_divided(full, shard)
        layer.quant_method.view_share(layer, full.module, shard.rank, shard.of)


@contextmanager
def unviewable() -> Iterator[None]:
    """Name what a method cannot do as the rules do."""
    try:
        yield
    except NotImplementedError as error:
        raise UnviewableWeights(str(error)) from error


def of_experts(tensor: torch.Tensor, own: slice) -> torch.Tensor:
    """Return those experts; the scale of inputs is one for all experts."""
    return tensor[own] if tensor.dim() else tensor
