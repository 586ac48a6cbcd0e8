"""What the simulator says of the traffic that was measured, and how far it is off."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.loadgen.bench.stock_balancer import REFERENCE
from shoal.loadgen.bench.systems import SHOAL, STOCK_DP, STOCK_TP
from shoal.loadgen.replay_results import milliseconds
from shoal.loadgen.summary import report
from shoal.loadgen.workload import Workload
from shoal.policies.installed_policies import load_policies
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.simulated_node import simulate
from shoal.server.commands.simulate import records_of

COMPARED = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p90_e2el_ms")
"""The figures whose error is reported, by their names in vLLM's results."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The nodes that are simulated.

    Attributes:
        node: a Shoal node with its own defaults.
    """

    node: Node

    def of(self, system: str, way: str) -> tuple[Node, str] | None:
        """Return the node and the policy that stand for a system in one way.

        Stock vLLM's groups have no SP, and it has full graphs only of steps that decode. Its steps
        compute as much of prompts beside requests that decode as in any step, and prompts in the
        order in which they came. Its balancer does not know what costs how much. None: there is no
        such node.
        """
        plain = replace(
            self.node,
            max_sp=1,
            mixed_step_tokens=0,
            full_graphs=False,
            place_by_prefix=False,
            short_first=False,
            rebalance=False,
        )
        if system == STOCK_DP:
            return replace(plain, front_ends=plain.engines), load_policies(REFERENCE)[0].name
        if system == STOCK_TP:
            return replace(plain, front_ends=1), "static-tp"
        if system != SHOAL:
            return None
        if way == "dp":
            return self.node, "static-dp"
        if way.startswith("tp"):
            return self.node, "shift" if self.node.max_sp > 1 else "static-tp"
        return self.node, way


def simulate_way(node: Node, policy: str, workload: Workload) -> dict[str, float]:
    """Return the figures ``COMPARED`` of a workload on a simulated node, in milliseconds.

    Raises:
        FileError: the model does not fit the hardware.
        SimulationError: the node stopped with requests left.
    """
    run = simulate(node, policy, workload.arrivals)
    found = milliseconds(report(policy, records_of(run), run.tokens))
    return {name: found[name] for name in COMPARED if name in found}


def errors(measured: Mapping[str, Any], simulated: Mapping[str, float]) -> dict[str, float]:
    """Return by how much of the measured figure the simulated one is more; less is negative."""
    return {
        name: simulated[name] / measured[name] - 1.0
        for name in COMPARED
        if measured.get(name) and name in simulated
    }
