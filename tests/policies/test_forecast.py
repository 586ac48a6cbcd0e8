"""What a partition is predicted to cost: in which direction every cause moves the prediction."""

from dataclasses import replace

import pytest

from shoal.policies.forecast import Forecast, uniform, work_of
from shoal.policies.values.layouts import Layout
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import Snapshot
from tests.policies.nodes import DP, FOURS, PAIRS, TP, node
from tests.policies.snapshots import MODEL, request


def cost(seen: Snapshot, candidate: Partition | None = None) -> float:
    return Forecast(seen, MODEL, uniform(seen)).cost(candidate or seen.partition)


@pytest.mark.parametrize("partition", [DP, PAIRS, TP])
def test_requests_take_longer_the_more_come(partition: Partition) -> None:
    """In all and, as they share steps, each of them."""
    rates = (0.5, 2.0, 8.0, 32.0)
    found = [cost(node(partition, rate=rate)) for rate in rates]
    each = [total / rate for total, rate in zip(found, rates, strict=True)]
    assert each == sorted(each)
    assert each[0] < each[-1]


def test_every_degree_is_best_at_some_load() -> None:
    """One request is fastest in the widest group, a crowd is so alone, and between are others."""

    def best(rate: float) -> int:
        seen = replace(node(DP, rate=rate), prompt_tokens=300.0, output_tokens=500.0)
        return min(uniform(seen), key=Forecast(seen, MODEL, uniform(seen)).cost)[0].size

    found = [best(rate) for rate in (0.1, 20.0, 40.0, 50.0, 200.0)]
    assert found == sorted(found, reverse=True)
    assert {8, 4, 2, 1} == {best(float(rate)) for rate in range(1, 201, 3)}


def test_what_waits_costs_and_is_seen_beyond_the_head_of_the_pool() -> None:
    seen = replace(node(DP, {0: 1}), waiting=501, waiting_tokens=501 * 500, pool=(request("a"),))
    assert work_of(seen).waiting == 501
    assert cost(seen) > cost(node(DP, {0: 1})) + 500


def test_longer_outputs_are_a_higher_load() -> None:
    seen = node(DP, {0: 2}, rate=12.0)
    assert cost(replace(seen, output_tokens=800.0)) > cost(seen)


def test_prompts_that_run_in_sp_take_less_time() -> None:
    """SP counts above the threshold only: below it, a step of the forecast is one in TP."""
    seen = replace(node(TP, {0: 4}, rate=12.0), prompt_tokens=4000.0)

    def above(tokens: int) -> float:
        return cost(replace(seen, sp_above=((Layout(tp=8), tokens),)))

    assert above(512) < cost(seen)
    assert above(10**6) == cost(seen)


def test_a_dead_engine_takes_no_work() -> None:
    """Those that are left have more to do, and the dead one does not make the mean better."""
    seen = node(DP, {0: 2}, rate=8.0)
    assert cost(replace(seen, dead=frozenset({7}))) > cost(seen)


def test_an_idle_node_has_a_best_layout() -> None:
    seen = node(FOURS, rate=0.0)
    assert cost(seen, TP) < cost(seen, FOURS) < cost(seen, DP)
