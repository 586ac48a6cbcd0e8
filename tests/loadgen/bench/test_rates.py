"""A sweep over arrival rates: its arrivals, and what a server is asked for in every cell."""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.rates import WARM_UP_PER_UNIT, Sweep, arrivals, figures, rate_name
from shoal.loadgen.bench.systems import SHOAL, STOCK_TP, System, dp_layout, tp_layout
from shoal.loadgen.bench.token_client import Client, RequestFailedError
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.open_loop import Run
from shoal.loadgen.shapes import Lengths
from shoal.loadgen.workload import Arrival, Workload
from shoal.server.options.workload_options import add_workload_options, read_workload
from tests.loadgen.stand_in import complete, stand_in

NODE = System(
    SHOAL,
    ("serve", "--max-sp", "2", "--shift-threshold", "auto"),
    (dp_layout(2, pinned=False), tp_layout(2)),
    switches=True,
)
STOCK = System(STOCK_TP, ("serve",), (tp_layout(2),))
EQUAL = Lengths((8000, 8000), (250, 250))
UNEVEN = Lengths((2000, 9000), (50, 450))
SIZES = Sizes(shift_threshold=256)
WORKLOAD = Workload("poisson", tuple(Arrival(0.001 * n, 16, 4) for n in range(5)))
SWEEP = Sweep({"rates 2": WORKLOAD}, ("flying",), lead_seconds=0.0)
AT_REST = ("manual", ((0,), (1,)), "auto")


# --- arrivals ---


def test_arrivals_are_those_of_the_simulator() -> None:
    parser = ArgumentParser()
    add_workload_options(parser)
    options = "--trace poisson --rate 3 --duration 20 --prompt-tokens 8000 --output-tokens 250"
    simulated = read_workload(parser.parse_args(options.split()))
    assert arrivals(3.0, 20.0, EQUAL, seed=0) == simulated
    assert arrivals(3.0, 20.0, EQUAL, seed=1) != simulated


def test_a_higher_rate_brings_the_same_arrivals_sooner() -> None:
    slow, fast = (arrivals(rate, 20.0, UNEVEN, seed=0).arrivals for rate in (1.0, 4.0))
    assert len(fast) > 2 * len(slow)
    assert len({a.prompt_tokens for a in slow}) > 10
    assert [replace(a, at=0.0) for a in slow] == [replace(a, at=0.0) for a in fast[: len(slow)]]
    assert [a.at for a in slow] == pytest.approx([4 * a.at for a in fast[: len(slow)]])


def test_rates_are_named_shortly() -> None:
    assert [rate_name(rate) for rate in (2.0, 0.5)] == ["rates 2", "rates 0.5"]


# --- cells ---


def test_every_rate_and_way_is_a_step_of_its_own() -> None:
    sweep = Sweep({"rates 1": WORKLOAD, "rates 2.5": WORKLOAD}, ("flying", "adaptive"))
    ways = ("dp", "tp2", "sp2", "shift", "flying", "adaptive")
    expected = [f"rates {rate} {way}" for rate in ("1", "2.5") for way in ways]
    assert list(sweep.steps(NODE, SIZES)) == expected
    without_sp = replace(NODE, command=("serve",))
    assert list(SWEEP.steps(without_sp, SIZES)) == ["rates 2 dp", "rates 2 tp2", "rates 2 flying"]
    assert list(SWEEP.steps(STOCK, SIZES)) == ["rates 2 tp2"]


# --- the measure ---


