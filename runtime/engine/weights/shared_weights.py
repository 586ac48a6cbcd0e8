"""Gives the layers of a layout their methods, by the seam that vLLM has for quantisation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from shoal.runtime.engine.weights.rules.rule_registry import rule_of


class SharedWeights(QuantizationConfig):  # type: ignore[misc]
    """vLLM's ``quant_config`` of a layout: picks the methods of its layers.

    Args:
        views: whether the layout's tensors are views of the DP model's.
        inner: vLLM's own configuration of a quantised checkpoint; it answers everything that is
            not about this layout.

    Attributes:
        shared: returns, by a layer, its name, and the method that vLLM would take, the method of a
            layer of which this engine keeps a part only, and None for other layers.
    """

    def __init__(self, *, views: bool, inner: QuantizationConfig | None = None) -> None:
        self._inner = inner
        super().__init__()
        self._views = views
        self.shared: Callable[
            [nn.Module, str, QuantizeMethodBase | None], QuantizeMethodBase | None
        ] = lambda *_: None

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
        """Take attributes that only some configurations have from the checkpoint's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer, as its rule says; None leaves it to the layer.

        Raises:
            UnviewableWeights: the checkpoint's quantisation of the layer is not supported.
        """
        rule = rule_of(layer)
        stock = rule.stock_method(self._inner, layer, prefix)
        if (method := self.shared(layer, prefix, stock)) is not None:
            return method
        return rule.quant_method(layer, stock, prefix, views=self._views)

    def get_name(self) -> str:
        """Return the checkpoint's quantisation, by which vLLM loads experts, or what it logs."""
        return "shoal" if self._inner is None else str(self._inner.get_name())

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
