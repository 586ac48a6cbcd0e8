"""People's times with a saturating batch beside them, in virtual time."""

import random

import pytest

from shoal.loadgen.workload import Arrival
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.simulation.shape_files import read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import Node, Run, simulate

NODE = Node(read_shape("llama-3-8b-bf16"), read_hardware("h200"), engines=4, max_group=4)
SECONDS = 20.0
BATCH = 400


def people(rate: float) -> list[Arrival]:
    rng, at, made = random.Random(3), 0.0, []
    while (at := at + rng.expovariate(rate)) < SECONDS:
        made.append(Arrival(at, rng.randint(100, 3000), rng.randint(20, 300), 0))
    return made


def batch(priority: int) -> list[Arrival]:
    rng = random.Random(4)
    return [
        Arrival(0.0, rng.randint(100, 1500), rng.randint(20, 300), priority) for _ in range(BATCH)
    ]


def served(rate: float, others: list[Arrival]) -> tuple[Run, list[Arrival]]:
    arrivals = sorted([*people(rate), *others], key=lambda arrival: arrival.at)
    return simulate(NODE, "manual", arrivals), arrivals


def percentile_90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


def times(run: Run, arrivals: list[Arrival]) -> tuple[float, float]:
    """Return people's 90th percentiles of the TTFT and the TPOT."""
    ttft, tpot = [], []
    for life, arrival in zip(run.lives, arrivals, strict=True):
        if arrival.priority == 0:
            assert life.first_token is not None
            assert life.ended is not None
            ttft.append(life.first_token - life.arrived)
            tpot.append((life.ended - life.first_token) / (life.tokens - 1))
    return percentile_90(ttft), percentile_90(tpot)


def done_in_time(run: Run, arrivals: list[Arrival]) -> int:
    lives = zip(run.lives, arrivals, strict=True)
    return sum(life.ended < SECONDS for life, a in lives if a.priority and life.ended is not None)


@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_a_batch_hardly_slows_people_down(rate: float) -> None:
    alone = times(*served(rate, []))
    run, arrivals = served(rate, batch(BACKGROUND_PRIORITY))
    beside = times(run, arrivals)
    assert beside[0] < 1.1 * alone[0]
    assert beside[1] < 1.1 * alone[1]
    assert all(life.finished for life in run.lives)
    assert [life.tokens for life in run.lives] == [arrival.output_tokens for arrival in arrivals]
    assert done_in_time(run, arrivals) == BATCH


def test_the_same_requests_would_slow_them_down_if_they_did_not_yield() -> None:
    alone = times(*served(8.0, []))
    beside = times(*served(8.0, batch(BACKGROUND_PRIORITY - 1)))
    assert beside[0] > 1.5 * alone[0]
    assert beside[1] > 1.2 * alone[1]


def test_an_idle_node_works_a_batch_off() -> None:
    run, arrivals = served(1e-9, batch(BACKGROUND_PRIORITY))
    assert done_in_time(run, arrivals) == BATCH
    assert run.moves == 0