@dataclass
class Node:
    """Shoal as a client sees it. ``served`` are the states in which measured requests came."""

    policy: str = "manual"
    units: tuple[tuple[int, ...], ...] = ((0,), (1,))
    threshold: int | str = "auto"
    served: list[tuple[str, tuple[tuple[int, ...], ...], int | str]] = field(default_factory=list)
    prompts: list[Sequence[int]] = field(default_factory=list)
    warmed_up: list[tuple[tuple[tuple[int, ...], ...], int | str]] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    """Which of the measured requests are."""

    @property
    def state(self) -> tuple[str, tuple[tuple[int, ...], ...], int | str]:
        return self.policy, self.units, self.threshold

    async def admin(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else {}
        if "units" in body:
            if self.policy != "manual":
                return web.json_response({"error": "a policy decides"}, status=409)
            self.units = tuple(map(tuple, body["units"]))
            return web.json_response({"duration_seconds": 0.0})
        self.policy = body.get("policy", self.policy)
        self.threshold = body.get("threshold", self.threshold)
        units = [{"engines": list(unit)} for unit in self.units]
        return web.json_response({"units": units, "shift": {"sp_above": {"tp2": 512}}})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            self.warmed_up.append((self.units, self.threshold))
            return web.json_response({"usage": {"completion_tokens": body["max_tokens"]}})
        self.served.append(self.state)
        self.prompts.append(body["prompt"])
        if len(self.served) - 1 in self.refused:
            return web.json_response({"error": {"message": "full"}}, status=503)
        return await complete(request)


async def measure(node: Node, system: System, *names: str) -> list[dict[str, Any]]:
    """Return what these cells find on a server."""
    steps = SWEEP.steps(system, SIZES)
    async with stand_in() as server, Client(server.url, "bench", server.url) as client:
        server.answer = node.answer
        if system.switches:
            paths = ("/admin/layout", "/admin/policy", "/admin/shift")
            server.routes = dict.fromkeys(paths, node.admin)
        return [await steps[name](client) for name in names]


@pytest.mark.parametrize(
    ("way", "state"),
    [
        ("dp", ("manual", ((0,), (1,)), "off")),
        ("tp2", ("manual", ((0, 1),), "off")),
        ("sp2", ("manual", ((0, 1),), 1)),
        ("shift", ("manual", ((0, 1),), 256)),
        ("flying", ("flying", ((0,), (1,)), "auto")),
    ],
)
async def test_a_cell_is_measured_in_its_way_and_leaves_the_node_as_it_was_served(
    way: str, state: tuple[Any, ...]
) -> None:
    node = Node()
    (found,) = await measure(node, NODE, f"rates 2 {way}")
    assert node.served == [state] * 5
    assert node.state == AT_REST
    assert (found["requests"], found["sp_above"]) == (5, {"tp2": 512})
    assert found["policy"] == (way if way == "flying" else None)
    assert (found["switching"]["switches"], found["layouts"]) == (0, {"-": 5})


async def test_all_ways_meet_the_same_requests_with_prompts_of_their_own() -> None:
    node = Node()
    await measure(node, NODE, "rates 2 dp", "rates 2 flying")
    dp, flying = node.prompts[:5], node.prompts[5:]
    assert [len(prompt) for prompt in dp] == [len(prompt) for prompt in flying] == [16] * 5
    assert not {tuple(prompt) for prompt in dp} & {tuple(prompt) for prompt in flying}


async def test_a_policy_finds_every_layout_warm() -> None:
    node = Node()
    await measure(node, NODE, "rates 2 flying")
    apart, together = ((0,), (1,)), ((0, 1),)
    expected = [(apart, "off")] * 2 + [(together, "off"), (together, 1), (together, 256)]
    assert node.warmed_up == [one for one in expected for _ in range(WARM_UP_PER_UNIT)]
    node = Node()
    await measure(node, NODE, "rates 2 tp2")
    assert set(node.warmed_up) == {(together, "off")}


async def test_a_cell_with_a_request_that_failed_is_no_figure_and_spoils_no_other() -> None:
    node = Node(refused={2})
    with pytest.raises(RequestFailedError, match="1 of 5 requests failed, the first: refused_503"):
        await measure(node, NODE, "rates 2 flying")
    assert node.state == AT_REST
    # Even one that could not clear up after itself.
    node = Node(policy="flying", units=((0, 1),), threshold=1)
    await measure(node, NODE, "rates 2 dp")
    assert set(node.served) == {("manual", ((0,), (1,)), "off")}


async def test_a_stock_server_is_asked_for_nothing_that_it_does_not_have() -> None:
    (found,) = await measure(Node(), STOCK, "rates 2 tp2")
    assert (found["requests"], found["sp_above"], found["switching"]) == (5, None, None)


# --- figures ---


def run_of(*exchanges: Exchange, loop_lag: float = 0.0) -> Run:
    return Run(list(exchanges), len(exchanges), 9.0, [loop_lag] * 10)


def exchange(due: float, sent: float, first: float, last: float) -> Exchange:
    return Exchange(
        0,
        Arrival(due, 8, 5),
        sent=sent,
        chunk_times=[first, last],
        ended=last,
        outcome=Outcome.OK,
        output_tokens=5,
    )


def test_figures_are_completion_time_ttft_and_tpot() -> None:
    found = figures(run_of(exchange(1.0, 1.0, 1.5, 2.5), exchange(2.0, 2.0, 3.5, 7.5)))
    assert found["e2el"]["mean"] == pytest.approx((1.5 + 5.5) / 2)
    assert found["e2el"]["p90"] == pytest.approx(1.5 + 0.9 * 4.0)
    assert found["ttft"]["mean"] == pytest.approx(1.0)
    assert found["tpot"]["mean"] == pytest.approx((0.25 + 1.0) / 2)
    assert (found["requests"], found["seconds"], found["switching"]) == (2, 9.0, None)
    assert (found["problems"], found["latest_request"]) == ([], 0.0)


@pytest.mark.parametrize(
    ("sent", "loop_lag", "problem"),
    [(1.2, 0.0, "sending lagged"), (1.0, 0.2, "the event loop lagged")],
)
def test_a_client_that_lagged_is_a_problem_of_the_cell(
    sent: float, loop_lag: float, problem: str
) -> None:
    found = figures(run_of(exchange(1.0, sent, 3.5, 4.5), loop_lag=loop_lag))
    assert any(line.startswith(problem) for line in found["problems"])
