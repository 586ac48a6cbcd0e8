"""Times routed experts on views of DP's weights, on packed copies, and on a range of experts.

``python -m shoal.loadgen.bench.moe_kernels [--dtype fp8]`` needs one GPU and vLLM. It says whether
vLLM's Triton kernel computes the same bits on views as on packed copies. A figure is from a CUDA
graph whose calls each read other weights and choose other experts.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from shoal.loadgen.bench.linear_kernels import measure, options
from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels.expert_kernels import GroupedTritonExperts

UNCACHED = 320 << 20
"""Bytes of weights between two uses of the same weight: several times the largest L2 cache."""
DEVICE = "cuda"
KERNEL: type[Any] = GroupedTritonExperts
TOKENS = (1, 8, 64, 256, 1024, 4096)
DTYPES = ("bf16", "fp8", "fp8-block")
"""Types of weights. ``fp8`` has a scale per token and per row, ``fp8-block`` one per block."""
BLOCK = 128
MOST_GROUPS = 8


@dataclass(frozen=True)
class Shape:
    """The routed experts of one layer of a model."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def groups(self, dtype: str) -> int:
        """Return into how many groups gate and up rows are divided, at most for eight members."""
        whole = BLOCK if dtype == "fp8-block" else 1
        groups = MOST_GROUPS
        while self.intermediate % (groups * whole):
            groups //= 2
        return groups


SHAPES = (
    Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
    Shape("mixtral-8x7b", 4096, 14336, 8, 2),
    Shape("glm-4.5-air", 4096, 1408, 128, 8),
)


class Share(NamedTuple):
    """What one member has of a layer's experts."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    groups: int
    """Groups of gate and up rows."""
    expert_map: torch.Tensor | None = None

    def packed(self) -> "Share":
        """Return a copy whose tensors are contiguous."""
        scales = (self.w13_scale, self.w2_scale)
        w13_scale, w2_scale = (None if s is None else _copy(s) for s in scales)
        copies = {"w13": _copy(self.w13), "w2": _copy(self.w2)}
        return self._replace(**copies, w13_scale=w13_scale, w2_scale=w2_scale)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


class Whole:
    """One layer's random experts as DP has them.

    Args:
        shape: their sizes.
        dtype: one of ``DTYPES``.
    """

    def __init__(self, shape: Shape, dtype: str) -> None:
        self._shape, self._dtype = shape, dtype
        experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        self._w13, self._w13_scale = _random(dtype, experts, 2 * inner, hidden)
        self._w2, self._w2_scale = _random(dtype, experts, hidden, inner)
        self._groups = shape.groups(dtype)

    def shares(self, rank: int, layout: Layout) -> dict[str, Share]:
        """Return what a member may have: of every expert, or all of some experts."""
        found = {"experts": self._range(rank, layout.tp)}
        if self._groups % layout.tp == 0:
            views = self._views(rank, layout.tp)
            found |= {"views": views, "packed": views.packed(), "stock": _ungrouped(views)}
        return found

    def _views(self, rank: int, of: int) -> Share:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            size = tensor.shape[1] // of
            return tensor.narrow(1, rank * size, size)

        def columns(tensor: torch.Tensor) -> torch.Tensor:
            size = tensor.shape[2] // of
            return tensor.narrow(2, rank * size, size)

        w13_scale, w2_scale = self._w13_scale, self._w2_scale
        if w13_scale is not None and w2_scale is not None:
            w13_scale = rows(w13_scale)
            w2_scale = columns(w2_scale) if self._dtype == "fp8-block" else w2_scale
        return Share(rows(self._w13), columns(self._w2), w13_scale, w2_scale, self._groups // of)

    def _range(self, rank: int, of: int) -> Share:
        size = self._shape.experts // of
        own = slice(rank * size, (rank + 1) * size)
        scales = (self._w13_scale, self._w2_scale)
        w13_scale, w2_scale = (None if s is None else s[own] for s in scales)
        numbers = torch.full((self._shape.experts,), -1, dtype=torch.int32, device=DEVICE)
        numbers[own] = torch.arange(size, dtype=torch.int32, device=DEVICE)
        expert_map = numbers if of > 1 else None
        weights = (self._w13[own], self._w2[own])
        return Share(*weights, w13_scale, w2_scale, self._groups, expert_map)


def _ungrouped(share: Share) -> Share:
    """Return the share as stock vLLM has it: packed, all gate rows first."""

    def in_order(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        parts = tensor.unflatten(1, (share.groups, 2, -1))
        return parts.transpose(1, 2).reshape(tensor.shape)

    packed = share.packed()
    w13 = in_order(share.w13)
    assert w13 is not None
    return packed._replace(w13=w13, w13_scale=in_order(share.w13_scale), groups=1)


def _random(
    dtype: str, experts: int, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return random weights ``[experts, rows, columns]``, and their scales in FP8."""
    weights = torch.randn(experts, rows, columns, device=DEVICE, dtype=torch.bfloat16)
    weights /= columns**0.5
    if dtype == "bf16":
        return weights, None
    sizes = (rows, 1) if dtype == "fp8" else (rows // BLOCK, columns // BLOCK)
    scales = torch.rand(experts, *sizes, device=DEVICE) / 16 + 1 / 32
    return (weights * 16).to(torch.float8_e4m3fn), scales


# --- a call ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What the tokens of a step ask of their experts."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def random_step(shape: Shape, tokens: int) -> Step:
    """Return random activations; each token chooses its experts independently of others."""
    x = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    scores = torch.rand(tokens, shape.experts, device=DEVICE)
    weights, ids = scores.topk(shape.top_k, dim=-1)
    return Step(x, weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32))


