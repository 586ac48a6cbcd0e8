"""The fit at start: what policies predict from then on, and what may go wrong meanwhile."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.partition import singles
from shoal.runtime.config import FakeSettings, FitSettings
from shoal.runtime.engine.fake.step_times import StepTimes
from shoal.runtime.fit_file import read_fit
from shoal.runtime.protocol import messages as m
from tests.policies.snapshots import MODEL
from tests.runtime.loopback_node import LoopbackNode

SETTINGS = FakeSettings(
    num_blocks=8192, max_num_seqs=64, max_model_len=20_000, max_num_batched_tokens=2048
)
FACTORS = {1: 1.8, 2: 2.5, 4: 0.6}
"""How much longer steps take than the roofline says, by the number of engines of a unit."""
LAYOUTS = layouts_up_to(4)
BATCHES = (
    Batch(decodes=1, context_tokens=2000),
    Batch(decodes=32, context_tokens=32 * 500),
    Batch(prefill_tokens=500, prefill_context=250),
    Batch(prefill_tokens=2048, prefill_context=4000),
)


def truth(layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
    return FACTORS[layout.world_size] * MODEL.roofline_seconds(layout, batch, mode)


def errors(model: CostModel | None, size: int) -> list[float]:
    """Return by how much predictions of a layout's steps are off."""
    assert model is not None
    layout = Layout(tp=size)
    return [abs(model.step_seconds(layout, b) / truth(layout, b) - 1) for b in BATCHES]


SHARED = replace(MODEL, shape=replace(MODEL.shape, sharable_bytes=5.6e10), share_weights=2)


