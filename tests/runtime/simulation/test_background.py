"""People's times with a saturating batch beside them, in virtual time."""

import pytest

from shoal.loadgen.bench.beside_batch import (
    Figures,
    batch,
    compare,
    people,
    percentile_90,
    row,
    serve,
)
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import simulate

NODE = Node(read_shape("llama-3-8b-bf16"), read_hardware("h200"), engines=4, max_group=4)
SECONDS = 20.0
BATCH = 400


@pytest.mark.parametrize("rate", [4.0, 8.0])
def test_a_batch_hardly_slows_people_down(rate: float) -> None:
    alone, beside = compare(NODE, rate, SECONDS, seeds=[0])
    assert percentile_90(beside.ttft) < 1.05 * percentile_90(alone.ttft)
    assert percentile_90(beside.tpot) < 1.05 * percentile_90(alone.tpot)
    assert beside.people_done > 0.95 * alone.people_done
    assert beside.batch_done > 2 * SECONDS
    assert row(f"{rate:g}", alone, beside, SECONDS).count("|") == 6


def test_the_same_requests_would_slow_them_down_if_they_did_not_yield() -> None:
    asked, alone, beside = people(8.0, SECONDS, 3), Figures(), Figures()
    others = batch(BATCH, 3, BACKGROUND_PRIORITY - 1)
    alone.add(*serve(NODE, asked), SECONDS)
    run, arrivals = serve(NODE, [*asked, *others])
    beside.add(run, arrivals, SECONDS)
    assert percentile_90(beside.ttft) > 1.5 * percentile_90(alone.ttft)
    assert percentile_90(beside.tpot) > 1.2 * percentile_90(alone.tpot)


def test_an_idle_node_works_a_batch_off() -> None:
    run = simulate(NODE, "manual", batch(BATCH, 4))
    assert all(life.ended is not None and life.ended < SECONDS for life in run.lives)
    assert run.moves == 0


def test_all_requests_of_a_batch_that_people_interrupt_are_answered_whole() -> None:
    arrivals = sorted([*people(8.0, SECONDS, 5), *batch(BATCH, 5)], key=lambda one: one.at)
    run = simulate(NODE, "manual", arrivals)
    assert run.moves > 0
    assert all(life.finished for life in run.lives)
    assert [life.tokens for life in run.lives] == [arrival.output_tokens for arrival in arrivals]
