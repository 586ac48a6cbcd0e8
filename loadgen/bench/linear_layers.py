"""What ``linear_kernels`` measures: layers of models under TP, in every way to compute them.

A layer's weights are those of every member of a group, of as many layers as it takes that none is
still in the GPU's L2 cache when its turn comes again.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.runtime.engine.kernels import partitioned_linear, partitioned_linear_fp8
from shoal.runtime.engine.kernels.partitioned_linear_fp8 import BLOCK
from shoal.runtime.engine.kernels.partitioned_linear_kernel import Scales, Tile, multiply

UNCACHED = 320 << 20
"""Bytes of weights between two uses of one: some times the largest L2 cache there is."""

MOST_LAYERS = 128

Way = Callable[[int], torch.Tensor]
"""Computes the layer of an index."""

BlockGemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The product of an input with a weight and its scales."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one decoder layer of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 128

    def ranges(self, rank: int, degree: int) -> list[slice]:
        """Return a rank's rows of query, key and value in ``qkv_proj``."""
        ranges, begin = [], 0
        for heads in (self.heads, self.kv_heads, self.kv_heads):
            size = heads * self.head_dim // degree
            ranges.append(slice(begin + rank * size, begin + (rank + 1) * size))
            begin += heads * self.head_dim
        return ranges


SHAPES = (Shape("8b", 4096, 32, 8, 14336), Shape("70b", 8192, 64, 8, 28672))


@dataclass
class Input:
    """Activations ``[tokens, depth]``; for FP8 their scales, ``[tokens, 1 or blocks of depth]``."""

    x: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def x_scale(self) -> torch.Tensor:
        """The scales, which are there."""
        assert self.scale is not None
        return self.scale

    @property
    def values(self) -> torch.Tensor:
        """What they stand for, in float32."""
        if self.scale is None:
            return self.x.float()
        return self.x.float() * _spread(self.scale, 1, self.x.shape[1])


class Layers(ABC):
    """One kind of layer of a model under TP.

    Attributes:
        name: which layer of the model.
        ranges: of each layer, its ranges of rows of DP's weight, ``[rows, depth]`` each.
        packed: of each layer, the same rows as a weight of its own, as stock TP has it.
    """

    name: str
    ranges: list[list[torch.Tensor]]
    packed: list[torch.Tensor]

    @property
    def columns(self) -> int:
        """Outputs."""
        return int(self.packed[0].shape[0])

    @property
    def depth(self) -> int:
        """Inputs."""
        return int(self.packed[0].shape[1])

    @abstractmethod
    def input(self, tokens: int) -> Input:
        """Return random activations."""

    @abstractmethod
    def reference(self, given: Input) -> torch.Tensor:
        """Return the first layer's output in float32, ``[tokens, columns]``."""

    @abstractmethod
    def ways(self, given: Input) -> Mapping[str, Way]:
        """Return what libraries can do, by name; ``stock`` is one GEMM over packed weights."""

    @abstractmethod
    def tiled(self, given: Input, tile: Tile) -> Way:
        """Return one launch of our kernel."""

    @abstractmethod
    def operator(self, given: Input) -> Way:
        """Return what a layout calls."""