def shared_truth(layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
    """Return the longer of computing, as in groups of two, and reading half of the MLPs."""
    whole = replace(SHARED, share_weights=1)
    computing = FACTORS[2] * whole.roofline_seconds(layout, batch, mode)
    return max(computing, SHARED.roofline_seconds(layout, batch, mode))


class Start:
    """The start of a node of four engines, whose time goes from event to event."""

    def __init__(
        self,
        seconds: float = 600.0,
        policy: str = "manual",
        times: StepTimes = truth,
        model: CostModel = MODEL,
        **fields: Any,
    ) -> None:
        self.node = LoopbackNode(
            4,
            policy=policy,
            settings=SETTINGS,
            step_times=times,
            cost_model=model,
            share_weights=model.share_weights,
            fit=FitSettings(seconds=seconds, **fields),
        )

    @property
    def _fitting(self) -> Any:
        return self.node.controller._fitting

    @property
    def model(self) -> CostModel | None:
        return self.node.controller._capacity.costs.model

    @property
    def costs(self) -> str:
        return self.node.view().costs

    def go_on(self) -> None:
        """Let all happen that is due now, then let time pass until something else is."""
        self.node.turns(4)
        agents = self.node.agents.values()
        waits = [agent.next_wakeup() for agent in agents]
        waits.append(self.node.controller.next_wakeup())
        due = [seconds for seconds in waits if seconds is not None]
        self.node.clock.advance(min(due, default=0.0))

    def until_ready(self) -> None:
        for _ in range(20_000):
            if self.node.controller.books.engines.started and not self._fitting.running:
                return
            self.go_on()
        raise AssertionError(self.node.describe())


def test_predictions_are_right_after_the_start() -> None:
    start = Start()
    start.until_ready()
    for size in FACTORS:
        assert max(errors(start.model, size)) < 0.05, size
    assert start.costs == "fitted"
    assert start.node.partition == singles(4)
    # Requests of the fit are nobody's: they are not counted, and no front end gets an output.
    assert start.node.outcomes == {}
    assert not start.node.tokens
    assert start.node.audit() == []


@pytest.mark.slow
def test_steps_that_read_weights_of_others_do_not_mislead_it() -> None:
    start = Start(times=shared_truth, model=SHARED)
    start.until_ready()
    shared = start.model
    assert shared is not None
    for model, layout in itertools.product((shared, replace(shared, share_weights=1)), LAYOUTS):
        for batch in BATCHES:
            expected, error = shared_truth(layout, batch), 0.05
            if model.share_weights == 1:
                expected = FACTORS[2] * MODEL.roofline_seconds(layout, batch)
                error = 0.3 if layout == DP else 0.05  # only groups computed without reading
            assert model.step_seconds(layout, batch) == pytest.approx(expected, rel=error)


def test_without_it_they_are_not() -> None:
    start = Start(seconds=0.0)
    start.until_ready()
    for size in FACTORS:
        assert min(errors(start.model, size)) > 0.3, size
    assert start.costs == "assumed"


@pytest.mark.slow
def test_the_node_is_not_ready_before_and_serves_afterwards() -> None:
    start = Start()
    while not start.node.controller.books.engines.started:
        start.go_on()
    view = start.node.controller._calls._layout(0)
    assert not view.ready
    assert view.reason == "step times are measured"
    start.node.send("early", prompt_tokens=20)
    start.until_ready()
    while start.node.missing:
        start.go_on()
        start.node.collect()
    start.node.assert_exact()


@pytest.mark.slow
def test_it_ends_in_time() -> None:
    """What was measured until then counts, and all layouts have their share of the time."""

    def took(start: Start) -> float:
        began = start.node.clock.now
        start.until_ready()
        return start.node.clock.now - began

    whole = took(Start())
    short = Start(seconds=whole / 4)
    assert took(short) < whole / 2
    assert max(errors(short.model, 1)[:2]) < 0.3
    assert short.model is not None
    assert {c.layout.tp for c in short.model.corrections} == set(FACTORS)
    assert short.node.partition == singles(4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_node_starts_even_if_an_engine_dies_meanwhile(size: int) -> None:
    """A group dies with its member; the others go on."""
    start = Start()
    node = start.node
    while start._fitting._wave is None or node.partition[-1].size != size:
        start.go_on()
    node.kill(3)
    node.controller.turn()
    gone = node.controller.books.engines.gone
    assert len(gone) == size
    for engine in gone:
        node.agents.pop(engine, None)
    start.until_ready()
    node.send("a")
    while node.missing:
        start.go_on()
        node.collect()
    node.assert_exact()
    assert node.partition == singles(4)
    assert set(node.agents) == set(range(4)) - gone


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_an_engine_that_is_drained_ends_it(size: int) -> None:
    """Its groups are released, and no group is timed with it."""
    start = Start()
    node = start.node
    while start._fitting._wave is None or node.partition[-1].size != size:
        start.go_on()
    began = node.clock.now
    node.call(m.DrainEngines, [3], True)
    start.until_ready()
    assert node.clock.now < began + 5
    assert node.partition == singles(4)
    assert not any(switch.error for switch in node.view().switches)
    node.send("a")
    while node.missing:
        start.go_on()
        node.collect()
    node.assert_exact()
    assert node.audit() == []


@pytest.mark.slow
def test_the_controller_sleeps_until_it_may_decide() -> None:
    """The policy decides the layout, but has nothing to look at before."""
    start = Start(policy="adaptive")
    controller = start.node.controller
    start.node.clock.advance(100.0)
    controller.turn()
    assert controller.next_wakeup() != 0.0
    while start._fitting._wave is None:
        start.go_on()
    start.node.clock.advance(1.0)
    controller.turn()
    assert start._fitting.running
    assert controller.next_wakeup() != 0.0
    start.until_ready()
    controller.turn()
    assert controller.next_wakeup() == pytest.approx(0.5)


@pytest.mark.slow
def test_what_was_found_is_kept(tmp_path: Path) -> None:
    file, key = tmp_path / "fits" / "one.json", {"gpu": "some"}
    start = Start(file=str(file), key=key)
    start.until_ready()
    assert start.model is not None
    assert read_fit(file, key) == start.model.corrections
    assert {c.layout for c in start.model.corrections} == {DP, Layout(tp=2), Layout(tp=4)}


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_no_reason_not_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    start = Start(file=str(tmp_path / "file" / "one.json"))
    start.until_ready()
    assert start.costs == "fitted"
    assert "the step times are not kept" in caplog.text
