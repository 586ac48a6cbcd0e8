"""The agent's loop and what it answers itself."""

import msgspec
import pytest

from shoal.policies.values.layouts import DP, Layout, alone
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.fake.faults import Faults, Seam
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from tests.runtime.engine.agent.agent_bench import GROUP, Bench
from tests.runtime.loopback_node import request_payload


def test_announces_itself_first() -> None:
    bench = Bench()
    ready = bench.heard()[0]
    assert isinstance(ready, m.EngineReady)
    assert (ready.engine, ready.num_blocks) == (0, 200)
    assert [limits.layout for limits in ready.layouts] == [DP, Layout(tp=2)]


def test_refused_request_ends_with_an_error(bench: Bench) -> None:
    payload = request_payload("bad", [1] * 400, 3, client=1)
    bench.network.controller.to_engine(0, m.AddRequest(alone(0), "bad"), payload)
    bench.agent.turn()
    (load,) = [x for x in bench.heard() if isinstance(x, m.Load)]
    assert (load.finished, load.added) == (["bad"], 1)
    outputs = msgspec.msgpack.decode(bench.network.front_outputs[1][0][0], type=wire.Outputs)
    assert outputs.outputs == [wire.Output("bad", [], finish_reason=wire.FinishReason.ERROR)]


def test_a_threshold_is_for_the_units_of_its_layout(bench: Bench) -> None:
    tp2 = Layout(tp=2)
    for thresholds in ({DP: 7, tp2: 100}, {tp2: 300}, {}):
        bench.tell(m.SetShift(list(thresholds.items())))
        bench.agent.turn()
        shifts = {core.unit.layout: core.shift for core in bench.backend.cores.values()}
        assert {layout: shift.threshold for layout, shift in shifts.items()} == {
            layout: thresholds.get(layout) for layout in shifts
        }


def test_dead_runner_is_reported() -> None:
    bench = Bench(faults=Faults(die_at=Seam.LEND))
    bench.turn()
    with pytest.raises(RunnerDied):
        bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    failed = bench.heard()[-1]
    assert failed == m.EngineFailed(0, "RunnerDied: died in lend on purpose")


def test_integrity_reports_what_is_lent_and_leased(bench: Bench) -> None:
    bench.bind(blocks=3)
    (answer,) = bench.tell(m.CheckIntegrity(9))
    assert answer == m.Integrity(9, 0, [], sorted(bench.backend.own.lent), [(GROUP, 3)])
