"""The agent's state machine, message by message, on a fake backend."""

import msgspec
import pytest

from shoal.policies.values.layouts import DP, Layout, alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.agent import IDLE_SECONDS, LEASE_FLOOR, Agent, State, Stepping
from shoal.runtime.engine.agent.interface import EndedSteps, RunnerDied
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_core import NO_FAULTS, Faults, Seam
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.protocol.transport import Channel
from tests.runtime.loopback_node import request_payload
from tests.units import tp

GROUP = tp(0, 1)
INTERLEAVE = m.Treatment.INTERLEAVE
LEASE_1 = list(range(500, 700))
"""Ids that the other member is said to have lent."""


class Bench:
    """One agent, its controller played by the test."""

    def __init__(
        self, engine: int = 0, faults: Faults = NO_FAULTS, step_seconds: float = 0.0
    ) -> None:
        settings = FakeSettings(
            step_seconds=step_seconds,
            num_blocks=200,
            block_tokens=4,
            max_num_seqs=8,
            max_model_len=300,
        )
        config = NodeConfig(2, 2, "manual", "unused", {}, fake=settings)
        self.clock = ManualClock()
        self.network = LoopbackNetwork()
        self.backend = FakeBackend(config, engine, clock=self.clock, faults=faults)
        self.agent = Agent(self.backend, self.network.agent(engine), clock=self.clock)
        self.engine = engine

    def tell(self, message: m.Message, *frames: bytes, turns: int = 1) -> list[m.Message]:
        """Send a message, give turns, return the answers but for load reports."""
        self.network.controller.to_engine(self.engine, message, frames)
        return self.turn(turns)

    def turn(self, turns: int = 1) -> list[m.Message]:
        for _ in range(turns):
            self.agent.turn()
        return [message for message in self.heard() if not isinstance(message, m.Load)]

    def heard(self) -> list[m.Message]:
        queue = self.network.to_controller.get((Channel.ENGINE, f"engine-{self.engine}.0"))
        messages = [m.decode_to_controller(frames[0]) for frames in queue or ()]
        if queue:
            queue.clear()
        return messages

    def add(self, request_id: str, prompt: int = 8, tokens: int = 5, group=None) -> None:
        payload = request_payload(request_id, [1] * prompt, tokens)
        self.tell(m.AddRequest(group or alone(self.engine), request_id), *payload)

    def bind(self, blocks: int = 10, treatment: m.Treatment = m.Treatment.HARD) -> None:
        """Bring the agent into the bound group."""
        (prepared,) = self.tell(m.Prepare(5, GROUP, treatment, blocks))
        assert isinstance(prepared, m.Prepared)
        lease = {0: prepared.blocks, 1: LEASE_1[: len(prepared.blocks)]}
        assert self.tell(m.Commit(5, GROUP, 1, lease)) == [m.Committed(5, self.engine)]


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    (ready,) = bench.turn()
    assert isinstance(ready, m.EngineReady)
    return bench


def test_announces_itself_first() -> None:
    bench = Bench()
    ready = bench.heard()[0]
    assert isinstance(ready, m.EngineReady)
    assert (ready.engine, ready.num_blocks) == (0, 200)
    assert [limits.layout for limits in ready.layouts] == [DP, Layout(tp=2)]


def test_hard_prepare_pauses_at_once(bench: Bench) -> None:
    bench.add("a")
    answers = bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    assert [type(answer) for answer in answers] == [m.Prepared]
    assert answers[0].paused == 1
    assert len(answers[0].blocks) == 10
    assert (bench.agent.state, bench.agent.active) == (State.PREPARED, [])
    bench.turn(5)
    assert bench.backend.core(alone(0)).num_requests == 1


def test_sequential_prepare_waits_for_the_last_request(bench: Bench) -> None:
    bench.add("a", tokens=6)
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.SEQUENTIAL, 10)) == []
    assert bench.agent.state is State.PREPARING
    bench.add("late", tokens=1)  # not expected, but honoured
    (answer,) = bench.turn(10)
    assert isinstance(answer, m.Prepared)
    assert (answer.paused, bench.backend.core(alone(0)).num_requests) == (0, 0)


@pytest.mark.parametrize("treatment", [m.Treatment.HARD, INTERLEAVE])
def test_a_second_prepare_ends_the_wait(bench: Bench, treatment: m.Treatment) -> None:
    bench.add("a", tokens=60)
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.SEQUENTIAL, 10)) == []
    goes_on = treatment is INTERLEAVE
    (answer,) = bench.tell(m.Prepare(5, GROUP, treatment, 10))
    assert isinstance(answer, m.Prepared)
    assert (answer.paused, len(answer.blocks)) == (0 if goes_on else 1, 10)
    assert bench.tell(m.Commit(5, GROUP, 1, {0: answer.blocks, 1: LEASE_1[:10]})) != []
    assert (alone(0) in [core.unit for core in bench.agent.active]) == goes_on
    assert bench.agent.stale == 0


