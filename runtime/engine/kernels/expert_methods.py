"""vLLM's methods of routed experts, but for weights that stay where they are.

Every layout has the same kernel: vLLM's Triton kernel, which reads experts by their strides. vLLM's
other kernels pack or pad experts when they are loaded.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_kernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_tensors_fp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineMoEMethod,
    Fp8PerTensorOnlineMoEMethod,
    Fp8PtpcOnlineMoEMethod,
)
from vllm.platforms import current_platform

from shoal.runtime.engine.kernels.expert_kernels import GroupedTritonExperts, PlainExperts

_FP8 = (
    Fp8MoEMethod,
    compressed_tensors_fp8.CompressedTensorsW8A8Fp8MoEMethod,
    Fp8PerTensorOnlineMoEMethod,
    Fp8PtpcOnlineMoEMethod,
    Fp8PerBlockOnlineMoEMethod,
)
"""vLLM's methods of FP8 experts, for each of ``FP8_QUANTISATIONS``."""


_SHARED = ("shared_experts", "shared_experts_input")
"""What vLLM gives the method of routed experts of those that all tokens go to."""


class InLayers:
    """A method of experts that several layers of vLLM's may stand for.

    Some steps compute all of them by another layer, ``layer.shoal_whole``. vLLM calls a layer's
    method inside an operator, which knows how many tokens the step has. A CUDA graph is captured
    for one number of tokens, so it holds what was chosen for that number.

    Where the tensors of some experts are in another place, a second layer has them:
    ``layer.shoal_beside``.
    """

    def apply(self, layer: nn.Module, x: torch.Tensor, **others: Any) -> Any:
        """Return what the layer computes of ``x``, ``[tokens, hidden]``, padding included."""
        whole = getattr(layer, "shoal_whole", None)
        # On CPUs there is no such operator, and code that is compiled cannot ask for a length.
        if whole is not None and not torch.compiler.is_compiling():
            layer = whole if x.shape[0] in layer.shoal_whole_steps else layer
        y = layer.quant_method.compute(layer=layer, x=x, **others)
        beside = getattr(layer, "shoal_beside", None)
        if beside is None:
            return y
        once = {key: None if key in _SHARED else value for key, value in others.items()}
        return y + beside.quant_method.compute(layer=beside, x=x, **once)

    apply_monolithic = apply
    """The same for kernels that choose each token's experts themselves."""

    def have(self, layer: nn.Module, tensors: Mapping[str, Any]) -> None:
        """Let a layer of this method have these experts, before its kernel is made.

        Args:
            layer: the layer.
            tensors: by their names in the layer.
        """
        for key, tensor in tensors.items():
            layer.register_parameter(key, Parameter(tensor, requires_grad=False))


class InPlaceExperts(InLayers, UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Experts in 16 or 32 bits, whose weights, their own or views, stay as they are.

    Args:
        moe: vLLM's configuration of the layer.
        meta: whether the weights will become views, and so get no storage of their own.

    Raises:
        NotImplementedError: vLLM would compute the experts by another kernel.
    """

    def __init__(self, moe: Any, *, meta: bool) -> None:
        super().__init__(moe)
        self._meta = meta
        if current_platform.is_cpu():
            self.experts_cls = PlainExperts
        else:
            _check_backend(self.unquantized_backend, UnquantizedMoeBackend.TRITON)
            self.experts_cls = GroupedTritonExperts

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Return what vLLM's method computes."""
        return UnquantizedFusedMoEMethod.apply(self, *args, **kwargs)

    def for_whole(self, moe: Any) -> "InPlaceExperts":
        """Return the method of the layer ``shoal_whole``, of this configuration."""
        return InPlaceExperts(moe, meta=True)

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the weights."""
        where: AbstractContextManager[Any] = torch.device("meta") if self._meta else nullcontext()
        with where:
            super().create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel, and leave the weights as they are."""
        self._init_moe_kernel(layer)
        self.moe_kernel.fused_experts.group(getattr(layer, "shoal_groups", 1))


def fp8_experts(method: Any, *, views: bool) -> FusedMoEMethodBase:
    """Return the method of FP8 experts that vLLM would give ``method``.

    Raises:
        NotImplementedError: it is no method of FP8 experts, or has another kernel.
    """
    if isinstance(method, PlainFp8Experts | PlainCompressedExperts):
        return ViewedFp8Experts(method) if views else method
    if type(method) not in _FP8:
        raise NotImplementedError(f"{type(method).__name__} weights are not supported")
    _check_backend(method.fp8_backend, Fp8MoeBackend.TRITON)
    method.experts_cls = GroupedTritonExperts
    return ViewedFp8Experts(method) if views else method


def _fp8_kernel(method: Any, layer: nn.Module, backend: Fp8MoeBackend) -> Any:
    """Return a method's kernel for a layer's tensors, and have the method know their scales."""
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    return make_fp8_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        fp8_backend=backend,
        routing_tables=layer._expert_routing_tables(),
    )


