"""The layers that ``linear_kernels`` measures, and every way to compute them under TP.

For each kind of layer, there are weights of every member of a group and of several layers: so many
that no weight is still in the GPU's L2 cache when it is used again.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels import partitioned_linear
from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_candidates import (
    CANDIDATES,
    Run,
    format_of,
    launch,
)
from shoal.runtime.engine.kernels.linear_tiles import ANY, BLOCK, Tile

UNCACHED = 320 << 20
"""Bytes of weights between two uses of the same weight: several times the largest L2 cache."""

MOST_LAYERS = 128
DEVICE = "cuda"

DTYPES = ("bf16", "fp8", "fp8-block")
"""Types of weights. ``fp8`` has a scale per token and per row, ``fp8-block`` one per block."""

Way = Callable[[int], torch.Tensor]
"""Computes the layer with a given index."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one decoder layer of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 128

    def ranges(self, rank: int, layout: Layout) -> list[slice]:
        """Return a rank's rows of query, key and value in ``qkv_proj``."""
        ranges, begin = [], 0
        for heads in (self.heads, self.kv_heads, self.kv_heads):
            size = heads * self.head_dim // layout.tp
            ranges.append(slice(begin + rank * size, begin + (rank + 1) * size))
            begin += heads * self.head_dim
        return ranges


SHAPES = (Shape("8b", 4096, 32, 8, 14336), Shape("70b", 8192, 64, 8, 28672))


@dataclass(frozen=True)
class Input:
    """Activations ``[tokens, depth]``; in FP8 with scales, ``[tokens, 1 or blocks of depth]``."""

    x: torch.Tensor
    scale: torch.Tensor | None = None