def prepared(shape: Shape, dtype: str, share: Share, step: Step) -> Callable[[], torch.Tensor]:
    """Return what computes a member's part of a step, with its input quantised before."""
    quantisation = _quantisation(dtype, share)
    experts = KERNEL(_config(shape), quantisation)
    experts.group(share.groups)
    x, x_scale = moe_kernel_quantize_input(
        step.x, None, quantisation.quant_dtype, dtype == "fp8", quantisation.block_shape
    )
    sizes = experts.workspace_shapes(
        *(len(x), share.w13.shape[1], shape.hidden, shape.top_k, shape.experts),
        *(len(share.w13), None, MoEActivation.SILU),
    )
    workspace13, workspace2, output = (step.x.new_empty(size) for size in sizes)

    def call() -> torch.Tensor:
        experts.apply(
            output,
            x,
            share.w13,
            share.w2,
            step.weights,
            step.ids,
            MoEActivation.SILU,
            shape.experts,
            share.expert_map,
            x_scale,
            None,
            workspace13,
            workspace2,
            None,
            apply_router_weight_on_input=False,
        )
        return output

    return call


def _quantisation(dtype: str, share: Share) -> FusedMoEQuantConfig:
    if share.w13_scale is None or share.w2_scale is None:
        return FUSED_MOE_UNQUANTIZED_CONFIG
    by_channel = dtype == "fp8"
    return fp8_w8a8_moe_quant_config(
        w1_scale=share.w13_scale,
        w2_scale=share.w2_scale,
        per_act_token_quant=by_channel,
        per_out_ch_quant=by_channel,
        block_shape=None if by_channel else [BLOCK, BLOCK],
    )


def _config(shape: Shape) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=shape.experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.intermediate,
        num_local_experts=shape.experts,
        num_logical_experts=shape.experts,
        activation=MoEActivation.SILU,
        device=DEVICE,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )


# --- cases ----------------------------------------------------------------------------------------


@dataclass
class Case:
    """The microseconds per call of a layout's experts, by what a member has of them."""

    dtype: str
    shape: str
    layout: str
    tokens: int
    micros: dict[str, float]
    same_bits: dict[str, bool]
    """Whether views give the bits of each packed form."""
    error: float
    """Largest difference of views and stock, relative to stock's largest output."""

    def __str__(self) -> str:
        times = "; ".join(f"{name} {micros:.1f}" for name, micros in self.micros.items())
        same = "; ".join(
            f"{'the bits of' if same else 'OTHER BITS THAN'} {name}"
            for name, same in self.same_bits.items()
        )
        return f"{self.shape} {self.layout} {self.dtype} M={self.tokens}: {times} | {same}"


def layers_of(shape: Shape, dtype: str, layout: Layout) -> list[Mapping[str, Share]]:
    """Return members' shares of so many layers that no weight stays in the cache."""
    first = Whole(shape, dtype)
    size = sum(part.nbytes for part in first.shares(0, Layout())["experts"][:2])
    count = max(2, -(-UNCACHED * layout.tp // size))
    wholes = [first, *(Whole(shape, dtype) for _ in range(count - 1))]
    return [whole.shares(number % layout.tp, layout) for number, whole in enumerate(wholes)]


def run_case(
    shape: Shape, layout: Layout, dtype: str, layers: Sequence[Mapping[str, Share]], tokens: int
) -> Case:
    """Compare and time everything that a member may have."""
    steps = [random_step(shape, tokens) for _ in layers]
    case = Case(dtype, shape.name, layout.name, tokens, {}, {}, 0.0)
    outputs = {}
    for name in layers[0]:
        calls = [
            prepared(shape, dtype, shares[name], step)
            for shares, step in zip(layers, steps, strict=True)
        ]
        outputs[name] = calls[0]().clone()
        case.micros[name] = measure(partial(_call, calls), len(calls))
    if "views" in outputs:
        views, stock = outputs["views"], outputs["stock"].float()
        for name in ("packed", "stock"):
            case.same_bits[name] = torch.equal(views, outputs[name])
        case.error = float((views.float() - stock).abs().max() / stock.abs().max())
    return case


def _call(calls: Sequence[Callable[[], torch.Tensor]], layer: int) -> torch.Tensor:
    return calls[layer]()


def run(
    dtypes: Sequence[str], models: Sequence[tuple[Shape, Layout]], deadline: float
) -> Iterator[Case]:
    """Yield every case until the deadline, on ``time.monotonic``'s clock."""
    for dtype in dtypes:
        for shape, layout in models:
            layers = layers_of(shape, dtype, layout)
            for tokens in TOKENS:
                if time.monotonic() > deadline:
                    return
                yield run_case(shape, layout, dtype, layers, tokens)


def main() -> None:
    """Measure, print a line for each case, and write all figures to a file if asked to."""
    models = "qwen3-30b-a3b:1,qwen3-30b-a3b:2,qwen3-30b-a3b:4,mixtral-8x7b:2,glm-4.5-air:2"
    args = options(str(__doc__), DTYPES, SHAPES, models).parse_args()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; microseconds of one layer's experts of a member")
    cases: list[Case] = []
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        for case in run(args.dtype, args.models, time.monotonic() + args.seconds):
            cases.append(case)
            print(case, flush=True)
    if args.json:
        document = {"device": name, "torch": torch.__version__}
        args.json.write_text(json.dumps(document | {"cases": [asdict(case) for case in cases]}))


if __name__ == "__main__":
    main()