def test_a_member_at_its_safe_point_follows_without_a_word(bench: Bench) -> None:
    """All members of a group take turns, or its runners would not rest when it does."""
    (answer,) = bench.tell(m.Prepare(5, GROUP, m.Treatment.SEQUENTIAL, 10))
    assert isinstance(answer, m.Prepared)
    assert bench.tell(m.Prepare(5, GROUP, INTERLEAVE, 10)) == []
    assert bench.tell(m.Commit(5, GROUP, 1, {0: answer.blocks, 1: LEASE_1[:10]})) != []
    assert [core.unit for core in bench.agent.active] == [alone(0), GROUP]
    bench.tell(m.Prepare(5, GROUP, INTERLEAVE, 10))
    assert bench.agent.stale == 1, "it is bound already"


@pytest.mark.parametrize("treatment", list(m.Treatment))
def test_aborted_bind_leaves_no_trace(bench: Bench, treatment: m.Treatment) -> None:
    bench.add("a", tokens=50)
    bench.tell(m.Prepare(5, GROUP, treatment, 10))
    (answer,) = bench.tell(m.AbortBind(5, GROUP))
    paused = treatment is not m.Treatment.INTERLEAVE
    assert answer == m.Resumed(5, 0, int(paused))
    assert (bench.agent.state, bench.backend.lent) == (State.SOLO, frozenset())
    bench.turn(60)
    assert bench.backend.core(alone(0)).num_requests == 0
    assert bench.backend.check_integrity() == []


def test_leader_serves_the_group_and_nothing_else(bench: Bench) -> None:
    bench.add("own", tokens=5)
    bench.bind()
    bench.add("shared", tokens=3, group=GROUP)
    bench.turn(10)
    assert bench.backend.core(GROUP).num_requests == 0
    assert bench.backend.core(alone(0)).num_requests == 1


def test_request_may_come_before_the_commit(bench: Bench) -> None:
    prepared = bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))[0]
    assert isinstance(prepared, m.Prepared)
    bench.add("shared", tokens=3, group=GROUP)
    bench.turn(5)
    assert bench.backend.core(GROUP).num_requests == 1
    bench.tell(m.Commit(5, GROUP, 1, {0: prepared.blocks, 1: LEASE_1[:10]}))
    bench.turn(10)
    assert bench.backend.core(GROUP).num_requests == 0


def test_a_token_leaves_before_the_next_step_is_scheduled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add("a", tokens=2)
    core, waiting = bench.backend.core(alone(0)), bench.network.front_outputs
    waiting.clear()
    seen: list[int] = []
    dispatch = core.dispatch

    def look_and_dispatch() -> bool:
        seen.append(len(waiting.get(0, ())))
        return dispatch()

    monkeypatch.setattr(core, "dispatch", look_and_dispatch)
    bench.turn()
    assert seen == [1]


def test_follower_has_no_active_core() -> None:
    bench = Bench(engine=1)
    bench.turn()
    bench.bind()
    assert (bench.agent.state, bench.agent.active) == (State.BOUND, [])
    assert bench.backend.attached == GROUP


