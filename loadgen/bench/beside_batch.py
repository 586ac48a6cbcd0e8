"""People's latencies with a batch beside them and without it, in virtual time.

    python -m shoal.loadgen.bench.beside_batch --engines 4 --rates 2 4 8 --seeds 0 1 2 --seconds 60

People's requests arrive at random (Poisson), and a batch that is too large for the time is there
from the beginning. The run ends when people's requests have ended.
"""

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.loadgen.workload import Arrival
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_shape
from shoal.runtime.simulation.simulated_node import Run, simulate

BATCH_PER_SECOND = 25
"""Background requests for each engine and second: as many as an engine does alone."""


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

    def add(self, run: Run, arrivals: Sequence[Arrival], seconds: float) -> None:
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


def people(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return people's requests: prompts of 100 to 3,000 tokens, outputs of 20 to 300."""
    rng, at, made = random.Random(f"people {seed}"), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        made.append(Arrival(at, rng.randint(100, 3000), rng.randint(20, 300), 0))
    return made


def batch(count: int, seed: int, priority: int = BACKGROUND_PRIORITY) -> list[Arrival]:
    """Return the requests of a batch: prompts of 100 to 1,500 tokens, outputs of 20 to 300."""
    rng = random.Random(f"batch {seed}")
    return [
        Arrival(0.0, rng.randint(100, 1500), rng.randint(20, 300), priority) for _ in range(count)
    ]


def serve(node: Node, arrivals: Iterable[Arrival]) -> tuple[Run, list[Arrival]]:
    """Serve requests until people's have ended."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    run = simulate(
        node, "manual", ordered, awaited=lambda arrival: arrival.priority < BACKGROUND_PRIORITY
    )
    return run, ordered


def percentile_90(values: Iterable[float]) -> float:
    """Return the value that a tenth of all exceeds."""
    ordered = sorted(values)
    return ordered[int(0.9 * len(ordered))]


def compare(
    node: Node, rate: float, seconds: float, seeds: Iterable[int]
) -> tuple[Figures, Figures]:
    """Return the figures of several runs without a batch, and with one beside."""
    alone, beside = Figures(), Figures()
    for seed in seeds:
        asked = people(rate, seconds, seed)
        saturating = batch(round(BATCH_PER_SECOND * node.engines * seconds), seed)
        alone.add(*serve(node, asked), seconds)
        beside.add(*serve(node, [*asked, *saturating]), seconds)
    return alone, beside


def row(rate: float, alone: Figures, beside: Figures, seconds: float) -> str:
    """Return a row of the table; ``seconds`` are those of all runs together."""

    def grown(old: Sequence[float], new: Sequence[float], unit: float, digits: int) -> str:
        before, after = percentile_90(old), percentile_90(new)
        mean = statistics.mean(new) / statistics.mean(old) - 1
        shown = f"{before * unit:.{digits}f} → {after * unit:.{digits}f}"
        return f"{shown} ({after / before - 1:+.1%}; mean {mean:+.1%})"

    cells = (
        f"{rate:g}",
        grown(alone.ttft, beside.ttft, 1000, 1),
        grown(alone.tpot, beside.tpot, 1000, 2),
        f"{alone.people_done / seconds:.2f} → {beside.people_done / seconds:.2f}",
        f"{beside.batch_done / seconds:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model-shape", default="llama-3-8b-bf16")
    parser.add_argument("--hardware", default="h200")
    args = parser.parse_args(argv)
    shape, hardware = read_shape(args.model_shape), hardware_named(args.hardware)
    node = Node(shape, hardware, engines=args.engines, max_group=args.engines)
    print(
        "| people's requests/s | P90 TTFT, ms | P90 TPOT, ms | people's done/s | batch's done/s |"
    )
    print("|---|---|---|---|---|")
    for rate in args.rates:
        found = compare(node, rate, args.seconds, args.seeds)
        print(row(rate, *found, args.seconds * len(args.seeds)), flush=True)


if __name__ == "__main__":
    main()
