"""A stand-in for what vLLM packs of experts in MXFP4 for kernels of GPUs.

vLLM packs nothing on CPUs, and its build for them lacks ``triton_kernels``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4

from shoal.runtime.engine.kernels import mxfp4_experts
from shoal.runtime.engine.kernels.expert_kernels import PlainExperts

SCALES = ("w13_weight_scale", "w2_weight_scale")


@dataclass
class Storage:
    """As in ``triton_kernels``, which vLLM's build for CPUs lacks."""

    data: torch.Tensor
    layout: object


@dataclass
class Tensor:
    """As in ``triton_kernels``."""

    storage: Storage
    dtype: object
    shape: list[int]
    shape_max: list[int]


@dataclass
class PrecisionConfig:
    """As in ``triton_kernels``."""

    weight_scale: Tensor | None = None
    flex_ctx: object = None


class Hopper:
    """How ``triton_kernels`` orders the bytes of an expert."""


def packed(tensor: torch.Tensor) -> Tensor:
    """Pack each expert of ``[experts, rows, bytes]`` by itself: by columns, the last row first."""
    data = tensor.flip(1).mT.contiguous().mT
    return Tensor(Storage(data, Hopper()), "fp4", list(data.shape), list(data.shape))


Pack = Callable[[torch.Tensor], Any]
Choose = Callable[..., None]


def chooser(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Return what lets vLLM choose a kernel, as on a GPU, and pack each tensor for it in a way."""

    def choose(
        kernel: Mxfp4MoeBackend, pack: Pack, scales: Pack | None = None, *, hopper: bool = False
    ) -> None:
        pack_scales = scales or pack
        on_gpu.is_device_capability = lambda number: hopper and number == 90

        def convert(mxfp4_backend: Any, layer: nn.Module, **of: Any) -> tuple[Any, ...]:
            for key in ("w13_weight", "w2_weight", *SCALES):
                delattr(layer, key)
            configs = [PrecisionConfig(pack_scales(of[key])) for key in SCALES]
            biases = [of[key].float() for key in ("w13_bias", "w2_bias")]
            return (pack(of["w13_weight"]), pack(of["w2_weight"]), *configs, *biases)

        made = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=id))
        converter = "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"
        monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda _: (kernel, PlainExperts))
        monkeypatch.setattr(mxfp4, converter, convert)
        monkeypatch.setattr(mxfp4, "make_mxfp4_moe_kernel", lambda **_: made)

    on_gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(mxfp4_experts, "current_platform", on_gpu)
    return choose
