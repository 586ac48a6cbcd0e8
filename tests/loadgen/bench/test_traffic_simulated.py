"""Which simulated node stands for which system, and how its error is counted."""

from collections.abc import Iterator

import pytest

from shoal.loadgen.bench.systems import SHOAL, STOCK_DP, STOCK_TP
from shoal.loadgen.bench.traffic_simulated import COMPARED, Simulated, errors, simulate_way
from shoal.loadgen.workload import Arrival, Workload
from shoal.policies.registry import POLICIES, REFERENCES
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_hardware, read_shape

NODE = Node(read_shape("llama-3-8b-bf16"), read_hardware("h200"), engines=2, max_group=2, max_sp=2)


@pytest.fixture(autouse=True)
def no_more_policies() -> Iterator[None]:
    """Forget stock vLLM's balancer, which is no policy of Shoal's."""
    yield
    POLICIES.pop("stock-dp", None)
    REFERENCES.clear()


@pytest.mark.parametrize(
    ("system", "way", "policy", "max_sp"),
    [
        (STOCK_DP, "dp", "stock-dp", 1),
        (STOCK_TP, "tp2", "static-tp", 1),
        (SHOAL, "dp", "static-dp", 2),
        (SHOAL, "tp2", "shift", 2),
        (SHOAL, "flying", "flying", 2),
    ],
)
def test_a_system_has_its_stand_in(system: str, way: str, policy: str, max_sp: int) -> None:
    found = Simulated(NODE).of(system, way)
    assert found is not None
    assert (found[1], found[0].max_sp) == (policy, max_sp)
    assert found[0].place_by_prefix is (system == SHOAL)
    assert found[0].short_first is (system == SHOAL)
    assert found[0].mixed_step_tokens == (NODE.mixed_step_tokens if system == SHOAL else 0)
    assert found[0].rebalance is (system == SHOAL)


def test_other_systems_have_none() -> None:
    assert Simulated(NODE).of("another", "dp") is None


def test_a_workload_is_simulated() -> None:
    workload = Workload("w", tuple(Arrival(n / 2, 1000, 20) for n in range(6)))
    found = simulate_way(NODE, "static-dp", workload)
    assert set(found) == set(COMPARED)
    assert found["mean_ttft_ms"] < found["mean_e2el_ms"]


def test_stock_dp_is_simulated_with_its_own_balancer() -> None:
    """It sends long prompts and short ones by turns, so one engine gets all that are long."""
    lengths = [20_000 if n % 2 else 100 for n in range(12)]
    arrivals = (Arrival(0.1 * n, length, 400) for n, length in enumerate(lengths))
    workload = Workload("w", tuple(arrivals))
    ways = (Simulated(NODE).of(system, "dp") for system in (STOCK_DP, SHOAL))
    stock, shoal = (simulate_way(*found, workload) for found in ways if found is not None)
    assert stock["mean_e2el_ms"] > shoal["mean_e2el_ms"]
    assert stock["p90_e2el_ms"] > 1.1 * shoal["p90_e2el_ms"]


def test_an_error_is_of_the_measured_figure() -> None:
    off = errors({"mean_ttft_ms": 50.0, "mean_e2el_ms": None}, {"mean_ttft_ms": 40.0})
    assert off == {"mean_ttft_ms": pytest.approx(-0.2)}
