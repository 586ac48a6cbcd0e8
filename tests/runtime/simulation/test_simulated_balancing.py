"""What it brings that running requests go to idle units, and what it costs where nothing does."""

import random
from dataclasses import replace
from statistics import mean

import pytest

from shoal.loadgen.workload import Arrival
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import Run, simulate

NODE = Node(read_shape("llama-3-8b-bf16"), read_hardware("h200"), engines=2, max_group=2)


def served(load: list[Arrival], policy: str) -> tuple[Run, Run]:
    """Return a workload's run without and with moves for balance."""
    with_it, without = NODE, replace(NODE, rebalance=False)
    return simulate(without, policy, load), simulate(with_it, policy, load)


def request_seconds(run: Run) -> float:
    return mean(life.ended - life.arrived for life in run.lives if life.ended is not None)


def test_a_burst_whose_long_outputs_are_all_on_one_engine_is_served_sooner() -> None:
    load = [Arrival(0.001 * k, 4000, 50 if k % 2 else 1500) for k in range(60)]
    without, with_it = served(load, "static-dp")
    assert request_seconds(with_it) < 0.85 * request_seconds(without)
    moved = [life for life in with_it.lives if len(life.units) > 1]
    assert 12 <= len(moved) <= 20
    assert {len(life.units) for life in moved} == {2}, "nothing goes back"
    assert [life.tokens for life in with_it.lives] == [arrival.output_tokens for arrival in load]


@pytest.mark.parametrize("policy", ["static-dp", "adaptive"])
def test_where_load_is_even_nothing_changes(policy: str) -> None:
    rng, at, load = random.Random(3), 0.0, list[Arrival]()
    for _ in range(50):
        at += rng.expovariate(4.0)
        load.append(Arrival(at, rng.randint(100, 6000), rng.randint(10, 600)))
    without, with_it = served(load, policy)
    assert with_it == without
