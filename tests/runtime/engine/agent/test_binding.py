"""An engine's part in binds, message by message."""

import pytest

from shoal.runtime.engine.agent import binding
from shoal.runtime.engine.agent.binding import State
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, LEASE_1, Bench
from tests.runtime.loopback_node import problems


def test_hard_prepare_pauses_at_once(bench: Bench) -> None:
    bench.add("a")
    answers = bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    assert [type(answer) for answer in answers] == [m.Prepared]
    assert answers[0].paused == 1
    assert len(answers[0].blocks) == 10
    assert (bench.agent.binding.state, bench.agent.active) == (State.PREPARED, [])
    bench.turn(5)
    assert bench.backend.own.num_requests == 1


def test_sequential_prepare_waits_for_the_last_request(bench: Bench) -> None:
    bench.add("a", tokens=6)
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.SEQUENTIAL, 10)) == []
    assert bench.agent.binding.state is State.PREPARING
    bench.add("late", tokens=1)  # not expected, but honoured
    (answer,) = bench.turn(10)
    assert isinstance(answer, m.Prepared)
    assert (answer.paused, bench.backend.own.num_requests) == (0, 0)


def test_a_second_prepare_ends_the_wait(bench: Bench) -> None:
    bench.add("a", tokens=60)
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.SEQUENTIAL, 10)) == []
    (answer,) = bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    assert isinstance(answer, m.Prepared)
    assert (answer.paused, len(answer.blocks)) == (1, 10)
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10)) == []
    assert bench.agent.binding.stale == 0, "some members reach their safe point earlier"


@pytest.mark.parametrize("treatment", list(m.Treatment))
def test_aborted_bind_leaves_no_trace(bench: Bench, treatment: m.Treatment) -> None:
    bench.add("a", tokens=50)
    bench.tell(m.Prepare(5, GROUP, treatment, 10))
    (answer,) = bench.tell(m.AbortBind(5, GROUP))
    assert answer == m.Resumed(5, 0, 1)
    assert (bench.agent.binding.state, bench.backend.own.lent) == (State.SOLO, frozenset())
    bench.turn(60)
    assert bench.backend.own.num_requests == 0
    assert problems(bench.backend) == []


def test_leader_serves_the_group_and_nothing_else(bench: Bench) -> None:
    bench.add("own", tokens=5)
    bench.bind()
    bench.add("shared", tokens=3, group=GROUP)
    bench.turn(10)
    assert bench.backend.groups[GROUP].num_requests == 0
    assert bench.backend.own.num_requests == 1


def test_request_may_come_before_the_commit(bench: Bench) -> None:
    prepared = bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))[0]
    assert isinstance(prepared, m.Prepared)
    bench.add("shared", tokens=3, group=GROUP)
    bench.turn(5)
    assert bench.backend.groups[GROUP].num_requests == 1
    bench.tell(m.Commit(5, GROUP, 1, {0: prepared.blocks, 1: LEASE_1[:10]}))
    bench.turn(10)
    assert bench.backend.groups[GROUP].num_requests == 0


def test_follower_has_no_active_core() -> None:
    bench = Bench(engine=1)
    bench.turn()
    bench.bind()
    assert (bench.agent.binding.state, bench.agent.active) == (State.BOUND, [])
    assert bench.backend.attached == GROUP


def test_hard_release_keeps_paused_requests_and_their_blocks(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", prompt=15, tokens=50, group=GROUP)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    assert released.paused == 1
    assert len(released.returned[0]) == len(released.returned[1]) < 10
    (resumed,) = bench.tell(m.Resume(5, GROUP, released.returned[0]))
    assert (resumed, bench.agent.binding.state) == (m.Resumed(5, 0, 0), State.SOLO)
    assert len(bench.backend.own.lent) == 10 - len(released.returned[0])


@pytest.mark.parametrize("waits", [True, False], ids=["a request waits", "none does"])
def test_a_release_gives_few_blocks_back_at_once_while_requests_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(binding, "FIRST_BLOCKS", 4)
    bench.bind(blocks=30)
    if waits:
        bench.add("shared", prompt=15, tokens=50, group=GROUP)
    released, *_ = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    assert len(released.returned[0]) == (4 if waits else 30)


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
    assert bench.agent.binding.state is State.BOUND


def test_release_that_happened_cannot_be_taken_back(bench: Bench) -> None:
    bench.bind()
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.SEQUENTIAL))
    assert isinstance(released, m.Released)
    assert bench.tell(m.KeepBound(5, GROUP)) == []


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
    before = bench.backend.own.lent
    assert bench.tell(message) == []
    assert (bench.agent.binding.stale, bench.agent.binding.state) == (1, State.BOUND)
    assert (bench.backend.own.lent, bench.backend.groups[GROUP].lease_blocks) == (before, 10)


def test_epochs_only_rise(bench: Bench) -> None:
    bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    bench.tell(m.AbortBind(5, GROUP))
    assert bench.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10)) == []
    assert bench.agent.binding.stale == 1
