"""Times layers of TP on weights of their own, as in stock vLLM, and on views of DP's weights.

``python -m shoal.loadgen.bench.linear_kernels [--dtype fp8]`` needs one GPU, PyTorch and Triton;
with vLLM installed, it times vLLM's FP8 kernels too. Every figure is from a CUDA graph whose calls
each read another weight, so that weights come from memory as in a model's step. The fastest tiles
go into ``linear_tiles``, and the order of all ways into ``linear_candidates``.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.loadgen.bench.linear_layers import (
    DTYPES,
    SHAPES,
    STOCK,
    Layers,
    Shape,
    kinds,
    whole_weight,
)
from shoal.loadgen.bench.tiles_to_try import tiles_to_try, written
from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels.linear_tiles import Tile

TOKENS = {
    "bf16": (1, 8, 16, 32, 64, 128, 256, 512, 1024),
    "fp8": (1, 8, 16, 32, 64, 128, 512, 4096, 8192),
    "fp8-block": (1, 8, 16, 32, 64, 128, 512, 4096, 8192),
}
REPLAYS = 15
WORST_ERROR = 0.02
"""The largest error, relative to the largest output, that 16-bit rounding may explain."""


@dataclass
class Case:
    """The microseconds per call of one layer, layout and number of tokens, by way."""

    dtype: str
    shape: str
    layout: str
    layer: str
    tokens: int
    columns: int
    depth: int
    ways: dict[str, float]
    tiles: list[tuple[Tile, float]]
    wrong: list[str]

    @property
    def stock(self) -> float:
        """Time of the stock way, on a packed weight; NaN if that failed."""
        return self.ways.get(STOCK[self.dtype], math.nan)

    def __str__(self) -> str:
        ways = "; ".join(f"{name} {micros:.1f}" for name, micros in self.ways.items())
        best = ", ".join(f"{written(tile)} {micros:.1f}" for tile, micros in self.tiles[:2])
        beside = f" ({self.tiles[0][1] / self.stock:.2f})" if self.tiles else ""
        wrong = f" WRONG: {', '.join(self.wrong)}" if self.wrong else ""
        name = f"{self.shape} {self.layout} {self.layer} M={self.tokens}"
        return f"{name}: {ways} | {best}{beside}{wrong}"


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:40]


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def measure(call: Callable[[int], torch.Tensor], layers: int) -> float:
    """Return the microseconds of ``call(layer)`` in a CUDA graph with one call for each layer."""
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


def run_case(shape: Shape, layout: Layout, dtype: str, layers: Layers, tokens: int) -> Case:
    """Measure and check every way for one number of tokens."""
    given = layers.input(tokens)
    reference = layers.reference(given)
    count = len(layers.packed)
    sizes = (tokens, layers.columns, layers.depth)
    case = Case(dtype, shape.name, layout.name, layers.name, *sizes, {}, [], [])

    def timed(name: str, call: Callable[[int], torch.Tensor]) -> float | None:
        try:
            first = call(0)
            error = (first.float() - reference).abs().max() / reference.abs().max()
            micros = measure(call, count)
        except Exception as problem:  # noqa: BLE001 - one way that fails is a result
            case.wrong.append(f"{name}: {type(problem).__name__} {_one_line(problem)}")
            return None
        if not error < WORST_ERROR:
            case.wrong.append(f"{name}: error {error:.3g}")
        if not torch.equal(call(0), first):
            case.wrong.append(f"{name}: another result the second time")
        return micros

    for name, call in layers.ways(given).items():
        if (micros := timed(name, call)) is not None:
            case.ways[name] = micros
    for tile in tiles_to_try(dtype, tokens):
        if (micros := timed(written(tile), layers.tiled(given, tile))) is not None:
            case.tiles.append((tile, micros))
    case.tiles.sort(key=lambda timing: timing[1])
    return case


def run(dtype: str, models: list[tuple[Shape, Layout]], deadline: float) -> Iterator[Case]:
    """Yield every case until the deadline, on ``time.monotonic``'s clock.

    Args:
        dtype: one of ``DTYPES``.
        models: shapes, each with its layout.
        deadline: the time after which no case is begun.
    """
    for shape, layout in models:
        for make in kinds(dtype, shape, layout):
            if time.monotonic() > deadline:
                return
            layers = make()
            for tokens in TOKENS[dtype]:
                if time.monotonic() > deadline:
                    return
                yield run_case(shape, layout, dtype, layers, tokens)


def compile_tiles(dtypes: list[str], models: list[tuple[Shape, Layout]]) -> None:
    """Compile every candidate into Triton's cache, on several processors at once."""
    work = [
        (dtype, depth, tile)
        for dtype in dtypes
        for depth in sorted({d for model in models for d in _depths(dtype, *model)})
        for tile in {tile for tokens in TOKENS[dtype] for tile in tiles_to_try(dtype, tokens)}
    ]
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile, *zip(*work, strict=True), chunksize=4))


