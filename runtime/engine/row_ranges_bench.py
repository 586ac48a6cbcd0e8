"""How long QKV takes under TP: one contiguous weight, as in stock vLLM, and ranges of rows of DP's.

``python -m runtime.engine.row_ranges_bench`` needs one GPU, PyTorch and Triton, no vLLM. Every
figure is a replay of a CUDA graph of as many calls as there are layers, each with a weight of its
own, so that weights come from memory as in a model's step. What is fastest goes into
``row_ranges_kernel.TILES``.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.engine import row_ranges
from runtime.engine.row_ranges_kernel import Tile, multiply

TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)
DEGREES = (2, 4, 8)
REPLAYS = 15
WORST_ERROR = 0.02
"""Largest error, relative to the largest output, that is taken for rounding of 16-bit floats."""


@dataclass(frozen=True)
class Shape:
    """The attention of a model: sizes of one layer's QKV."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int = 128

    def ranges(self, degree: int) -> list[slice]:
        """Return the last rank's rows of query, key and value."""
        ranges, begin = [], 0
        for heads in (self.heads, self.kv_heads, self.kv_heads):
            end = begin + heads * self.head_dim
            ranges.append(slice(end - heads * self.head_dim // degree, end))
            begin = end
        return ranges


SHAPES = (Shape("8b", 4096, 32, 8, 24), Shape("70b", 8192, 64, 8, 12))

_VECTOR = [
    Tile(1, columns, depth, warps=warps)
    for columns, depth, warps in (
        (1, 2048, 4),
        (2, 1024, 4),
        (2, 2048, 4),
        (2, 4096, 8),
        (4, 1024, 4),
        (4, 2048, 4),
        (4, 2048, 8),
        (8, 1024, 4),
        (8, 1024, 8),
        (8, 512, 4),
        (16, 512, 4),
    )
]


def _matrix(tokens: int, *tiles: tuple[int, int, int, int, int]) -> list[Tile]:
    return [Tile(tokens, *sizes) for sizes in tiles]


CANDIDATES: dict[int, list[Tile]] = {
    1: [*_VECTOR, *_matrix(16, (16, 256, 1, 4, 4), (16, 256, 2, 4, 4), (32, 128, 2, 4, 5))],
    16: _matrix(
        16,
        (16, 256, 1, 4, 4),
        (16, 256, 2, 4, 4),
        (16, 256, 4, 4, 4),
        (16, 512, 1, 4, 3),
        (16, 512, 2, 4, 3),
        (32, 128, 1, 4, 6),
        (32, 128, 2, 4, 5),
        (32, 256, 1, 4, 4),
        (32, 256, 2, 4, 3),
        (32, 256, 4, 4, 3),
        (32, 128, 4, 4, 4),
        (64, 128, 2, 4, 4),
        (64, 128, 4, 4, 4),
        (16, 128, 2, 2, 6),
    ),
    32: _matrix(
        32,
        (16, 256, 1, 4, 4),
        (16, 256, 2, 4, 3),
        (32, 128, 1, 4, 5),
        (32, 128, 2, 4, 4),
        (32, 128, 4, 4, 4),
        (32, 256, 2, 4, 3),
        (64, 128, 2, 4, 4),
        (64, 128, 4, 4, 3),
    ),
    64: _matrix(
        64,
        (16, 128, 1, 4, 5),
        (32, 128, 1, 4, 4),
        (32, 128, 2, 4, 4),
        (32, 128, 4, 4, 4),
        (64, 64, 1, 4, 6),
        (64, 64, 2, 4, 6),
        (64, 128, 2, 4, 4),
        (64, 128, 4, 4, 3),
        (128, 64, 4, 4, 4),
    ),
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
"""Tiles to try, by the most tokens for which they are meant."""


@dataclass
class Case:
    """What one shape, degree and number of tokens took: microseconds a call, by way."""

    shape: str
    degree: int
    tokens: int
    columns: int
    ways: dict[str, float]
    tiles: list[tuple[Tile, float]]
    wrong: list[str]

    @property
    def stock(self) -> float:
        """Time of one GEMM on a contiguous weight."""
        return self.ways["stock"]

    def __str__(self) -> str:
        ways = " ".join(f"{name} {micros:.1f}" for name, micros in self.ways.items())
        best = " | ".join(
            f"{_short(tile)} {micros:.1f} ({micros / self.stock:.2f})"
            for tile, micros in self.tiles[:3]
        )
        wrong = f" WRONG: {', '.join(self.wrong)}" if self.wrong else ""
        return f"{self.shape} tp{self.degree} M={self.tokens}: {ways} || {best}{wrong}"


def _short(tile: Tile) -> str:
    return "{tokens}x{columns}x{depth}/{splits} w{warps} s{stages}".format(**asdict(tile))


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def measure(call: Callable[[int], torch.Tensor], layers: int) -> float:
    """Return the microseconds that ``call(layer)`` takes in a CUDA graph of one call a layer."""
    stream = _stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for layer in range(layers):
            call(layer)
        graph.capture_end()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        graph.replay()
        graph.replay()
        for event in events[:-1]:
            event.record(stream)
            graph.replay()
        events[-1].record(stream)
        stream.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return float(times[len(times) // 2]) * 1000 / layers


class Layers:
    """The QKV weights of a model's layers, as DP holds them and as stock TP does."""

    def __init__(self, shape: Shape, degree: int, full: list[torch.Tensor]) -> None:
        self.shape = shape
        self.degree = degree
        self.ranges = [[weight[rows] for rows in shape.ranges(degree)] for weight in full]
        self.stock = [torch.cat(ranges) for ranges in self.ranges]
        self.columns = self.stock[0].shape[0]

    def ways(self, x: torch.Tensor) -> dict[str, Callable[[int], torch.Tensor]]:
        """Return what PyTorch can do, by name."""
        linear = torch.nn.functional.linear
        return {
            "stock": lambda layer: linear(x, self.stock[layer]),
            "cat": lambda layer: torch.cat([linear(x, part) for part in self.ranges[layer]], -1),
            "each": lambda layer: self._each(x, layer),
            "batched": lambda layer: self._batched(x, layer),
        }

    def tiled(self, x: torch.Tensor, tile: Tile) -> Callable[[int], torch.Tensor]:
        """Return one launch of our kernel."""

        def call(layer: int) -> torch.Tensor:
            out = x.new_empty(x.shape[0], self.columns)
            multiply(x, self.ranges[layer], [], out, tile)
            return out

        return call

    def _each(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """One GEMM for each range."""
        out = x.new_empty(x.shape[0], self.columns)
        parts = out.split([weight.shape[0] for weight in self.ranges[layer]], dim=1)
        for weight, part in zip(self.ranges[layer], parts, strict=True):
            torch.mm(x, weight.t(), out=part)
        return out

    def _batched(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """The queries alone, keys and values as one batched GEMM."""
        out = x.new_empty(x.shape[0], self.columns)
        row_ranges.multiply_each(x, self.ranges[layer], [], out)
        return out


def run_case(layers: Layers, tokens: int) -> Case:
    """Measure and check every way for one number of tokens."""
    x = torch.randn(tokens, layers.shape.hidden, device="cuda", dtype=torch.bfloat16)
    reference = x.float() @ layers.stock[0].float().t()
    count = len(layers.stock)
    case = Case(layers.shape.name, layers.degree, tokens, layers.columns, {}, [], [])

    def timed(name: str, call: Callable[[int], torch.Tensor]) -> float | None:
        try:
            first = call(0)
            error = (first.float() - reference).abs().max() / reference.abs().max()
            micros = measure(call, count)
        except Exception as problem:  # noqa: BLE001 - one way that fails is a result
            case.wrong.append(f"{name}: {type(problem).__name__} {str(problem)[:80]}")
            return None
        if not error < WORST_ERROR:
            case.wrong.append(f"{name}: error {error:.3g}")
        if not torch.equal(call(0), first):
            case.wrong.append(f"{name}: another result the second time")
        return micros

    for name, call in layers.ways(x).items():
        if (micros := timed(name, call)) is not None:
            case.ways[name] = micros
    meant = min(most for most in CANDIDATES if tokens <= most)
    for tile in CANDIDATES[meant]:
        if (micros := timed(_short(tile), layers.tiled(x, tile))) is not None:
            case.tiles.append((tile, micros))
    case.tiles.sort(key=lambda timing: timing[1])
    return case


def run(shapes: list[Shape], deadline: float) -> Iterator[Case]:
    """Yield every case until the deadline, on ``time.monotonic``'s clock."""
    for shape in shapes:
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        full = [
            torch.randn(rows, shape.hidden, device="cuda", dtype=torch.bfloat16)
            for _ in range(shape.layers)
        ]
        for degree in DEGREES:
            layers = Layers(shape, degree, full)
            for tokens in TOKENS:
                if time.monotonic() > deadline:
                    return
                yield run_case(layers, tokens)


def compromises(cases: list[Case]) -> Iterator[str]:
    """Yield, by number of tokens, the tiles whose worst time beside stock's is the best."""
    for tokens in TOKENS:
        worst: dict[Tile, list[float]] = {}
        of_tokens = [case for case in cases if case.tokens == tokens]
        for case in of_tokens:
            for tile, micros in case.tiles:
                worst.setdefault(tile, []).append(micros / case.stock)
        complete = {tile: max(r) for tile, r in worst.items() if len(r) == len(of_tokens)}
        ranking = sorted(complete.items(), key=lambda item: item[1])[:3]
        named = ", ".join(f"{_short(tile)} at worst {ratio:.2f}" for tile, ratio in ranking)
        yield f"M={tokens}: {named}"


def host_micros(layers: Layers, tokens: int) -> dict[str, float]:
    """Return the CPU's microseconds to launch one call outside a graph, by way."""
    x = torch.randn(tokens, layers.shape.hidden, device="cuda", dtype=torch.bfloat16)
    calls = layers.ways(x) | {"op": lambda layer: row_ranges.linear(x, layers.ranges[layer], [])}
    result = {}
    for name, call in calls.items():
        call(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call(0)
        result[name] = (time.perf_counter() - start) * 1e4
        torch.cuda.synchronize()
    return result


def main() -> None:
    """Measure, print a line for each case, and write all figures to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--seconds", type=float, default=110.0, help="stop after this long")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds a call; in")
    print("brackets: beside stock; a tile is tokens x columns x depth / splits, warps, stages")
    cases: list[Case] = []
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        for case in run([s for s in SHAPES if s.name in args.shapes.split(",")], deadline):
            cases.append(case)
            print(case, flush=True)
            if args.json:
                document["cases"] = [asdict(case) for case in cases]
                args.json.write_text(json.dumps(document))
        for line in compromises(cases):
            print(line)
        small = Shape("host", 1024, 8, 2, 1)
        weight = torch.randn(12 * 128, small.hidden, device="cuda", dtype=torch.bfloat16)
        for tokens in (8, 2048):
            micros = host_micros(Layers(small, 2, [weight]), tokens)
            print(f"host, M={tokens}:", {name: round(value, 1) for name, value in micros.items()})


if __name__ == "__main__":
    main()