class Layers:
    """One kind of layer of a model under TP.

    Attributes:
        name: which layer of the model.
        views: for each layer, its ranges of DP's weight.
        packed: for each layer, the same ranges as a weight of its own, as in stock TP.
    """

    def __init__(self, name: str, dtype: str, views: list[Ranges]) -> None:
        self.name = name
        self.views = views
        self.packed = [_packed(ranges) for ranges in views]
        self._dtype = dtype
        # In 16 bits a layout binds pairs, where three GEMMs become one GEMM and a batched one.
        self._bound = views if dtype != "bf16" else [_paired(ranges) for ranges in views]

    @property
    def columns(self) -> int:
        """Outputs."""
        return int(self.packed[0].weights[0].shape[0])

    @property
    def depth(self) -> int:
        """Inputs."""
        return int(self.packed[0].weights[0].shape[1])

    def input(self, tokens: int) -> Input:
        """Return random activations, with scales of blocks laid out as quantisation leaves them."""
        x = _random(self._dtype, tokens, self.depth)
        if self._dtype == "bf16":
            return Input(x)
        if self._dtype == "fp8":
            return Input(x, _random_scales(tokens, 1))
        return Input(x, _random_scales(self.depth // BLOCK, tokens).t())

    def reference(self, given: Input) -> torch.Tensor:
        """Return the first layer's output in float32, ``[tokens, columns]``."""
        weights, _, scales, *_ = self.packed[0]
        x, weight = given.x.float(), weights[0].float()
        if given.scale is not None:
            x *= _spread(given.scale, 1, self.depth)
            weight *= _spread(_spread(scales[0], 1, self.depth), 0, self.columns)
        return x @ weight.t()

    def ways(self, given: Input) -> Mapping[str, Way]:
        """Return the libraries' ways to compute the layer by name, and the operator of a layout.

        Each library is timed on packed weights, and on DP's if it can read them; in FP8 it then
        copies several ranges. A library that reads only packed weights is also timed with a copy
        before it.
        """
        with contextlib.suppress(ImportError):  # It registers the operator for blocks.
            from vllm.model_executor.kernels.linear.scaled_mm import triton  # noqa: F401
        ways: dict[str, Way] = {}
        lie = {"packed": self.packed, "views": self.views}
        lie |= {} if self._bound is self.views else {"paired": self._bound}
        for library in LIBRARIES:
            for how, layers in lie.items():
                if library.reads(format_of(layers[0])):
                    ways[f"{library.name}, {how}"] = _way(library.run, given, layers)
            if f"{library.name}, packed" in ways and f"{library.name}, views" not in ways:
                ways[f"{library.name}, copied"] = _way(library.run, given, self.views, copied=True)
        return ways | {"op": _way(_operator, given, self._bound)}

    def tiled(self, given: Input, tile: Tile) -> Way:
        """Return a way that launches our kernel once."""
        return _way(partial(launch, tile), given, self.views)


def _way(run: Run, given: Input, layers: Sequence[Ranges], *, copied: bool = False) -> Way:
    if copied:
        return lambda layer: run(given.x, given.scale, _packed(layers[layer]))
    return lambda layer: run(given.x, given.scale, layers[layer])


def _operator(x: torch.Tensor, x_scale: torch.Tensor | None, ranges: Ranges) -> torch.Tensor:
    return partitioned_linear.linear(x, *ranges, x_scale=x_scale)


STOCK = {
    "bf16": "GEMMs, packed",
    "fp8": "torch._scaled_mm, packed",
    "fp8-block": "cuBLAS for blocks, packed",
}
"""The way that others are compared with: one of PyTorch's products, on packed weights."""

LIBRARIES = [candidate for candidate in CANDIDATES if candidate.best_up_to == ANY]
"""The libraries timed beside our kernel; vLLM's are among them where vLLM is installed."""


# --- weights --------------------------------------------------------------------------------------


def kinds(dtype: str, shape: Shape, layout: Layout) -> list[Callable[[], Layers]]:
    """Return functions that make each kind of layer of a model under TP, in one of ``DTYPES``.

    In 16 bits a layout reads row-parallel weights as vLLM does, so only QKV differs and is
    measured.
    """
    heads = shape.heads * shape.head_dim
    qkv = partial(_qkv, dtype, shape, layout)
    if dtype == "bf16":
        return [qkv]
    return [
        qkv,
        partial(_row_parallel, "o", dtype, shape.hidden, heads, layout),
        partial(_row_parallel, "down", dtype, shape.hidden, shape.intermediate, layout),
    ]


def _qkv(dtype: str, shape: Shape, layout: Layout) -> Layers:
    """Return QKV: three ranges of rows."""
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return Layers(
        "qkv",
        dtype,
        [
            _cut(full, shape.ranges(rank, layout), slice(0, shape.hidden))
            for full, rank in _members(dtype, rows, shape.hidden, layout)
        ],
    )


def _row_parallel(name: str, dtype: str, outputs: int, inputs: int, layout: Layout) -> Layers:
    """Return a row-parallel layer: a range of the inputs, so each row is part of a longer one."""
    depth = inputs // layout.tp
    return Layers(
        name,
        dtype,
        [
            _cut(full, [slice(0, outputs)], slice(rank * depth, (rank + 1) * depth))
            for full, rank in _members(dtype, outputs, inputs, layout)
        ],
    )


def _members(dtype: str, rows: int, depth: int, layout: Layout) -> list[tuple[Ranges, int]]:
    """Return pairs of a weight and a member, so many that no weight stays in the cache."""
    first = whole_weight(dtype, rows, depth)
    count = min(MOST_LAYERS, max(8, -(-UNCACHED * layout.tp // first.weights[0].nbytes)))
    weights = [first, *(whole_weight(dtype, rows, depth) for _ in range(count // layout.tp))]
    return list(itertools.product(weights, range(layout.tp)))[:count]


def whole_weight(dtype: str, rows: int, depth: int) -> Ranges:
    """Return a random weight of one of ``DTYPES``, as DP has it."""
    weight = _random(dtype, rows, depth)
    if dtype == "bf16":
        return Ranges([weight])
    if dtype == "fp8":
        return Ranges([weight], [], [_random_scales(rows, 1)], torch.bfloat16)
    scale = _random_scales(rows // BLOCK, depth // BLOCK)
    return Ranges([weight], [], [scale], torch.bfloat16, BLOCK)


def _cut(full: Ranges, ranges: list[slice], inputs: slice) -> Ranges:
    """Return ranges of rows, and of the inputs, of a weight."""
    weights = [full.weights[0][rows, inputs] for rows in ranges]
    scales: list[torch.Tensor] = []
    if full.block:
        # A layout packs the scales of a range of inputs.
        scales = [full.scales[0][_blocks(rows), _blocks(inputs)].contiguous() for rows in ranges]
    elif full.scales:
        scales = [full.scales[0][rows] for rows in ranges]
    return full._replace(weights=weights, scales=scales)


def _blocks(elements: slice) -> slice:
    return slice(elements.start // BLOCK, elements.stop // BLOCK)


def _packed(ranges: Ranges) -> Ranges:
    """Return a copy of the ranges as one contiguous weight."""
    # Viewed as bytes, which every PyTorch can concatenate.
    weight = torch.cat([part.view(torch.uint8) for part in ranges.weights])
    scales = [torch.cat(list(ranges.scales))] if ranges.scales else []
    return ranges._replace(weights=[weight.view(ranges.weights[0].dtype)], scales=scales)


def _paired(ranges: Ranges) -> Ranges:
    return ranges._replace(weights=partitioned_linear.paired(ranges.weights))


def _random(dtype: str, rows: int, depth: int) -> torch.Tensor:
    values = torch.randn(rows, depth, device=DEVICE, dtype=torch.bfloat16)
    return values if dtype == "bf16" else values.to(torch.float8_e4m3fn)


def _random_scales(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, columns, device=DEVICE) + 0.5


def _spread(scale: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    return scale.repeat_interleave(size // scale.shape[dimension], dimension)
