"""An engine's part in leases, message by message."""

from shoal.runtime.engine.agent.lending import IDLE_SECONDS, LEASE_FLOOR
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, LEASE_1, Bench


def test_blocks_of_a_request_aborted_while_paused_go_back(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", prompt=15, tokens=50, group=GROUP)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    bench.tell(m.Resume(5, GROUP, released.returned[0]))
    (returning,) = bench.tell(m.AbortRequests(GROUP, ["shared"]))
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 10 - len(released.returned[0])
    bench.tell(m.TakeBack(5, GROUP, returning.returned[0]))
    assert bench.backend.own.lent == frozenset()
    assert bench.turn(3) == []


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
    assert bench.backend.groups[GROUP].num_requests == 0


def test_idle_group_gives_back_all_but_the_floor(bench: Bench) -> None:
    bench.bind(blocks=100)
    assert bench.turn() == []
    bench.clock.advance(IDLE_SECONDS)
    (returning,) = bench.turn()
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 100 - LEASE_FLOOR
    assert bench.turn(2) == []