def _depths(dtype: str, shape: Shape, layout: Layout) -> list[int]:
    if dtype == "bf16":
        return [shape.hidden]
    heads = shape.heads * shape.head_dim
    return [shape.hidden, heads // layout.tp, shape.intermediate // layout.tp]


def _compile(dtype: str, depth: int, tile: Tile) -> None:
    layers = Layers("any", dtype, [whole_weight(dtype, 128, depth)])
    # If a tile cannot be compiled, the measurement reports it.
    with contextlib.suppress(Exception):
        layers.tiled(layers.input(tile.tokens), tile)(0)


def compromises(cases: list[Case]) -> Iterator[str]:
    """Yield, by layer and tokens, the tiles whose worst ratio to the best tile is smallest."""
    for (layer, tokens), group in itertools.groupby(
        sorted(cases, key=_by_layer_and_tokens), _by_layer_and_tokens
    ):
        of_both = [case for case in group if case.tiles]
        worst: dict[Tile, list[float]] = {}
        for case in of_both:
            for tile, micros in case.tiles:
                worst.setdefault(tile, []).append(micros / case.tiles[0][1])
        complete = {tile: max(r) for tile, r in worst.items() if len(r) == len(of_both)}
        ranking = sorted(complete.items(), key=lambda item: item[1])[:2]
        named = ", ".join(f"{written(tile)} {ratio:.2f}" for tile, ratio in ranking)
        yield f"{layer} M={tokens}: {named}"


def _by_layer_and_tokens(case: Case) -> tuple[str, int]:
    return case.layer, case.tokens


def host_micros(tokens: int) -> dict[str, float]:
    """Return the CPU's microseconds to launch one call outside a graph, by way."""
    (make,) = kinds("bf16", Shape("host", 1024, 8, 2, 1), Layout(tp=2))
    layers = make()
    result = {}
    for name, call in layers.ways(layers.input(tokens)).items():
        call(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call(0)
        result[name] = (time.perf_counter() - start) * 1e4
        torch.cuda.synchronize()
    return result


def options(
    about: str, dtypes: Sequence[str], shapes: Sequence[Any], models: str
) -> argparse.ArgumentParser:
    """Return the options of a benchmark of kernels.

    Args:
        about: what the benchmark measures.
        dtypes: types of weights to choose from.
        shapes: shapes of layers, each with a name.
        models: the shapes and degrees of TP that are measured by default, as ``8b:2,8b:4``.
    """
    named = {shape.name: shape for shape in shapes}

    def read(text: str) -> list[tuple[Any, Layout]]:
        entries = (entry.partition(":") for entry in text.split(","))
        return [(named[name], Layout(tp=int(tp))) for name, _, tp in entries]

    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("--dtype", choices=dtypes, nargs="+", default=["bf16"], help="of the weights")
    add("--json", type=Path, help="write every figure here")
    add("--seconds", type=float, default=110.0, help="stop after this long")
    add(
        "--models",
        type=read,
        default=models,
        help=f"shapes ({', '.join(named)}), and among how many GPUs each of them is divided",
    )
    return parser


def main() -> None:
    """Measure, print a line for each case, and write all figures to a file if asked to."""
    args = options(str(__doc__), DTYPES, SHAPES, "8b:2,8b:4,8b:8,70b:2,70b:4,70b:8").parse_args()
    begin = time.monotonic()
    compile_tiles(args.dtype, args.models)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds a call; in")
    print(
        "brackets: the best tile beside stock; a tile is tokens x columns x depth / splits, warps,"
    )
    print(f"stages, rows first; compiled in {time.monotonic() - begin:.0f} s", flush=True)
    cases: list[Case] = []
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        for dtype in args.dtype:
            print(f"--- {dtype}")
            of_dtype = []
            for case in run(dtype, args.models, begin + args.seconds):
                of_dtype.append(case)
                print(case, flush=True)
            cases += of_dtype
            if args.json:
                document["cases"] = [asdict(case) for case in cases]
                args.json.write_text(json.dumps(document))
            print("tiles that are least behind the best where they do worst:")
            for line in compromises(of_dtype):
                print(line)
        if "bf16" in args.dtype:
            for tokens in (8, 2048):
                micros = host_micros(tokens)
                rounded = {name: round(value, 1) for name, value in micros.items()}
                print(f"host, M={tokens}:", rounded)


if __name__ == "__main__":
    main()