def _enough(bytes_each: int) -> int:
    return min(MOST_LAYERS, max(8, -(-UNCACHED // bytes_each)))


def _rows_of_ranks(
    shape: Shape, degree: int, new: Callable[[int, int], torch.Tensor]
) -> list[tuple[torch.Tensor, list[slice]]]:
    """Return weights ``qkv_proj`` and a member's ranges of their rows."""
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    full = new(rows, shape.hidden)
    count = _enough(full.nbytes // degree)
    weights = [full, *(new(rows, shape.hidden) for _ in range(count // degree))]
    pairs = itertools.product(weights, range(degree))
    return [(weight, shape.ranges(rank, degree)) for weight, rank in pairs][:count]


class Qkv(Layers):
    """QKV in bfloat16: ranges of rows."""

    name = "qkv"

    def __init__(self, shape: Shape, degree: int) -> None:
        def new(rows: int, depth: int) -> torch.Tensor:
            return torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)

        members = _rows_of_ranks(shape, degree, new)
        self.ranges = [[weight[rows] for rows in ranges] for weight, ranges in members]
        self.packed = [torch.cat(ranges) for ranges in self.ranges]
        self._paired = [partitioned_linear.paired(ranges) for ranges in self.ranges]
        self._beside = torch.cuda.Stream()

    def input(self, tokens: int) -> Input:
        """Return random activations."""
        return Input(torch.randn(tokens, self.depth, device="cuda", dtype=torch.bfloat16))

    def reference(self, given: Input) -> torch.Tensor:
        """Return the first layer's output in float32, ``[tokens, columns]``."""
        return given.values @ self.packed[0].float().t()

    def ways(self, given: Input) -> Mapping[str, Way]:
        """Return one GEMM, three and a copy, three and none, and one and a batched one.

        The last two also side by side, on two streams.
        """
        linear, x = torch.nn.functional.linear, given.x
        return {
            "stock": lambda layer: linear(x, self.packed[layer]),
            "cat": lambda layer: torch.cat([linear(x, part) for part in self.ranges[layer]], -1),
            "each": lambda layer: self._each(x, layer),
            "batched": lambda layer: self._batched(x, layer),
            "side by side": lambda layer: self._side_by_side(x, layer),
        }

    def tiled(self, given: Input, tile: Tile) -> Way:
        """Return one launch of our kernel."""

        def call(layer: int) -> torch.Tensor:
            out = given.x.new_empty(given.x.shape[0], self.columns)
            multiply(given.x, self.ranges[layer], [], out, tile)
            return out

        return call

    def operator(self, given: Input) -> Way:
        """Return what a layout calls."""
        return lambda layer: partitioned_linear.linear(given.x, self._paired[layer], [])

    def _each(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.columns)
        parts = out.split([weight.shape[0] for weight in self.ranges[layer]], dim=1)
        for weight, part in zip(self.ranges[layer], parts, strict=True):
            torch.mm(x, weight.t(), out=part)
        return out

    def _batched(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.columns)
        partitioned_linear.multiply_each(x, self._paired[layer], [], out)
        return out

    def _side_by_side(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.columns)
        query, pair = self._paired[layer]
        main = torch.cuda.current_stream()
        self._beside.wait_stream(main)
        with torch.cuda.stream(self._beside):
            partitioned_linear.multiply_each(x, [pair], [], out[:, query.shape[0] :])
        partitioned_linear.multiply_each(x, [query], [], out[:, : query.shape[0]])
        main.wait_stream(self._beside)
        return out


class Fp8Layers(Layers):
    """A layer in FP8, with a scale for each token and each row.

    Attributes:
        scales: of each layer, its ranges of DP's scales, ``[rows, 1]`` each.
        packed_scales: of each layer, the same as one.
    """

    block = 0
    scales: list[list[torch.Tensor]]
    packed_scales: list[torch.Tensor]

    def input(self, tokens: int) -> Input:
        """Return random activations."""
        return Input(_random_fp8(tokens, self.depth), _random_scales(tokens))

    def reference(self, given: Input) -> torch.Tensor:
        """Return the first layer's output in float32, ``[tokens, columns]``."""
        return given.values @ (self.packed[0].float() * self.packed_scales[0]).t()

    def ways(self, given: Input) -> Mapping[str, Way]:
        """Return ``torch._scaled_mm`` of packed weights and of DP's; vLLM's CUTLASS if there."""
        bf16 = torch.bfloat16
        x, scale = given.x, given.x_scale
        ways: dict[str, Way] = {
            "stock": lambda layer: partitioned_linear_fp8.scaled_mm(
                x, scale, self.packed[layer], self.packed_scales[layer], None, bf16
            ),
            "views": lambda layer: self._scaled_mm_each(x, scale, layer),
        }
        try:
            from vllm._custom_ops import cutlass_scaled_mm
        except ImportError:
            return ways
        ways["cutlass"] = lambda layer: cutlass_scaled_mm(
            x, self.packed[layer].t(), scale, self.packed_scales[layer], bf16
        )
        if self.ranges[0][0].is_contiguous():
            ways["cutlass-copied"] = lambda layer: partitioned_linear_fp8.by_gemm(
                x, scale, self.ranges[layer], self.scales[layer], [], bf16
            )
        else:
            ways["cutlass-copied"] = lambda layer: cutlass_scaled_mm(
                x, self.ranges[layer][0].contiguous().t(), scale, self.packed_scales[layer], bf16
            )
        return ways

    def tiled(self, given: Input, tile: Tile) -> Way:
        """Return one launch of our kernel."""
        x, x_scale = given.x, given.x_scale

        def call(layer: int) -> torch.Tensor:
            out = x.new_empty(x.shape[0], self.columns, dtype=torch.bfloat16)
            scales = Scales(x_scale, self.scales[layer][0], self.block)
            multiply(x, self.ranges[layer], [], out, tile, scales)
            return out

        return call

    def operator(self, given: Input) -> Way:
        """Return what a layout calls."""
        x, scale = given.x, given.x_scale
        return lambda layer: partitioned_linear_fp8.linear(
            x, scale, self.ranges[layer], self.scales[layer], [], torch.bfloat16, self.block
        )

    def _scaled_mm_each(self, x: torch.Tensor, scale: torch.Tensor, layer: int) -> torch.Tensor:
        outputs = [
            partitioned_linear_fp8.scaled_mm(x, scale, weight, of_rows, None, torch.bfloat16)
            for weight, of_rows in zip(self.ranges[layer], self.scales[layer], strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class Fp8Qkv(Fp8Layers):
    """QKV in FP8: ranges of rows."""

    name = "qkv"

    def __init__(self, shape: Shape, degree: int) -> None:
        members = _rows_of_ranks(shape, degree, _random_fp8)
        self.ranges = [[weight[rows] for rows in ranges] for weight, ranges in members]
        self.packed = [torch.cat(ranges) for ranges in self.ranges]
        scale = _random_scales(members[0][0].shape[0])
        self.scales = [[scale[rows] for rows in ranges] for _, ranges in members]
        self.packed_scales = [torch.cat(scales) for scales in self.scales]


class Fp8RowParallel(Fp8Layers):
    """A row-parallel layer in FP8: a range of the inputs, so rows are parts of longer ones."""

    def __init__(self, name: str, outputs: int, inputs: int, degree: int) -> None:
        self.name = name
        depth = inputs // degree
        count = _enough(outputs * depth)
        weights = [_random_fp8(outputs, inputs) for _ in range(-(-count // degree))]
        pairs = itertools.product(weights, range(degree))
        views = [weight[:, rank * depth : (rank + 1) * depth] for weight, rank in pairs][:count]
        self.ranges = [[view] for view in views]
        self.packed = [view.contiguous() for view in views]
        scale = _random_scales(outputs)
        self.scales = [[scale] for _ in views]
        self.packed_scales = [scale for _ in views]


class _BlockScales(Fp8Layers):
    """The same with scales for blocks of 128."""

    block = BLOCK

    def input(self, tokens: int) -> Input:
        """Return random activations."""
        return Input(_random_fp8(tokens, self.depth), _random_scales(tokens, self.depth // BLOCK))

    def reference(self, given: Input) -> torch.Tensor:
        """Return the first layer's output in float32, ``[tokens, columns]``."""
        scale = _spread(_spread(self.packed_scales[0], 1, self.depth), 0, self.columns)
        return given.values @ (self.packed[0].float() * scale).t()

    def ways(self, given: Input) -> Mapping[str, Way]:
        """Return cuBLAS on packed weights and, of one range, on DP's; and what vLLM has, if there.

        What reads only packed weights is also timed with a copy before.
        """
        x, x_scale = given.x, given.x_scale.t().contiguous().t()

        def cublas(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(
                x, weight.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16
            )

        ways: dict[str, Way] = {}
        for name, gemm in {"stock": cublas, **_block_gemms_of_vllm(x, x_scale)}.items():
            ways |= self._ways_of(name, gemm)
        return ways

    def _ways_of(self, name: str, gemm: BlockGemm) -> Mapping[str, Way]:
        def packed(layer: int) -> torch.Tensor:
            return gemm(self.packed[layer], self.packed_scales[layer])

        def views(layer: int) -> torch.Tensor:
            return gemm(self.ranges[layer][0], self.packed_scales[layer])

        def copied(layer: int) -> torch.Tensor:
            return gemm(
                partitioned_linear_fp8.joined(self.ranges[layer]), self.packed_scales[layer]
            )

        ways = {name: packed, f"{name}-copied": copied}
        # CUTLASS takes every weight for packed, and no kernel takes three.
        if name != "cutlass" and len(self.ranges[0]) == 1:
            ways[f"{name}-views"] = views
        return ways


def _block_gemms_of_vllm(x: torch.Tensor, x_scale: torch.Tensor) -> Mapping[str, BlockGemm]:
    """Return what vLLM has, by name; nothing without vLLM."""
    try:
        from vllm._custom_ops import cutlass_scaled_mm
        from vllm.model_executor.kernels.linear.scaled_mm import triton as registered  # noqa: F401
        from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_supported
    except ImportError:
        return {}
    bf16 = torch.bfloat16

    def deep_gemm(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=bf16)
        fp8_gemm_nt((x, x_scale), (weight, scale), out)
        return out

    gemms: dict[str, BlockGemm] = {
        "cutlass": lambda weight, scale: cutlass_scaled_mm(x, weight.t(), x_scale, scale.t(), bf16),
        "triton": lambda weight, scale: torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
            x, weight, x_scale, scale, [BLOCK, BLOCK], bf16
        ),
    }
    return gemms | ({"deep-gemm": deep_gemm} if is_deep_gemm_supported() else {})


class Fp8BlockQkv(_BlockScales):
    """QKV in FP8 with scales for blocks."""

    name = "qkv"

    def __init__(self, shape: Shape, degree: int) -> None:
        members = _rows_of_ranks(shape, degree, _random_fp8)
        self.ranges = [[weight[rows] for rows in ranges] for weight, ranges in members]
        self.packed = [torch.cat(ranges) for ranges in self.ranges]
        rows, depth = members[0][0].shape
        scale = _random_scales(rows // BLOCK, depth // BLOCK)
        self.scales = [
            [scale[rows.start // BLOCK : rows.stop // BLOCK] for rows in ranges]
            for _, ranges in members
        ]
        self.packed_scales = [torch.cat(scales) for scales in self.scales]

    def input(self, tokens: int) -> Input:
        """Return random activations; their scales lie as CUTLASS's quantisation leaves them."""
        given = super().input(tokens)
        return Input(given.x, given.x_scale.t().contiguous().t())


class Fp8BlockRowParallel(_BlockScales, Fp8RowParallel):
    """A row-parallel layer in FP8 with scales for blocks."""

    def __init__(self, name: str, outputs: int, inputs: int, degree: int) -> None:
        super().__init__(name, outputs, inputs, degree)
        depth = self.depth // BLOCK
        scale = _random_scales(outputs // BLOCK, inputs // BLOCK)
        of_ranks = [scale[:, rank * depth : (rank + 1) * depth] for rank in range(degree)]
        self.scales = [[of_ranks[index % degree]] for index in range(len(self.packed))]
        self.packed_scales = [scales[0].contiguous() for scales in self.scales]


def _random_fp8(rows: int, depth: int) -> torch.Tensor:
    values = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    return values.to(torch.float8_e4m3fn)


def _random_scales(rows: int, columns: int = 1) -> torch.Tensor:
    return torch.rand(rows, columns, device="cuda") + 0.5


def _spread(scale: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    return scale.repeat_interleave(size // scale.shape[dimension], dimension)


def kinds(dtype: str, shape: Shape, degree: int) -> list[Callable[[], Layers]]:
    """Return what makes each kind of layer, of a key of ``CANDIDATES``, of a model under TP."""
    if dtype == "bf16":
        return [lambda: Qkv(shape, degree)]
    qkv, row_parallel = {
        "fp8": (Fp8Qkv, Fp8RowParallel),
        "fp8-block": (Fp8BlockQkv, Fp8BlockRowParallel),
    }[dtype]
    heads = shape.heads * shape.head_dim
    return [
        lambda: qkv(shape, degree),
        lambda: row_parallel("o", shape.hidden, heads, degree),
        lambda: row_parallel("down", shape.hidden, shape.intermediate, degree),
    ]


# --- tiles to try ---------------------------------------------------------------------------------


def _vector(*tiles: tuple[int, int, int]) -> list[Tile]:
    return [Tile(1, columns, depth, warps=warps) for columns, depth, warps in tiles]


def _matrix(
    tokens: int, *tiles: tuple[int, int, int, int, int], rows_first: bool = False
) -> list[Tile]:
    return [Tile(tokens, *sizes, rows_first=rows_first) for sizes in tiles]


_BF16: Mapping[int, Sequence[Tile]] = {
    1: [
        *_vector((1, 2048, 4), (2, 1024, 4), (2, 2048, 4), (2, 4096, 8), (4, 1024, 4)),
        *_vector((4, 2048, 4), (4, 2048, 8), (8, 1024, 4), (8, 1024, 8), (8, 512, 4), (16, 512, 4)),
        *_matrix(16, (16, 256, 1, 4, 4), (16, 256, 2, 4, 4), (32, 128, 2, 4, 5)),
    ],
    16: [
        *_matrix(
            16, (16, 256, 1, 4, 4), (16, 256, 2, 4, 4), (16, 256, 4, 4, 4), (16, 512, 1, 4, 3)
        ),
        *_matrix(
            16, (16, 512, 2, 4, 3), (32, 128, 1, 4, 6), (32, 128, 2, 4, 5), (32, 256, 1, 4, 4)
        ),
        *_matrix(
            16, (32, 256, 2, 4, 3), (32, 256, 4, 4, 3), (32, 128, 4, 4, 4), (64, 128, 2, 4, 4)
        ),
        *_matrix(16, (64, 128, 4, 4, 4), (16, 128, 2, 2, 6)),
    ],
    32: [
        *_matrix(
            32, (16, 256, 1, 4, 4), (16, 256, 2, 4, 3), (32, 128, 1, 4, 5), (32, 128, 2, 4, 4)
        ),
        *_matrix(
            32, (32, 128, 4, 4, 4), (32, 256, 2, 4, 3), (64, 128, 2, 4, 4), (64, 128, 4, 4, 3)
        ),
    ],
    64: [
        *_matrix(
            64, (16, 128, 1, 4, 5), (32, 128, 1, 4, 4), (32, 128, 2, 4, 4), (32, 128, 4, 4, 4)
        ),
        *_matrix(64, (64, 64, 1, 4, 6), (64, 64, 2, 4, 6), (64, 128, 2, 4, 4), (64, 128, 4, 4, 3)),
        *_matrix(64, (128, 64, 4, 4, 4)),
    ],
    128: [
        *_matrix(64, (64, 64, 1, 4, 5), (64, 128, 1, 4, 3), (128, 64, 1, 4, 4), (64, 64, 2, 4, 5)),
        *_matrix(128, (64, 64, 1, 4, 4), (64, 64, 2, 4, 4), (64, 128, 2, 8, 3), (128, 64, 2, 8, 4)),
    ],
    256: [
        *_matrix(64, (64, 64, 1, 4, 5), (128, 64, 1, 4, 4), (128, 128, 1, 8, 3)),
        *_matrix(128, (64, 64, 1, 4, 4), (128, 64, 1, 8, 4), (128, 64, 2, 8, 4)),
    ],
    1024: [
        *_matrix(64, (128, 64, 1, 4, 4)),
        *_matrix(128, (64, 64, 1, 4, 4), (128, 64, 1, 8, 3), (128, 64, 1, 8, 4)),
    ],
}

_ROWS_16 = _matrix(
    16,
    (64, 128, 2, 4, 6),
    (64, 128, 4, 4, 5),
    (64, 256, 2, 4, 4),
    (64, 256, 4, 4, 3),
    (64, 256, 8, 4, 3),
    (64, 512, 2, 4, 3),
    (128, 128, 4, 8, 5),
    (128, 256, 4, 8, 3),
    rows_first=True,
)

_FP8: Mapping[int, Sequence[Tile]] = {
    1: [
        *_vector((1, 4096, 4), (2, 2048, 4), (2, 4096, 4), (4, 1024, 4), (4, 2048, 4)),
        *_vector((4, 2048, 8), (8, 512, 4), (8, 1024, 4)),
        *_matrix(8, (64, 256, 2, 4, 4), (64, 256, 4, 4, 4), rows_first=True),
    ],
    8: [
        *_matrix(8, (64, 128, 4, 4, 6), (64, 256, 2, 4, 4), (64, 256, 4, 4, 4), rows_first=True),
        *_matrix(8, (64, 512, 2, 4, 3), (128, 256, 4, 8, 3), rows_first=True),
        *_matrix(16, (64, 256, 4, 4, 4), (32, 256, 4, 4, 4), (32, 256, 2, 4, 4)),
        *_ROWS_16,
    ],
    16: [*_matrix(16, (64, 256, 4, 4, 4), (32, 256, 4, 4, 4), (32, 256, 2, 4, 4)), *_ROWS_16],
    32: [
        *_matrix(32, (32, 256, 4, 4, 4), (64, 256, 4, 4, 3)),
        *_matrix(32, (64, 128, 2, 4, 6), (64, 128, 4, 4, 5), (64, 256, 2, 4, 4), rows_first=True),
        *_matrix(32, (64, 256, 4, 4, 3), (128, 128, 4, 8, 4), (128, 256, 4, 8, 3), rows_first=True),
    ],
    64: [
        *_matrix(64, (32, 256, 4, 4, 3), (64, 128, 2, 4, 6), (64, 256, 2, 4, 3)),
        *_matrix(64, (64, 128, 1, 4, 6), (64, 128, 2, 4, 6), (64, 128, 4, 4, 4), rows_first=True),
        *_matrix(64, (64, 256, 2, 4, 3), (128, 128, 2, 8, 4), (128, 128, 4, 8, 4), rows_first=True),
    ],
    128: [
        *_matrix(128, (64, 128, 2, 4, 4), (64, 128, 1, 4, 5), (128, 128, 2, 8, 4)),
        *_matrix(
            128, (64, 128, 2, 4, 4), (128, 128, 1, 8, 4), (128, 128, 2, 8, 4), rows_first=True
        ),
    ],
}

_BLOCK_16 = _matrix(
    16,
    (64, 128, 1, 4, 6),
    (64, 128, 2, 4, 6),
    (64, 128, 4, 4, 6),
    (64, 128, 8, 4, 4),
    (128, 128, 4, 8, 5),
    rows_first=True,
)

_FP8_BLOCK: Mapping[int, Sequence[Tile]] = {
    8: [
        *_matrix(8, (64, 128, 2, 4, 6), (64, 128, 4, 4, 6), (64, 128, 8, 4, 4), rows_first=True),
        *_matrix(16, (64, 128, 4, 4, 5), (32, 128, 4, 4, 5)),
        *_BLOCK_16,
    ],
    16: [*_matrix(16, (64, 128, 4, 4, 5)), *_BLOCK_16],
    32: _matrix(32, (64, 128, 2, 4, 5), (64, 128, 4, 4, 5), (128, 128, 4, 8, 4), rows_first=True),
    64: [
        *_matrix(64, (64, 128, 2, 4, 5)),
        *_matrix(64, (64, 128, 2, 4, 5), (64, 128, 4, 4, 4), (128, 128, 4, 8, 4), rows_first=True),
    ],
    128: [
        *_matrix(64, (64, 128, 2, 4, 5), rows_first=True),
        *_matrix(128, (64, 128, 2, 4, 4), (128, 128, 1, 8, 4), (128, 128, 2, 8, 4)),
    ],
}

CANDIDATES: Mapping[str, Mapping[int, Sequence[Tile]]] = {
    "bf16": _BF16,
    "fp8": _FP8,
    "fp8-block": _FP8_BLOCK,
}
"""By type, and by the most tokens for which they are meant."""