def test_hard_release_keeps_paused_requests_and_their_blocks(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", prompt=15, tokens=50, group=GROUP)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    assert released.paused == 1
    assert len(released.returned[0]) == len(released.returned[1]) < 10
    (resumed,) = bench.tell(m.Resume(5, GROUP, released.returned[0]))
    assert (resumed, bench.agent.state) == (m.Resumed(5, 0, 0), State.SOLO)
    assert len(bench.backend.lent) == 10 - len(released.returned[0])


def test_blocks_of_a_request_aborted_while_paused_go_back(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", prompt=15, tokens=50, group=GROUP)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    bench.tell(m.Resume(5, GROUP, released.returned[0]))
    (returning,) = bench.tell(m.AbortRequests(["shared"]))
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 10 - len(released.returned[0])
    bench.tell(m.TakeBack(5, GROUP, returning.returned[0]))
    assert bench.backend.lent == frozenset()
    assert bench.turn(3) == []


def test_sequential_release_waits(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", tokens=6, group=GROUP)
    assert bench.tell(m.Release(5, GROUP, m.Treatment.SEQUENTIAL)) == []
    (released,) = bench.turn(10)
    assert isinstance(released, m.Released)
    assert (released.paused, len(released.returned[0])) == (0, 10)


def test_a_second_release_ends_the_wait_and_a_third_changes_nothing(bench: Bench) -> None:
    bench.bind()
    bench.add("g", tokens=60, group=GROUP)
    assert bench.tell(m.Release(5, GROUP, m.Treatment.SEQUENTIAL)) == []
    (answer,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(answer, m.Released)
    assert answer.paused == 1
    assert bench.tell(m.Release(5, GROUP, m.Treatment.HARD)) == []


def test_waiting_release_can_be_taken_back(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", tokens=6, group=GROUP)
    bench.tell(m.Release(5, GROUP, m.Treatment.SEQUENTIAL))
    assert bench.tell(m.KeepBound(5, GROUP)) == [m.Committed(5, 0)]
    assert bench.turn(20) == []
    assert bench.agent.state is State.BOUND


def test_release_that_happened_cannot_be_taken_back(bench: Bench) -> None:
    bench.bind()
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.SEQUENTIAL))
    assert isinstance(released, m.Released)
    assert bench.tell(m.KeepBound(5, GROUP)) == []


def test_interleaving_member_goes_on_with_its_own_requests(bench: Bench) -> None:
    bench.add("own", tokens=30)
    (prepared,) = bench.tell(m.Prepare(5, GROUP, INTERLEAVE, 10))
    assert isinstance(prepared, m.Prepared)
    assert (prepared.paused, len(prepared.blocks)) == (0, 10)
    own, group = bench.backend.core(alone(0)), bench.backend.core(GROUP)
    assert (bench.agent.state, bench.agent.active) == (State.PREPARED, [own])
    bench.tell(m.Commit(5, GROUP, 1, {0: prepared.blocks, 1: LEASE_1[:10]}))
    bench.add("shared", tokens=3, group=GROUP)
    assert bench.agent.active == [own, group]
    bench.turn(60)
    assert (own.num_requests, group.num_requests) == (0, 0)


def test_released_member_goes_on_before_and_after_it_is_resumed(bench: Bench) -> None:
    bench.add("own", tokens=90)
    bench.bind(treatment=INTERLEAVE)
    own = bench.backend.core(alone(0))
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert bench.agent.active == [own]
    (resumed,) = bench.tell(m.Resume(5, GROUP, released.returned[0]))
    assert (resumed, bench.agent.active) == (m.Resumed(5, 0, 0), [own])
    bench.turn(100)
    assert (own.num_requests, bench.backend.lent) == (0, frozenset())
    assert bench.backend.check_integrity() == []


def test_interleaving_member_lends_between_its_steps() -> None:
    """A step in flight may write to blocks that have come free since it was scheduled."""
    bench = Bench(step_seconds=0.5)
    bench.add("own", tokens=30)
    bench.bind(treatment=INTERLEAVE)
    own = bench.backend.core(alone(0))
    assert own.in_flight
    assert bench.tell(m.Lend(5, GROUP, 3, urgent=False)) == []
    bench.clock.advance(0.5)
    (lent,) = bench.turn()
    assert isinstance(lent, m.Lent)
    assert (len(lent.blocks), own.in_flight) == (3, 0)
    bench.turn()
    assert own.in_flight


def test_interleaving_member_lends_what_its_requests_will_not_need(bench: Bench) -> None:
    bench.add("own", prompt=200, tokens=30)
    bench.bind(treatment=INTERLEAVE)
    (lent,) = bench.tell(m.Lend(5, GROUP, 200, urgent=True), turns=2)
    assert isinstance(lent, m.Lent)
    own = bench.backend.core(alone(0))
    assert len(own.held()) + own.load.free_blocks == -(-230 // 4)
    assert len(lent.blocks) == 200 - 10 - -(-230 // 4)
    bench.turn(40)
    assert own.num_requests == 0


def test_requests_that_cannot_run_keep_no_block_from_the_group(bench: Bench) -> None:
    """Neither side could go on: the group would wait for them, and they for the group."""
    bench.bind(blocks=190, treatment=INTERLEAVE)
    bench.add("own", prompt=30, tokens=60)
    bench.turn(20)
    own = bench.backend.core(alone(0))
    assert (own.load.running, own.load.waiting, own.load.free_blocks) == (0, 1, 10)
    (lent,) = bench.tell(m.Lend(5, GROUP, 10, urgent=True), turns=2)
    assert isinstance(lent, m.Lent)
    assert len(lent.blocks) == 10


@pytest.mark.parametrize("treatment", [INTERLEAVE, m.Treatment.HARD])
def test_blocks_come_back_behind_the_groups_last_step(
    bench: Bench, treatment: m.Treatment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the group that are queued still write to them."""
    calls = []
    backend, take_back = bench.backend, bench.backend.take_back
    monkeypatch.setattr(backend, "await_detach", lambda epoch: calls.append(epoch))
    monkeypatch.setattr(backend, "take_back", lambda ids: (calls.append(ids), take_back(ids)))
    bench.bind(treatment=treatment)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    blocks = released.returned[0]
    bench.tell(m.Resume(5, GROUP, blocks))
    # A runner that does not interleave reads its own queue again only then.
    assert calls == ([5, blocks] if treatment is INTERLEAVE else [blocks])


def test_idle_group_keeps_no_block_from_requests_beside_it(bench: Bench) -> None:
    bench.bind(treatment=INTERLEAVE)
    bench.clock.advance(IDLE_SECONDS)
    (returning,) = bench.turn()
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 10


@pytest.mark.parametrize(
    "message",
    [
        m.Prepare(4, GROUP, m.Treatment.HARD, 10),
        m.Commit(4, GROUP, 1, {0: [], 1: []}),
        m.AbortBind(4, GROUP),
        m.Release(4, GROUP, m.Treatment.HARD),
        m.KeepBound(4, GROUP),
        m.Resume(4, GROUP, []),
        m.Lend(4, GROUP, 3, urgent=False),
        m.Grow(4, GROUP, {0: [1], 1: [1]}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_of_an_old_epoch_are_dropped_and_counted(bench: Bench, message) -> None:
    bench.bind()
    before = bench.backend.lent
    assert bench.tell(message) == []
    assert (bench.agent.stale, bench.agent.state) == (1, State.BOUND)
    assert (bench.backend.lent, bench.backend.core(GROUP).lease_blocks) == (before, 10)


def test_epochs_only_rise(bench: Bench) -> None:
    bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    bench.tell(m.AbortBind(5, GROUP))
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10)) == []
    assert bench.agent.stale == 1


def test_growth_is_asked_for_once_and_again_after_a_pause(bench: Bench) -> None:
    bench.bind(blocks=1)
    bench.add("shared", prompt=30, tokens=3, group=GROUP)
    assert bench.turn(3) == []  # asked with the request already: heard by ``add``
    assert bench.tell(m.Grow(5, GROUP, {0: [], 1: []})) == []
    bench.clock.advance(1.0)
    (wish,) = bench.turn()
    assert wish == m.NeedBlocks(5, GROUP, 3, urgent=True)
    (lent,) = bench.tell(m.Lend(5, GROUP, 3, urgent=True))
    assert isinstance(lent, m.Lent)
    bench.tell(m.Grow(5, GROUP, {0: lent.blocks, 1: LEASE_1[1:4]}))
    bench.turn(8)
    assert bench.backend.core(GROUP).num_requests == 0


def test_idle_group_gives_back_all_but_the_floor(bench: Bench) -> None:
    bench.bind(blocks=100)
    assert bench.turn() == []
    bench.clock.advance(IDLE_SECONDS)
    (returning,) = bench.turn()
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 100 - LEASE_FLOOR
    assert bench.turn(2) == []


def test_refused_request_ends_with_an_error(bench: Bench) -> None:
    payload = request_payload("bad", [1] * 400, 3, client=1)
    bench.network.controller.to_engine(0, m.AddRequest(alone(0), "bad"), payload)
    bench.agent.turn()
    (load,) = [x for x in bench.heard() if isinstance(x, m.Load)]
    assert (load.finished, load.added) == (["bad"], 1)
    outputs = msgspec.msgpack.decode(bench.network.front_outputs[1][0][0], type=wire.Outputs)
    assert outputs.outputs == [wire.Output("bad", [], finish_reason=wire.FinishReason.ERROR)]


def test_load_is_reported_when_it_changes(bench: Bench) -> None:
    bench.agent.turn()
    assert bench.heard() == []
    bench.network.controller.to_engine(
        0, m.AddRequest(alone(0), "a"), request_payload("a", [1] * 8, 1)
    )
    bench.agent.turn()
    bench.agent.turn()
    loads = [x for x in bench.heard() if isinstance(x, m.Load)]
    assert [(x.running, x.free_blocks, x.finished) for x in loads] == [
        (1, 198, []),
        (0, 200, ["a"]),
    ]


DECODE = m.Work(steps=1, decodes=2, context_tokens=30)
PREFILL = m.Work(steps=1, prefill_tokens=9, prefill_pairs=45)


def in_tp(*works: m.Work) -> list[EndedSteps]:
    return [EndedSteps(m.Mode.TP, work) for work in works]


def test_a_step_lasts_from_the_end_of_the_one_before_it() -> None:
    stepping = Stepping()
    stepping.see(10.0, [], in_flight=True)
    stepping.see(10.5, [], in_flight=True)
    stepping.see(12.0, in_tp(PREFILL), in_flight=True)
    stepping.see(12.5, in_tp(DECODE), in_flight=False)
    stepping.see(20.0, [], in_flight=True)
    stepping.see(21.0, in_tp(DECODE), in_flight=False)
    assert stepping.work[m.Mode.TP].prefilling == PREFILL + m.Work(seconds=2.0)
    assert stepping.work[m.Mode.TP].decoding == DECODE + DECODE + m.Work(seconds=1.5)


def test_steps_of_both_kinds_that_end_together_are_left_out() -> None:
    stepping = Stepping()
    stepping.see(0.0, [], in_flight=True)
    stepping.see(5.0, in_tp(PREFILL, DECODE), in_flight=True)
    stepping.see(6.0, in_tp(DECODE, DECODE), in_flight=False)
    done = stepping.work[m.Mode.TP]
    assert done.prefilling == m.Work()
    assert done.decoding == DECODE + DECODE + m.Work(seconds=1.0)
    assert (done.total.steps, done.total.seconds) == (4, 6.0)


def test_steps_of_each_mode_count_apart() -> None:
    stepping = Stepping()
    stepping.see(0.0, [], in_flight=True)
    stepping.see(2.0, [EndedSteps(m.Mode.SP, PREFILL)], in_flight=True)
    stepping.see(3.0, in_tp(DECODE), in_flight=True)
    assert stepping.work[m.Mode.SP].prefilling == PREFILL + m.Work(seconds=2.0)
    assert stepping.work[m.Mode.TP].decoding == DECODE + m.Work(seconds=1.0)
    # What two modes took together is in the totals, half of it in each.
    stepping.see(7.0, [EndedSteps(m.Mode.SP, PREFILL), *in_tp(PREFILL)], in_flight=False)
    assert stepping.work[m.Mode.SP].prefilling == PREFILL + m.Work(seconds=2.0)
    assert stepping.work[m.Mode.SP].total == PREFILL + PREFILL + m.Work(seconds=4.0)
    assert stepping.work[m.Mode.TP].total == DECODE + PREFILL + m.Work(seconds=3.0)


def test_a_threshold_is_for_the_units_of_its_layout(bench: Bench) -> None:
    tp2 = Layout(tp=2)
    for thresholds in ({DP: 7, tp2: 100}, {tp2: 300}, {}):
        bench.tell(m.SetShift(list(thresholds.items())))
        bench.agent.turn()
        shifts = {core.unit.layout: core.shift for core in bench.backend.cores.values()}
        assert {layout: shift.threshold for layout, shift in shifts.items()} == {
            layout: thresholds.get(layout) for layout in shifts
        }


def test_a_load_report_says_what_steps_computed(bench: Bench) -> None:
    bench.add("a", prompt=8, tokens=3)
    bench.agent.turn()
    for _ in range(6):
        bench.agent.turn()
    last = [x for x in bench.heard() if isinstance(x, m.Load)][-1]
    done = last.done(m.Mode.TP)
    assert (done.prefilling.steps, done.prefilling.prefill_tokens) == (1, 8)
    assert (done.decoding.steps, done.decoding.decodes) == (2, 2)
    assert last.done(m.Mode.SP) == m.ModeWork()


def test_dead_runner_is_reported_and_ends_the_loop() -> None:
    bench = Bench(faults=Faults(die_at=Seam.LEND))
    bench.turn()
    with pytest.raises(RunnerDied):
        bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    failed = bench.heard()[-1]
    assert failed == m.EngineFailed(0, "RunnerDied: died in lend on purpose")
    assert not bench.agent.running


def test_stop_ends_the_loop(bench: Bench) -> None:
    bench.network.controller.to_engine(0, m.Stop())
    bench.agent.run()
    assert not bench.agent.running


def test_integrity_reports_what_is_lent_and_leased(bench: Bench) -> None:
    bench.bind(blocks=3)
    (answer,) = bench.tell(m.CheckIntegrity(9))
    assert answer == m.Integrity(9, 0, [], sorted(bench.backend.lent), [(GROUP, 3)])
