"""FP8 layers of all formats for tests on CPUs, and kernels that vLLM's CPU build lacks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as vllm_ops
import vllm.model_executor.kernels.linear as linear_kernels
from torch import nn
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import (
    LinearBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.parameter import BlockQuantScaleParameter
from vllm.platforms import PlatformEnum

from shoal.runtime.engine.kernels import fp8_methods
from shoal.runtime.engine.weights.rules.unquantised import leave_weights_on_cpus
from tests.runtime.engine import exact_products

BLOCK = 128
Tensors = dict[str, torch.Tensor]
"""What a checkpoint has of one part, by parameter; formats take what they know."""


# --- formats ---


def compressed_tensors(strategy: str, *, static: bool = False) -> CompressedTensorsConfig:
    fp8_type = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = fp8_type | {"strategy": strategy}
    activations = fp8_type | {"strategy": "tensor" if static else "token", "dynamic": not static}
    if strategy == "block":
        weights |= {"block_structure": [BLOCK, BLOCK]}
        activations |= {"strategy": "group", "group_size": BLOCK}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return CompressedTensorsConfig.from_config(
        {"format": "float-quantized", "config_groups": {"all": group}, "ignore": []}
    )


def online(shorthand: str) -> OnlineQuantizationConfig:
    """What ``--quantization`` with this name makes of a checkpoint that is not quantised."""
    return OnlineQuantizationConfig(QuantizationConfigArgs(linear=shorthand))


def block_wise() -> Fp8Config:
    return Fp8Config(activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])


FORMATS = {
    "fp8 per tensor, dynamic": lambda: Fp8Config(activation_scheme="dynamic"),
    "fp8 per tensor, static": lambda: Fp8Config(activation_scheme="static"),
    "fp8 block-wise": block_wise,
    "compressed-tensors per tensor, static": lambda: compressed_tensors("tensor", static=True),
    "compressed-tensors per tensor, dynamic": lambda: compressed_tensors("tensor", static=False),
    "compressed-tensors per channel": lambda: compressed_tensors("channel"),
    "compressed-tensors block-wise": lambda: compressed_tensors("block"),
    "online per tensor": lambda: online("fp8_per_tensor"),
    "online per channel": lambda: online("fp8_per_channel"),
    "online block-wise": lambda: online("fp8_per_block"),
}
BLOCK_WISE = [name for name in FORMATS if "block" in name]
PER_TENSOR_OR_CHANNEL = [name for name in FORMATS if "block" not in name]


def quantise(
    x: torch.Tensor, scale: torch.Tensor | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's kernel does that its CPU build lacks."""
    assert scale is not None
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class ReferenceBlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """A block-wise kernel for CPUs, which vLLM has only for some."""

    @classmethod
    def is_supported(cls, _: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        x = A.float() * As.repeat_interleave(BLOCK, 1)
        scale = Bs.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (x @ (B.float() * scale).T).to(self.config.out_dtype)


class QuantisingBlockKernel(ReferenceBlockKernel):
    """One that takes inputs as they are."""

    apply_input_quant = False

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        data, scale = self.quant_fp8(A, None, None)
        return super().apply_block_scaled_mm(data, B, scale, Bs)


class EitherKernel(QuantisingBlockKernel):
    """One that has another for many tokens, which is given inputs that are quantised."""

    powers = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fallback = ReferenceBlockKernel(config)
        for kernel in (self, self.fallback):
            kernel.quant_fp8.use_ue8m0 = self.powers


class PackedKernel(CutlassFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """Multiplies as CUTLASS does: it takes the weight for packed, whatever its strides."""

    @classmethod
    def is_supported(cls, _: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
        output_shape: list[int],
        bias: torch.Tensor | None,
        **_: object,
    ) -> torch.Tensor:
        assert self.logical_output_size == B.shape[1]
        packed = B.as_strided(B.shape, (1, B.shape[0]))
        output = (A.float() * As) @ (packed.float() * Bs.reshape(1, -1))
        return (output if bias is None else output + bias).to(torch.bfloat16).view(output_shape)


def pick_for_blocks(patch: pytest.MonkeyPatch, kernel: type, for_inputs: type) -> None:
    """Let vLLM pick a kernel for block-wise scales, and us another for ranges of inputs."""
    kernels = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS
    patch.setitem(kernels, PlatformEnum.CPU, [kernel])
    patch.setitem(fp8_methods.INPUT_RANGE_KERNELS, kernel, for_inputs)


@contextmanager
def on_cpus() -> Iterator[pytest.MonkeyPatch]:
    """A model of bfloat16, and stand-ins for the operators that vLLM's CPU build lacks."""
    before = torch.get_default_dtype()
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        # Take the kernels that engines take, whatever this machine's CPU has.
        patch.setenv("VLLM_DISABLED_KERNELS", "")
        patch.setattr(LinearBase, "_cpu_skip_gemm_dispatch", True, raising=False)
        leave_weights_on_cpus()
        patch.setattr(vllm_ops, "scaled_fp8_quant", quantise)
        patch.setattr(torch, "_scaled_mm", exact_products.scaled_mm)
        pick_for_blocks(patch, ReferenceBlockKernel, ReferenceBlockKernel)
        torch.set_default_dtype(torch.bfloat16)
        # vLLM compiles its online quantisation to blocks, for longer than all of it takes here.
        with set_current_vllm_config(config), torch.compiler.set_stance("force_eager"):
            yield patch
    torch.set_default_dtype(before)


# --- layers ---


def checkpoint(parts: Sequence[tuple[Any, int, int]], draw: torch.Generator) -> list[Tensors]:
    """Return a layer's random tensors, part by part."""

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float32)

    return [
        {
            "weight": random(rows, columns) * 8 - 4,
            "weight_scale": random(rows, 1) / 64 + 0.01,
            "weight_scale_inv": random(rows // BLOCK, columns // BLOCK) / 64 + 0.01,
            "input_scale": random(1) / 64 + 0.01,
            "bias": random(rows),
        }
        for _, rows, columns in parts
    ]


def load_part(module: nn.Module, shard: Any, tensors: Tensors, per_tensor: int) -> None:
    """Load a part of a layer, whose scales by tensor have up to ``per_tensor`` elements."""
    # Online quantisation replaces the parameters as the last one is loaded.
    for key, parameter in list(module.named_parameters()):
        tensor = tensors[key]
        if isinstance(parameter, BlockQuantScaleParameter):
            tensor = tensors["weight_scale_inv"]
        elif key == "weight_scale" and parameter.numel() <= per_tensor:
            tensor = tensor[0]
        tensor = tensor.to(parameter.dtype)
        parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))