def _check_backend(found: Any, needed: Any) -> None:
    if found != needed:
        raise NotImplementedError(f"{found.value}, vLLM's kernel for these experts, packs them")


class PlainFp8Experts(Fp8MoEMethod):  # type: ignore[misc]
    """Experts in FP8 blocks on CPUs, which stay as the checkpoint has them.

    vLLM's own kernel for CPUs packs them. This class is for tests of layouts, which have no GPU: it
    computes experts by ``plain_experts``, from inputs that are not quantised.

    Args:
        config: vLLM's configuration of the checkpoint, with blocks.
        layer: the routed experts.
    """

    def __init__(self, config: Fp8Config, layer: nn.Module) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = config
        self.weight_block_size = self.moe_block_shape = config.weight_block_size
        self.block_quant, self.weight_scale_name = True, "weight_scale_inv"
        self.weight_scale_refine = None
        self.fp8_backend = Fp8MoeBackend.CPU  # of 16 bits for inputs
        self.experts_cls = PlainExperts

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel, and leave the weights as they are."""
        self._init_moe_kernel(layer)


class PlainCompressedExperts(compressed_tensors_fp8.CompressedTensorsW8A8Fp8MoEMethod):  # type: ignore[misc]
    """The same of compressed-tensors, with scales of blocks or of channels.

    Args:
        weights: compressed-tensors' ``QuantizationArgs`` of the experts.
        inputs: the same of what they compute with.
        layer: the routed experts.
    """

    def __init__(self, weights: Any, inputs: Any, layer: nn.Module) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.weight_quant, self.input_quant, self.static_input_scales = weights, inputs, False
        self.block_quant = weights.strategy == "block"
        self.weight_block_size = weights.block_structure if self.block_quant else None
        self.fp8_backend = Fp8MoeBackend.CPU  # of 16 bits for inputs
        self.experts_cls = PlainExperts

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel, and leave the weights as they are."""
        self.moe_kernel = _fp8_kernel(self, layer, self.fp8_backend)


class ViewedFp8Experts(InLayers, FusedMoEMethodBase):  # type: ignore[misc]
    """vLLM's method of FP8 experts on views: it creates no weights and processes none.

    Args:
        method: vLLM's own method for the layer.
    """

    def __init__(self, method: Any) -> None:
        super().__init__(method.moe)
        self.method = method
        self.experts_cls = method.experts_cls

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the sizes that vLLM's method needs."""
        sizes: tuple[int, int] = self.method.maybe_roundup_sizes(*args, **kwargs)
        return sizes

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the tensors without storage: they become views."""
        without_storage: AbstractContextManager[Any] = torch.device("meta")
        with without_storage:
            self.method.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel; vLLM processed what the tensors view."""
        self.moe_kernel = self.method.moe_kernel = _fp8_kernel(self, layer, self.method.fp8_backend)
        self.moe_kernel.fused_experts.group(layer.shoal_groups)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        """Return the scales, which are the layer's views."""
        return self.method.get_fused_moe_quant_config(layer)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Return what vLLM's method computes with the views."""
        return self.method.apply(*args, **kwargs)

    def for_whole(self, moe: Any) -> "ViewedFp8Experts":
        """Return the method of the layer ``shoal_whole``, of this configuration."""
        method = copy.copy(self.method)
        method.moe, method.moe_kernel = moe, None
        return ViewedFp8Experts(method)
