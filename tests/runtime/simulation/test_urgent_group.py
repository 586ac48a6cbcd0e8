"""Urgent requests on a saturated node that keeps a group for them, in virtual time."""

import random
from dataclasses import replace
from statistics import mean

from shoal.loadgen.shapes import Lengths, poisson
from shoal.loadgen.workload import Arrival
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import simulate

NODE = Node(read_shape("llama-3-8b-bf16"), read_hardware("h200"), engines=4, max_group=4, max_sp=4)


def load() -> list[Arrival]:
    """Return requests that keep four engines busy, every twelfth of which is urgent."""
    lengths = Lengths((200, 2000), (50, 300))
    made = poisson(random.Random(0), lengths, rate=60.0)
    arrivals = []
    for number, arrival in enumerate(made):
        if arrival.at > 6.0:
            break
        arrivals.append(replace(arrival, priority=-10 if number % 12 == 0 else 0))
    return arrivals


def urgent(node: Node, policy: str, arrivals: list[Arrival]) -> tuple[float, float]:
    """Return the mean TTFT and TPOT of urgent requests."""
    run = simulate(node, policy, arrivals)
    assert not run.policy_errors
    pairs = zip(run.lives, arrivals, strict=True)
    lives = [life for life, arrival in pairs if arrival.priority < 0]
    first = [life.first_token - life.arrived for life in lives if life.first_token is not None]
    later = [
        (life.ended - life.first_token) / (life.tokens - 1)
        for life in lives
        if life.ended is not None and life.first_token is not None
    ]
    assert len(first) == len(later) == len(lives)
    return mean(first), mean(later)


def test_they_are_as_fast_as_alone_in_an_idle_group() -> None:
    arrivals = load()
    few = [arrival for arrival in arrivals if arrival.priority < 0]
    pair = replace(NODE, engines=2, max_group=2, max_sp=2)
    ttft, tpot = urgent(pair, "shift", few)
    kept_ttft, kept_tpot = urgent(replace(NODE, urgent_engines=2), "adaptive", arrivals)
    shared_ttft, shared_tpot = urgent(NODE, "adaptive", arrivals)
    assert kept_tpot < 1.05 * tpot
    assert kept_ttft < 1.05 * ttft
    assert shared_tpot > 1.5 * tpot, "the node is saturated"
    assert shared_ttft > 1.2 * ttft
