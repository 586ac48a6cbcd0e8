"""Draws loads that nobody chose: a node, and traffic at some share of what it can serve.

A load is a list of options of ``shoal simulate``, so that each one can be repeated by itself.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.loadgen.traces import TraceError, read_trace

Options = tuple[str, ...]

SLOWNESS = {"llama-3-8b-bf16": 1.0, "llama-3-70b-fp8": 4.0, "qwen3-30b-a3b-bf16": 0.7}
"""About how many times as long as the first model's a step of each model takes."""
NODES = (
    *((2, "llama-3-8b-bf16"), (2, "llama-3-8b-bf16"), (2, "llama-3-70b-fp8")),
    *((4, "llama-3-8b-bf16"), (4, "llama-3-70b-fp8"), (4, "qwen3-30b-a3b-bf16")),
    *((8, "llama-3-8b-bf16"), (8, "llama-3-70b-fp8")),
)
"""Engines and the model's shape. Most users have two GPUs and a small model."""
OUTPUT_COST = 12
"""About how many tokens of a prompt take a GPU as long as one output token in a usual batch."""
FULL = 30_000
"""About how many tokens of prompts a second one H200 computes of the first model."""
SHARES = (0.15, 1.25)
"""Bounds of the traffic, as a share of about what the node can serve."""
SECONDS = 60
"""Length of each load."""
LONGEST = 65_000
"""Tokens of a trace's requests: longer ones would fit no single engine of some nodes."""


def plain(_: random.Random, __: float) -> Options:
    """Return no more options."""
    return ()


def urgent(rng: random.Random, _: float) -> Options:
    """Let one request in three, five or ten be urgent."""
    return (f"--priorities=-10:1,0:{rng.choice((2, 4, 9))}",)


def promises(rng: random.Random, slowness: float) -> Options:
    """Promise all requests a time to the first token and a time for each output token."""
    first, each = rng.choice((250, 500, 1000, 2000)), rng.choice((9, 12, 20, 40))
    return ("--target", f"0:{first * slowness:g}:{each * slowness:g}")


KINDS: Mapping[str, Callable[[random.Random, float], Options]] = {
    kind.__name__: kind for kind in (plain, urgent, promises)
}
"""What requests are given beside their lengths: a function of the source of randomness, and of how
many times as long as an 8B model's one step of this model takes."""


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace that loads are windows of."""

    path: Path
    times: Sequence[float]
    """When its requests come, seconds."""
    cost: float
    """What a second of it asks for, in tokens of prompts."""


def draw(count: int, seed: int, traces: Sequence[Path], kinds: Sequence[str]) -> list[Options]:
    """Return loads; of one seed, the first ones are the same whatever the count.

    Args:
        count: how many.
        seed: of everything drawn.
        traces: files that ``shoal simulate --trace`` reads.
        kinds: keys of ``KINDS``, which are drawn evenly.

    Raises:
        TraceError: a trace cannot be read.
    """
    rng = random.Random(seed)
    measured = [_measured(path) for path in traces]
    return [_load(rng, measured, kinds) for _ in range(count)]


def _measured(path: Path) -> _Trace:
    arrivals = read_trace(path).fitting(LONGEST).arrivals
    if not arrivals:
        raise TraceError(f"{path}: no request has {LONGEST:,} tokens or fewer")
    seconds = max(1.0, arrivals[-1].at)
    tokens = sum(one.prompt_tokens + OUTPUT_COST * one.output_tokens for one in arrivals)
    return _Trace(path, [one.at for one in arrivals], max(1.0, tokens / seconds))


def _load(rng: random.Random, traces: Sequence[_Trace], kinds: Sequence[str]) -> Options:
    engines, shape = rng.choice(NODES)
    cost = rng.uniform(*SHARES) * engines * FULL / SLOWNESS[shape]
    kind = rng.randrange(len(traces) + len(SHAPED))
    if kind < len(traces):
        words = _window(rng, traces[kind], cost)
    else:
        words = _shaped(rng, [*SHAPED][kind - len(traces)], cost)
    extra = KINDS[rng.choice([*kinds])](rng, SLOWNESS[shape])
    node = ("--engines", str(engines), "--model-shape", shape)
    return (*node, *words, "--duration", str(SECONDS), *extra)


def _window(rng: random.Random, trace: _Trace, cost: float) -> Options:
    """Return a window of a trace, faster or slower than it was.

    Where no request is in it, it begins with the next one.
    """
    scale = cost / trace.cost
    start = rng.uniform(0, max(0.0, trace.times[-1] / scale - SECONDS))
    first = trace.times[bisect_left(trace.times, start * scale)] / scale
    start = start if first < start + SECONDS else int(first)
    return (
        *("--trace", str(trace.path), "--max-request-tokens", str(LONGEST)),
        *("--rate-scale", f"{scale:.3g}", "--start", f"{start:.0f}"),
    )


def _shaped(rng: random.Random, shape: str, cost: float) -> Options:
    """Return a made-up workload."""
    least, shortest = rng.choice((64, 256, 1024, 4096)), rng.choice((16, 64, 256))
    longest, most = least * rng.choice((1, 4, 8)), shortest * rng.choice((1, 4))
    rate = cost / ((least + longest) / 2 + OUTPUT_COST * (shortest + most) / 2)
    return (
        *("--trace", shape, "--seed", str(rng.randrange(100))),
        *("--prompt-tokens", f"{least}:{longest}", "--output-tokens", f"{shortest}:{most}"),
        *SHAPED[shape](rng, rate),
    )


# --- the settings of each shape -------------------------------------------------------------------


def _poisson(_: random.Random, rate: float) -> Iterator[str]:
    yield from ("--rate", f"{rate:.3g}")


def _gamma(rng: random.Random, rate: float) -> Iterator[str]:
    yield from ("--rate", f"{rate:.3g}", "--burstiness", f"{rng.uniform(0.1, 0.5):.2g}")


def _ramp(_: random.Random, rate: float) -> Iterator[str]:
    # A ramp takes 300 s, of which a load has the first 60.
    yield from ("--rate", f"{rate * 0.1:.3g}:{rate * (0.1 + 0.9 * 300 / SECONDS):.3g}")


def _hill(_: random.Random, rate: float) -> Iterator[str]:
    yield from ("--rate", f"{rate * 0.05:.3g}:{rate * 1.2:.3g}", "--hill-seconds", str(SECONDS))


def _bursty(rng: random.Random, rate: float) -> Iterator[str]:
    yield from ("--rate", f"{rate * 0.2:.3g}", "--burst-rate", f"{rate * rng.uniform(1, 3):.3g}")
    yield from ("--quiet-seconds", f"{rng.uniform(4, 15):.1f}")
    yield from ("--burst-seconds", f"{rng.uniform(2, 10):.1f}")


def _chats(rng: random.Random, rate: float) -> Iterator[str]:
    turns = rng.choice((1, 4, 8))
    yield from ("--rate", f"{rate / turns:.3g}", "--turns", f"1:{2 * turns - 1}")
    yield from ("--think-seconds", f"{rng.uniform(1, 15):.1f}")
    yield from ("--shared-tokens", str(rng.choice((256, 2000, 8000))))


SHAPED: Mapping[str, Callable[[random.Random, float], Iterator[str]]] = {
    "poisson": _poisson,
    "gamma": _gamma,
    "ramp": _ramp,
    "hill": _hill,
    "bursty": _bursty,
    "chats": _chats,
}
"""The options of each shape at a rate, in requests per second. Half of the chats' turns, and more
with long common beginnings, are cached, so chats ask for less than their rate says."""
