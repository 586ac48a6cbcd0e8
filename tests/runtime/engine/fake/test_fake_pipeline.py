"""Pipelines of the fake engine: several steps in flight, each in a stage, by arithmetic."""

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, Unit
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_group_core import FakeGroupCore
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.engine.fake.step_times import Devices, DeviceStep
from shoal.runtime.protocol import wire
from tests.runtime.loopback_node import request_payload
from tests.units import pp, tp

SETTINGS = FakeSettings(
    num_blocks=200,
    block_tokens=4,
    max_num_seqs=64,
    max_model_len=200,
    max_num_batched_tokens=16,
    steps_at_once=64,
)
PAIR = pp(0, 1)
STAGE, HOP = 1.0, 0.25


class Pipeline:
    """The core of a group, and what became of its requests."""

    def __init__(self, unit: Unit = PAIR, hop: float = HOP, **settings: int) -> None:
        self.clock = ManualClock()
        layout, engines = unit.layout, unit.size
        config = NodeConfig(
            engines,
            engines,
            "manual",
            "unused",
            fake=msgspec.structs.replace(SETTINGS, **settings),
            max_pp=engines,
        )
        whole = STAGE * layout.pp + hop * (layout.pp - 1)

        def seconds(_layout: Layout, _batch: Batch, _mode: Mode = Mode.TP) -> float:
            return whole

        backend = FakeBackend(
            config,
            0,
            clock=self.clock,
            step_times=seconds,
            hop_times=lambda _layout, _batch: hop,
        )
        self.core: FakeGroupCore = backend.groups[unit]
        blocks = list(range(1, 1 + config.fake.num_blocks if config.fake else 1))
        self.core.bind(1, dict.fromkeys(unit.engines, blocks), 0)
        self.ends: list[float] = []
        """When each step ended."""
        self.steps: list[set[str]] = []
        """The requests that got a token in each step."""
        self.tokens: dict[str, list[int]] = {}
        self.most_in_flight = 0

    def add(self, names: Sequence[str], prompt: int, tokens: int) -> None:
        for number, name in enumerate(names):
            self.core.add(request_payload(name, [number + 1] * prompt, tokens))

    def run(self) -> None:
        """Step until nothing is left."""
        while self.core.num_requests or self.core.in_flight:
            while self.core.dispatch():
                pass
            self.most_in_flight = max(self.most_in_flight, self.core.in_flight)
            assert self.core.due is not None, "requests are left, and no step is in flight"
            self.clock.now = max(self.clock.now, self.core.due)
            self.collect()
        assert self.core.check_integrity() == []

    def collect(self) -> None:
        collected = self.core.collect()
        assert collected is not None
        self.ends.append(self.clock.now)
        self.steps.append(set())
        for output in collected.outputs:
            for made in msgspec.msgpack.decode(output.frames[0], type=wire.Outputs).outputs:
                self.steps[-1].add(made.request_id)
                self.tokens.setdefault(made.request_id, []).extend(made.new_token_ids)


@pytest.mark.parametrize("unit", [PAIR, pp(0, 1, 2, 3), pp(0, 1, 2, 3, stages=2)])
def test_prompts_follow_each_other_every_stage(unit: Unit) -> None:
    """So many steps end in the time of one as there are stages."""
    pipeline, stages = Pipeline(unit), unit.layout.pp
    pipeline.add([str(number) for number in range(12)], 16, 1)
    pipeline.run()
    first = stages * STAGE + (stages - 1) * HOP
    expected = [first * (1 + k // stages) + STAGE * (k % stages) for k in range(12)]
    assert pipeline.ends == pytest.approx(expected)
    assert pipeline.most_in_flight == stages


def test_a_slow_link_decides_how_often_steps_end() -> None:
    pipeline = Pipeline(hop=3.0)
    pipeline.add([str(number) for number in range(6)], 16, 1)
    pipeline.run()
    assert pipeline.ends == pytest.approx([2 * STAGE + 3.0 * (k + 1) for k in range(6)])


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """vLLM counts tokens as computed once they are scheduled (``Scheduler.schedule``)."""
    pipeline = Pipeline()
    pipeline.add(["long"], 64, 1)
    pipeline.run()
    first = 2 * STAGE + HOP
    assert pipeline.ends == pytest.approx([first, first + STAGE, 2 * first, 2 * first + STAGE])
    assert pipeline.tokens["long"] == expected_tokens([1] * 64, 1)


def test_a_request_alone_leaves_the_other_stage_idle() -> None:
    pipeline = Pipeline()
    pipeline.add(["one"], 16, 5)
    pipeline.run()
    assert pipeline.most_in_flight == 1
    assert pipeline.ends[-1] == pytest.approx(5 * (2 * STAGE + HOP))


def test_decodes_divide_into_batches_that_take_turns() -> None:
    """As those of real engines do, for which ``test_real_pipeline.py`` has the same test."""
    pipeline = Pipeline()
    names = ["a", "b", "c", "d"]
    pipeline.add(names, 16, 40)
    pipeline.run()
    middle = pipeline.steps[20:-20]
    assert middle
    assert all(middle)
    assert all(not one & following for one, following in itertools.pairwise(middle))
    for number, name in enumerate(names):
        assert pipeline.tokens[name] == expected_tokens([number + 1] * 16, 40)


def test_requests_that_are_preempted_in_a_pipeline_get_the_same_tokens() -> None:
    pipeline = Pipeline(num_blocks=30)
    names = [str(number) for number in range(6)]
    pipeline.add(names, 15, 60)
    pipeline.run()
    for number, name in enumerate(names):
        assert pipeline.tokens[name] == expected_tokens([number + 1] * 15, 60)


def test_a_step_that_is_aborted_leaves_nothing_behind() -> None:
    pipeline = Pipeline()
    pipeline.add(["a", "b", "c"], 16, 9)
    while pipeline.core.dispatch():
        pass
    pipeline.core.abort(["a"])
    pipeline.run()
    assert pipeline.tokens.keys() == {"b", "c"}


def test_a_stage_waits_for_its_own_engines_only() -> None:
    devices = Devices()
    devices.queue(tp(1), DeviceStep(seconds=10.0), 0.0)
    step = DeviceStep(seconds=2 * STAGE + HOP, hop=HOP)
    devices.queue(PAIR, step, 0.0)
    assert (step.start, step.due) == (0.0, 10.0 + STAGE)
    assert devices.free_at(tp(0), 0.0) == STAGE
