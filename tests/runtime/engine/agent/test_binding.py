"""An engine's part in binds, message by message."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.agent.binding import State
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, INTERLEAVE, LEASE_1, Bench
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
    assert bench.agent.binding.stale == 0


def test_a_member_at_its_safe_point_follows_without_a_word(bench: Bench) -> None:
    """All members of a group take turns, or its runners would not rest when it does."""
    (answer,) = bench.tell(m.Prepare(5, GROUP, m.Treatment.SEQUENTIAL, 10))
    assert isinstance(answer, m.Prepared)
    assert bench.tell(m.Prepare(5, GROUP, INTERLEAVE, 10)) == []
    assert bench.tell(m.Commit(5, GROUP, 1, {0: answer.blocks, 1: LEASE_1[:10]})) != []
    assert [core.unit for core in bench.agent.active] == [alone(0), GROUP]
    bench.tell(m.Prepare(5, GROUP, INTERLEAVE, 10))
    assert bench.agent.binding.stale == 1, "it is bound already"


@pytest.mark.parametrize("treatment", list(m.Treatment))
def test_aborted_bind_leaves_no_trace(bench: Bench, treatment: m.Treatment) -> None:
    bench.add("a", tokens=50)
    bench.tell(m.Prepare(5, GROUP, treatment, 10))
    (answer,) = bench.tell(m.AbortBind(5, GROUP))
    paused = treatment is not m.Treatment.INTERLEAVE
    assert answer == m.Resumed(5, 0, int(paused))
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


def test_interleaving_member_goes_on_with_its_own_requests(bench: Bench) -> None:
    bench.add("own", tokens=30)
    (prepared,) = bench.tell(m.Prepare(5, GROUP, INTERLEAVE, 10))
    assert isinstance(prepared, m.Prepared)
    assert (prepared.paused, len(prepared.blocks)) == (0, 10)
    own, group = bench.backend.own, bench.backend.groups[GROUP]
    assert (bench.agent.binding.state, bench.agent.active) == (State.PREPARED, [own])
    bench.tell(m.Commit(5, GROUP, 1, {0: prepared.blocks, 1: LEASE_1[:10]}))
    bench.add("shared", tokens=3, group=GROUP)
    assert bench.agent.active == [own, group]
    bench.turn(60)
    assert (own.num_requests, group.num_requests) == (0, 0)


def test_released_member_goes_on_before_and_after_it_is_resumed(bench: Bench) -> None:
    bench.add("own", tokens=90)
    bench.bind(treatment=INTERLEAVE)
    own = bench.backend.own
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert bench.agent.active == [own]
    (resumed,) = bench.tell(m.Resume(5, GROUP, released.returned[0]))
    assert (resumed, bench.agent.active) == (m.Resumed(5, 0, 0), [own])
    bench.turn(100)
    assert (own.num_requests, bench.backend.own.lent) == (0, frozenset())
    assert problems(bench.backend) == []


@pytest.mark.parametrize("treatment", [INTERLEAVE, m.Treatment.HARD])
def test_blocks_come_back_behind_the_groups_last_step(
    bench: Bench, treatment: m.Treatment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the group that are queued still write to them."""
    calls = []
    own, take_back = bench.backend.own, bench.backend.own.take_back
    monkeypatch.setattr(bench.backend, "await_detach", lambda epoch: calls.append(epoch))
    monkeypatch.setattr(own, "take_back", lambda ids: (calls.append(ids), take_back(ids)))
    bench.bind(treatment=treatment)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    blocks = released.returned[0]
    bench.tell(m.Resume(5, GROUP, blocks))
    # A runner that does not interleave reads its own queue again only then.
    assert calls == ([5, blocks] if treatment is INTERLEAVE else [blocks])


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
