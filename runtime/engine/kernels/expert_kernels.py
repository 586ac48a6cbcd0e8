"""What computes routed experts whose weights are views: vLLM's Triton kernel, and PyTorch on CPUs.

``w13`` of an expert has its gate and up rows grouped, ``[gate_0|up_0|gate_1|up_1|...]``, so that a
member's share is one range of rows. Both GEMMs take weights by their strides, so only the
activation between them has to know of the groups.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.experts.triton_moe as triton_moe
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import (
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

_OPERATOR = "shoal::plain_experts"
MXFP4_BLOCK = 32
"""Inputs of a row that share a scale in MXFP4."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of four bits in MXFP4 (OCP Microscaling Formats, section 5.3.3)."""
_E8M0_BIAS = 127
"""What is subtracted from a scale in MXFP4 to get its exponent (section 5.4.1)."""
_PAIRS = torch.tensor([(_E2M1[byte & 0xF], _E2M1[byte >> 4]) for byte in range(256)])
"""The two values of each byte, ``[256, 2]``; the first is in the low half."""
_SCALES = torch.ldexp(torch.ones(256), torch.arange(256) - _E8M0_BIAS)
"""What each scale stands for, ``[256]``."""

SHORT_ROW = 256
"""With fewer features in a group, our kernel is faster than vLLM's
(``docs/benchmarks/gpt-oss-20b-2xh200.md``)."""


class _GroupedOperators:
    """vLLM's operators, but the one that fuses SwiGLU and quantisation takes grouped rows.

    ``TritonExperts.apply`` calls that one by its name where FP8 has scales of blocks.

    Args:
        operators: vLLM's.
    """

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self.groups = 1
        """Groups of gate and up features in each row that is computed now."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def silu_and_mul_per_block_quant(
        self, grouped: torch.Tensor, group_size: int, quant_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features ``[rows, intermediate]`` in stock order, and scales of its blocks.

        A group is a row for vLLM's kernel, which has a program for each block. Groups cut no block.

        Args:
            grouped: ``[rows, groups * (gate|up)]``.
            group_size: features of a block.
            quant_dtype: of the result.
        """
        output, scales = self._operators.silu_and_mul_per_block_quant(
            _by_group(grouped, self.groups), group_size=group_size, quant_dtype=quant_dtype
        )
        return output.view(len(grouped), -1), scales.view(len(grouped), -1)


_OPERATORS = triton_moe.ops = _GroupedOperators(triton_moe.ops)


class GroupedTritonExperts(TritonExperts):  # type: ignore[misc]
    """vLLM's Triton kernel on experts whose rows are grouped."""

    groups = 1
    """Groups of gate and up rows that this member has of each expert."""

    def group(self, groups: int) -> None:
        """Say how many groups there are."""
        self.groups = groups

    def apply(self, *args: Any, **kwargs: Any) -> None:
        """Compute the experts of a step (``TritonExperts.apply``)."""
        _OPERATORS.groups = self.groups
        try:
            super().apply(*args, **kwargs)
        finally:
            _OPERATORS.groups = 1

    def activation(
        self, activation: Any, output: torch.Tensor, grouped: torch.Tensor, **_: Any
    ) -> None:
        """Write ``[rows, intermediate]`` in stock order for ``[rows, groups * (gate|up)]``."""
        is_short = self.groups > 1 and output.shape[-1] < SHORT_ROW * self.groups
        if is_short and output.is_cuda and activation == MoEActivation.SILU:
            from shoal.runtime.engine.kernels import grouped_activation_kernel  # where GPUs are

            grouped_activation_kernel.silu_and_mul(output, grouped, self.groups)
            return
        apply_moe_activation(
            activation, _by_group(output, self.groups), _by_group(grouped, self.groups)
        )


