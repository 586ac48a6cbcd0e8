"""``adaptive`` on nodes whose steps do not take what its cost model says."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import pytest

from shoal.loadgen.shapes import Lengths, poisson
from shoal.loadgen.workload import Arrival
from shoal.policies import adaptive_memory, switch_price
from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import DP, Layout
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.engine.fake.step_times import StepTimes
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import cost_model, read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import simulate
from tests.depth import among

Truth = Callable[[Layout, Batch, float], float]
"""Maps a step and its simulated seconds to those that it takes."""
SHAPE, H200 = read_shape("llama-3-8b-bf16"), read_hardware("h200")
TP2 = Layout(tp=2)
CROWD_SECONDS = 3.0
QUIET_AT = 6.0


@dataclass(frozen=True)
class Perturbed(Node):
    truth: Truth = lambda _layout, _batch, seconds: seconds

    def step_times(self, level: Level = WHOLE) -> StepTimes:
        simulated = Node(SHAPE, H200, engines=2, max_group=2, max_sp=2).step_times(level)

        def seconds(layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
            return self.truth(layout, batch, simulated(layout, batch, mode))

        return seconds


def node(truth: Truth, believed: Truth | None = None) -> Perturbed:
    """Return two engines whose steps were timed at the start, with short contexts.

    Args:
        truth: the times of steps.
        believed: the times that were found at the start; None: the true ones.
    """
    found = believed or truth
    model = cost_model(SHAPE, H200, max_sp=2)
    for layout in (DP, TP2):
        few = [Batch(n, n * 300) for n in (1, 8, 32, 64)]
        steps = [(one, found(layout, one, model.step_seconds(layout, one))) for one in few]
        model = model.fit(layout, Mode.TP, StepKind.DECODE, steps)
    return Perturbed(
        SHAPE,
        H200,
        engines=2,
        max_group=2,
        max_sp=2,
        corrections=model.corrections,
        truth=truth,
    )


def crowd_and_quiet(quiet_seconds: float) -> Iterator[Arrival]:
    """Yield three seconds of many requests, for which DP is best, and then a few per second."""
    rng = random.Random(0)
    crowd = poisson(rng, Lengths((100, 400), (80, 160)), rate=170.0)
    yield from takewhile(lambda one: one.at < CROWD_SECONDS, crowd)
    for one in poisson(rng, Lengths((300, 1500), (100, 300)), rate=3.5):
        if one.at > quiet_seconds:
            return
        yield Arrival(QUIET_AT + one.at, one.prompt_tokens, one.output_tokens)


def noise(spread: float) -> Truth:
    rng = random.Random(1)
    return lambda _layout, _batch, seconds: seconds * rng.lognormvariate(0.0, spread)


def group_slower(part: float) -> Truth:
    """Let the group's steps take longer by this part."""
    return lambda layout, _batch, seconds: seconds * (1.0 + part * (layout == TP2))


TRUTHS: dict[str, Truth] = {
    "as simulated": lambda _layout, _batch, seconds: seconds,
    "group slower": group_slower(0.1),
    "group slower with prompts": lambda layout, batch, seconds: (
        seconds * (1.3 if layout == TP2 and batch.prefill_tokens else 1.0)
    ),
    "group slower with many": lambda layout, batch, seconds: (
        seconds * (1.0 + (0.006 * min(60, batch.decodes) if layout == TP2 else 0.0))
    ),
    "contexts slower": lambda _layout, batch, seconds: seconds + 2e-8 * batch.context_tokens,
    "noisy": noise(0.15),
}
LATEST = 12.0
"""When the node has its group again, in seconds of the quiet part."""
HARD = ("group slower with many", "contexts slower", "noisy")
"""What the cost model cannot learn from single steps."""


def seconds_in_single_engines(served: Node, quiet_seconds: float) -> float:
    """Return how long the node is in the wrong layout after the crowd."""
    run = simulate(served, "adaptive", list(crowd_and_quiet(quiet_seconds)))
    assert not run.policy_errors
    end, wrong = QUIET_AT + quiet_seconds, 0.0
    until = [at for at, _ in run.layouts[1:]] + [end]
    for (at, units), then in zip(run.layouts, until, strict=True):
        wrong += (len(units) == 2) * max(0.0, min(then, end) - max(at, QUIET_AT))
    assert any(len(units) == 2 for at, units in run.layouts if at < QUIET_AT), "DP for the crowd"
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", among(HARD, *(name for name in TRUTHS if name not in HARD)))
def test_after_a_crowd_a_node_finds_its_group_within_seconds(name: str) -> None:
    """In the quiet part the group takes at least a tenth less time, whatever else is wrong."""
    assert seconds_in_single_engines(node(TRUTHS[name]), 16.0) < LATEST


@pytest.mark.slow
@pytest.mark.parametrize(("part", "seconds"), [(0.3, 12.0), (1.0, 80.0)])
def test_a_group_that_was_measured_wrongly_gets_another_chance(part: float, seconds: float) -> None:
    """Nobody measures the steps of a group that the node does not have.

    When the node tries it again depends on the few requests that come: if it seemed twice as slow
    as it is, after 13 to 64 seconds in eleven loads.
    """
    served = node(TRUTHS["as simulated"], believed=group_slower(part))
    assert seconds_in_single_engines(served, 100.0) < seconds


@pytest.mark.slow
def test_a_past_without_bounds_would_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_price, "NOISE_SECONDS", math.inf)
    monkeypatch.setattr(switch_price, "FINE_SECONDS", math.inf)
    served = node(TRUTHS["group slower"])
    assert seconds_in_single_engines(served, 16.0) < LATEST, "it is forgotten with the crowd"
    monkeypatch.setattr(adaptive_memory, "GONE_SECONDS", math.inf)
    assert seconds_in_single_engines(served, 16.0) > LATEST
