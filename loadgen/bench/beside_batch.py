"""People's latencies with a batch beside them and without it, in virtual time.

    python -m shoal.loadgen.bench.beside_batch --engines 4 --rates 2 4 8 --seeds 0 1 2 --seconds 60
    python -m shoal.loadgen.bench.beside_batch --engines 2 --ways dp tp2 adaptive --loads bursts

People's requests arrive at random (Poisson, or Poisson bursts), and a batch that is too large for
the time is there from the beginning. The run ends when people's requests have ended.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.loadgen.workload import Arrival
from shoal.policies.registry import POLICIES
from shoal.policies.static import MANUAL
from shoal.policies.values.layouts import layouts_up_to
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_shape
from shoal.runtime.simulation.simulated_node import Run, simulate

BATCH_PER_SECOND = 25
"""Background requests for each engine and second: as many as an engine does alone."""
LENGTHS = {
    "mixed": ((100, 3000), (20, 300)),
    "chat": ((20, 500), (100, 400)),
    "long": ((4000, 16000), (50, 300)),
    "bursts": ((100, 3000), (20, 300)),
}
"""Kinds of people's load: bounds of prompts and of outputs."""
BURST = (8, 24)
"""Bounds of the requests of a burst."""
BURST_RATE = 20.0
"""Requests per second in a burst."""


@dataclass(slots=True)
class Figures:
    """What one or several runs have shown."""

    ttft: list[float] = field(default_factory=list)
    """Seconds, of each of people's requests."""
    tpot: list[float] = field(default_factory=list)
    people_done: int = 0
    """People's requests that ended before the last could arrive."""
    batch_done: int = 0
    """The same of the batch's."""

    def add(self, run: Run[Arrival], arrivals: Sequence[Arrival], seconds: float) -> None:
        """Take the figures of a run."""
        for life, arrival in zip(run.lives, arrivals, strict=True):
            done = life.ended is not None and life.ended < seconds
            if arrival.priority >= BACKGROUND_PRIORITY:
                self.batch_done += done
                continue
            self.people_done += done
            if life.first_token is None or life.ended is None:
                raise ValueError("a person's request has no end")
            self.ttft.append(life.first_token - life.arrived)
            self.tpot.append((life.ended - life.first_token) / (life.tokens - 1))


def people(rate: float, seconds: float, seed: int, load: str = "mixed") -> list[Arrival]:
    """Return people's requests: one of ``LENGTHS``, at a mean rate."""
    rng, at, made = random.Random(f"people {load} {seed}"), 0.0, []
    prompts, outputs = LENGTHS[load]
    bursts = load == "bursts"
    mean = sum(BURST) / 2 if bursts else 1.0
    while (at := at + rng.expovariate(rate / mean)) < seconds:
        then = at
        for _ in range(rng.randint(*BURST) if bursts else 1):
            then += rng.expovariate(BURST_RATE) if bursts else 0.0
            if then < seconds:
                made.append(Arrival(then, rng.randint(*prompts), rng.randint(*outputs), 0))
    return sorted(made, key=lambda arrival: arrival.at)


def batch(count: int, seed: int, priority: int = BACKGROUND_PRIORITY) -> list[Arrival]:
    """Return the requests of a batch: prompts of 100 to 1,500 tokens, outputs of 20 to 300."""
    rng = random.Random(f"batch {seed}")
    return [
        Arrival(0.0, rng.randint(100, 1500), rng.randint(20, 300), priority) for _ in range(count)
    ]


def serve(
    node: Node, arrivals: Iterable[Arrival], policy: str = MANUAL.name
) -> tuple[Run[Arrival], list[Arrival]]:
    """Serve requests until people's have ended."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    run = simulate(
        node, policy, ordered, awaited=lambda arrival: arrival.priority < BACKGROUND_PRIORITY
    )
    return run, ordered


def percentile_90(values: Iterable[float]) -> float:
    """Return the value that a tenth of all exceeds."""
    ordered = sorted(values)
    return ordered[int(0.9 * len(ordered))]


def compare(
    node: Node,
    rate: float,
    seconds: float,
    seeds: Iterable[int],
    *,
    load: str = "mixed",
    policy: str = MANUAL.name,
) -> tuple[Figures, Figures]:
    """Return the figures of several runs without a batch, and with one beside."""
    alone, beside = Figures(), Figures()
    for seed in seeds:
        asked = people(rate, seconds, seed, load)
        saturating = batch(round(BATCH_PER_SECOND * node.engines * seconds), seed)
        alone.add(*serve(node, asked, policy), seconds)
        beside.add(*serve(node, [*asked, *saturating], policy), seconds)
    return alone, beside


def row(name: str, alone: Figures, beside: Figures, seconds: float) -> str:
    """Return a row of the table; ``seconds`` are those of all runs together."""

    def grown(old: Sequence[float], new: Sequence[float], unit: float, digits: int) -> str:
        before, after = percentile_90(old), percentile_90(new)
        mean = statistics.mean(new) / statistics.mean(old) - 1
        shown = f"{before * unit:.{digits}f} → {after * unit:.{digits}f}"
        return f"{shown} ({after / before - 1:+.1%}; mean {mean:+.1%})"

    cells = (
        name,
        grown(alone.ttft, beside.ttft, 1000, 1),
        grown(alone.tpot, beside.tpot, 1000, 2),
        f"{alone.people_done / seconds:.2f} → {beside.people_done / seconds:.2f}",
        f"{beside.batch_done / seconds:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--engines", type=int, default=4)
    add("--ways", nargs="+", default=["dp"], help="layouts and policies")
    add("--loads", nargs="+", choices=LENGTHS, default=["mixed"])
    add("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--seconds", type=float, default=60.0)
    add("--model-shape", default="llama-3-8b-bf16")
    add("--hardware", default="h200")
    args = parser.parse_args(argv)
    shape, hardware = read_shape(args.model_shape), hardware_named(args.hardware)
    sizes = {"engines": args.engines, "max_group": args.engines, "max_sp": args.engines}
    node = Node(shape, hardware, **sizes)
    layouts = {layout.name: layout for layout in layouts_up_to(args.engines)}
    for way in args.ways:
        if way not in layouts and way not in POLICIES:
            parser.error(f"--ways {way}: choose of {', '.join((*layouts, *POLICIES))}")
    print(
        "| way, load, requests/s | P90 TTFT, ms | P90 TPOT, ms | people's done/s | batch's done/s |"
    )
    print("|---|---|---|---|---|")
    for load, way, rate in itertools.product(args.loads, args.ways, args.rates):
        placed = replace(node, layout=layouts.get(way))
        policy = MANUAL.name if way in layouts else way
        found = compare(placed, rate, args.seconds, args.seeds, load=load, policy=policy)
        seconds = args.seconds * len(args.seeds)
        print(row(f"{way}, {load}, {rate:g}", *found, seconds), flush=True)


if __name__ == "__main__":
    main()