def _by_group(rows: torch.Tensor, groups: int) -> torch.Tensor:
    return rows.view(-1, rows.shape[-1] // groups)


class PlainExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts on CPUs by plain GEMMs, one after the other, in 16 or 32 bits, FP8 blocks or MXFP4.

    vLLM's kernels for CPUs take packed weights, which no other layout could view. This class is
    for tests of layouts, which have no GPU; it is slower than they are.
    """

    groups = 1
    """Groups of gate and up rows that this member has of each expert."""

    def group(self, groups: int) -> None:
        """Say how many groups there are."""
        self.groups = groups

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they are: views need their bytes in place."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key in (None, kMxfp4Static) and activation_key is None

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write to ``output`` what ``plain_experts`` returns (``FusedMoEExpertsModular.apply``).

        The activation is one of those that the rule lets pass.
        """
        if apply_router_weight_on_input:  # vLLM has multiplied the input
            topk_weights = torch.ones_like(topk_weights)
        output.copy_(
            plain_experts(
                *(hidden_states, w1, w2, topk_weights, topk_ids, expert_map, self.groups),
                *(self.w1_bias, self.w2_bias, self.w1_scale, self.w2_scale),
                in_turn=activation == MoEActivation.SWIGLUOAI,
            )
        )


torch.library.define(
    _OPERATOR,
    "(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, Tensor? expert_map, int groups,"
    " Tensor? w13_bias, Tensor? w2_bias, Tensor? w13_scale, Tensor? w2_scale, bool in_turn)"
    " -> Tensor",
)


def plain_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    groups: int = 1,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    in_turn: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of what each token's experts compute: ``[tokens, hidden]``.

    Args:
        x: ``[tokens, hidden]``.
        w13: ``[experts, 2 * intermediate, hidden]``, rows grouped; strided or not.
        w2: ``[experts, hidden, intermediate]``; strided or not.
        weights: ``[tokens, top_k]``.
        ids: ``[tokens, top_k]``, numbers of experts among all.
        expert_map: ``[all experts]``: which of ``w13`` each is, -1 if it is another member's; None
            if all are here.
        groups: number of groups of gate and up rows.
        w13_bias: ``[experts, 2 * intermediate]``, in the order of ``w13``'s rows.
        w2_bias: ``[experts, hidden]``.
        w13_scale: ``[experts, 2 * intermediate, hidden / 32]`` if the weights are in MXFP4: then
            the last dimension of ``w13`` and ``w2`` is half as long (see ``of_mxfp4``). If they are
            in FP8, each of the two dimensions is divided by that of a block (see ``of_blocks``).
        w2_scale: ``[experts, hidden, intermediate / 32]``; in FP8 likewise.
        in_turn: gate and up rows alternate, and the activation is GPT-OSS's (``SwigluOAIAndMul``).
    """
    output: torch.Tensor = torch.ops.shoal.plain_experts(
        *(x, w13, w2, weights, ids, expert_map, groups),
        *(w13_bias, w2_bias, w13_scale, w2_scale, in_turn),
    )
    return output


def of_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what weights in MXFP4 stand for, in fp32: ``[rows, inputs]``.

    Args:
        packed: ``[rows, inputs / 2]`` of ``uint8``: two values in a byte, the first in its low
            half.
        scales: ``[rows, inputs / 32]`` of ``uint8``: the exponents of 32 values each.
    """
    values = _PAIRS.index_select(0, packed.reshape(-1).int()).view(*scales.shape, MXFP4_BLOCK)
    exact = _SCALES.index_select(0, scales.reshape(-1).int()).view(*scales.shape, 1)
    return (values * exact).flatten(1)


def of_blocks(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what FP8 weights stand for, in fp32: ``[rows, inputs]``.

    Args:
        weights: ``[rows, inputs]``, both of them multiples of a block's.
        scales: ``[rows / rows of a block, inputs / inputs of a block]``.
    """
    rows, inputs = (size // of for size, of in zip(weights.shape, scales.shape, strict=True))
    whole = scales.repeat_interleave(rows, dim=0).repeat_interleave(inputs, dim=1)
    return weights.float() * whole


@torch.library.register_fake(_OPERATOR)  # type: ignore[untyped-decorator]
def _empty(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.impl(_OPERATOR, "CPU")  # type: ignore[untyped-decorator]
def _compute(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    groups: int,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    w13_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    in_turn: bool,
) -> torch.Tensor:
    local = ids if expert_map is None else expert_map[ids.long()]
    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in set(local.flatten().tolist()) - {-1}:
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        gate_up = _linear(x[tokens], w13, w13_scale, w13_bias, expert)
        inner = _clamped(gate_up) if in_turn else _swiglu(gate_up, groups)
        hidden = _linear(inner, w2, w2_scale, w2_bias, expert)
        output.index_add_(0, tokens, hidden.float() * weights[tokens, slots, None])
    return output.to(x.dtype)


def _linear(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    expert: int,
) -> torch.Tensor:
    weight = weights[expert]
    if scales is not None:
        weight = (of_mxfp4 if weight.dtype == torch.uint8 else of_blocks)(weight, scales[expert])
    bias = None if biases is None else biases[expert].to(x.dtype)
    return functional.linear(x, weight.to(x.dtype), bias)


def _swiglu(gate_up: torch.Tensor, groups: int) -> torch.Tensor:
    gate, up = gate_up.view(len(gate_up), groups, 2, -1).unbind(2)
    return (functional.silu(gate) * up).flatten(1)


def _clamped(gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)
