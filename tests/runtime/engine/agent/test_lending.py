"""An engine's part in leases, message by message."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.agent import lending, sliced_work
from shoal.runtime.engine.agent.lending import (
    HOLD_SECONDS,
    LONGEST_PAUSE,
    RETRY_SECONDS,
    SHRUNK_SECONDS,
)
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, LEASE_1, Bench, started
from tests.runtime.engine.agent.test_carrying import CARRY, OTHER, OWN, carried, expect, take_in
from tests.runtime.loopback_node import request_payload


def test_blocks_of_a_request_aborted_while_paused_go_back(bench: Bench) -> None:
    bench.bind()
    bench.add("shared", prompt=15, tokens=50, group=GROUP)
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    bench.tell(m.Resume(5, GROUP, released.returned[0]))
    (returning,) = bench.tell(m.AbortRequests(GROUP, ["shared"]))
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 10 - len(released.returned[0])
    bench.tell(m.TakeBack(returning.returned[0]))
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


def test_an_idle_group_keeps_its_blocks(bench: Bench) -> None:
    bench.bind(blocks=100)
    for _ in range(3):
        bench.clock.advance(60.0)
        assert bench.turn() == []
    assert bench.backend.groups[GROUP].lease_blocks == 100


# --- blocks that save cached ones ---


@pytest.fixture
def caching() -> Bench:
    return started(prefix_caching=True, step_seconds=0.001)


def wishes(bench: Bench, seconds: float) -> list[float]:
    """Let the group's request run so long, and grant no wish; return when there was one."""
    begun, asked = bench.clock(), list[float]()
    while bench.clock() < begun + seconds:
        for message in bench.turn():
            if isinstance(message, m.NeedBlocks):
                asked.append(bench.clock() - begun)
                bench.network.controller.to_engine(0, m.Grow(5, GROUP, {0: [], 1: []}))
        bench.clock.advance(0.001)
    return asked


def test_a_group_asks_for_blocks_before_it_evicts_cached_ones(caching: Bench) -> None:
    caching.bind(blocks=50)
    core = caching.backend.groups[GROUP]
    payload = request_payload("shared", [1] * 8, 250)
    (wish,) = caching.tell(m.AddRequest(GROUP, "shared"), *payload)
    assert core.blocks_lacking == 0 < core.blocks_wanted
    assert wish == m.NeedBlocks(5, GROUP, core.blocks_wanted, urgent=False)


def test_a_group_asks_ever_less_often_for_blocks_that_it_does_not_lack(caching: Bench) -> None:
    caching.bind(blocks=50)
    caching.add("shared", prompt=8, tokens=280, group=GROUP)
    caching.tell(m.Grow(5, GROUP, {0: [], 1: []}))
    times = wishes(caching, 0.28)
    assert len(times) == 2
    assert times[0] >= RETRY_SECONDS - 0.002
    assert times[1] - times[0] >= 2 * RETRY_SECONDS
    growth = caching.agent._lending._growth
    for _ in range(9):
        caching.tell(m.Grow(5, GROUP, {0: [], 1: []}))
    assert growth.pause == LONGEST_PAUSE
    caching.tell(m.Grow(5, GROUP, {0: [190], 1: [190]}))
    assert growth.pause == RETRY_SECONDS, "members had some"


def test_a_group_that_gives_blocks_up_does_not_ask_for_them_again(caching: Bench) -> None:
    caching.bind(blocks=120)
    caching.add("shared", prompt=8, tokens=280, group=GROUP)
    messages = caching.tell(m.Shrink(5, GROUP, 60))
    (returning,) = [each for each in messages if isinstance(each, m.Returning)]
    assert len(returning.returned[0]) == 60
    assert caching.backend.groups[GROUP].blocks_wanted
    assert wishes(caching, 0.1) == []
    caching.clock.advance(SHRUNK_SECONDS)
    assert len(wishes(caching, 0.01)) == 1, "it was not released"
    assert caching.tell(m.Shrink(4, GROUP, 30)) == [], "that bind is over"


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions of 30 blocks, one in each turn."""
    monkeypatch.setattr(m, "PORTION", 30)
    monkeypatch.setattr(sliced_work, "SLICE_SECONDS", 0.0)


@pytest.mark.usefixtures("small_portions")
def test_a_group_gives_many_blocks_up_in_portions_and_then_pins(caching: Bench) -> None:
    caching.bind(blocks=120)
    caching.add("shared", prompt=8, tokens=280, group=GROUP)
    caching.network.controller.to_engine(0, m.Shrink(5, GROUP, 70))
    caching.network.controller.to_engine(0, m.Pin(3, GROUP, ["shared"], {}, 0))
    turns = [caching.turn() for _ in range(4)]
    kinds = m.Returning | m.Pinned
    told = [[message for message in turn if isinstance(message, kinds)] for turn in turns]
    flat = [message for turn in told for message in turn]
    assert [type(message) for message in flat] == [m.Returning] * 3 + [m.Pinned]
    assert [len(each.returned[0]) for each in flat[:3]] == [30, 30, 10]
    assert len(told[0]) < 4, "steps go on between the portions"


@pytest.mark.usefixtures("small_portions")
def test_a_group_that_is_released_gives_the_rest_up_with_its_lease(caching: Bench) -> None:
    caching.bind(blocks=120)
    messages = caching.tell(m.Shrink(5, GROUP, 100))
    messages += caching.tell(m.Release(5, GROUP, m.Treatment.HARD))
    while caching.agent.next_wakeup() == 0.0:
        messages += caching.turn()
    returned = [each.returned[0] for each in messages if isinstance(each, m.Returning | m.Released)]
    assert sum(map(len, returned)) == 120
    assert max(map(len, returned)) == 30
    assert caching.backend.groups[GROUP].lease_blocks == 0


def test_a_wish_whose_time_has_just_come_is_due_at_once(bench: Bench) -> None:
    bench.bind(blocks=1)
    bench.network.controller.to_engine(
        0, m.AddRequest(GROUP, "large"), request_payload("large", [1] * 200, 3)
    )
    bench.turn()
    bench.tell(m.Grow(5, GROUP, {0: [], 1: []}))
    assert bench.agent.next_wakeup() == pytest.approx(lending.RETRY_SECONDS)
    bench.clock.advance(lending.RETRY_SECONDS)
    assert bench.agent.next_wakeup() == 0.0
    assert [type(message) for message in bench.turn()] == [m.NeedBlocks]


def test_a_large_lease_goes_home_in_portions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PORTION", 40)
    bench.bind(blocks=100)
    messages = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    while bench.agent.next_wakeup() == 0.0:
        messages += bench.turn()
    assert [type(message) for message in messages] == [m.Released, m.Returning, m.Returning]
    first, *rest = [message.returned[0] for message in messages]
    assert [len(blocks) for blocks in (first, *rest)] == [40, 40, 20]
    assert bench.backend.groups[GROUP].lease_blocks == 0
    bench.tell(m.Resume(5, GROUP, first))
    for blocks in rest:
        bench.tell(m.TakeBack(blocks))
    assert bench.backend.own.lent == frozenset()


@pytest.mark.parametrize("comes", [True, False], ids=["they come", "they do not come soon"])
def test_a_lease_goes_home_after_the_requests_that_stand_still(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(m, "PORTION", 40)
    bench.bind(blocks=100)
    frames = {"r": request_payload("r", [1] * 8, 3)}
    assert bench.tell(m.Expect(3, alone(0), frames, {})) == []
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    assert bench.turn(3) == []
    (resumed,) = bench.tell(m.Resume(5, GROUP, released.returned[0]), turns=3)
    assert isinstance(resumed, m.Resumed)
    if comes:
        messages = bench.tell(m.Import(3, alone(0), GROUP, []), turns=3)
        assert [type(message) for message in messages] == [m.Imported, m.Returning, m.Returning]
    else:
        assert bench.agent.next_wakeup() == pytest.approx(HOLD_SECONDS)
        bench.clock.advance(HOLD_SECONDS)
        messages = bench.turn(3)
        assert [type(message) for message in messages] == [m.Returning, m.Returning]
        assert bench.agent.next_wakeup() is None


def test_a_lease_goes_home_after_the_first_step_of_the_requests_that_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(m, "PORTION", 40)
    bench = started(step_seconds=HOLD_SECONDS / 2)
    bench.bind(blocks=100)
    expect(bench, "r")
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    bench.tell(m.Resume(5, GROUP, released.returned[0]))
    messages = bench.tell(m.Import(CARRY, OWN, GROUP, [carried("r")]), turns=3)
    assert [type(message) for message in messages] == [m.Imported]
    assert bench.backend.own.in_flight
    bench.clock.advance(HOLD_SECONDS / 2)
    messages = bench.turn(3)
    assert [type(message) for message in messages] == [m.Returning, m.Returning]


def test_a_group_asks_for_no_blocks_that_only_save_cached_ones_while_requests_stand_still(
    caching: Bench,
) -> None:
    expect(caching, "early", unit=GROUP)
    expect(caching, "late", unit=GROUP, carry=CARRY + 1)
    caching.bind(blocks=50)
    messages = caching.tell(m.Import(CARRY, GROUP, OTHER, [carried("early")]), turns=3)
    assert caching.backend.groups[GROUP].blocks_wanted
    assert [type(message) for message in messages] == [m.Imported]
    take_in(caching, carried("late"), unit=GROUP, carry=CARRY + 1)
    caching.clock.advance(0.001)
    assert [type(message) for message in caching.turn(3)] == [m.NeedBlocks]


def test_a_lease_goes_home_at_once_if_requests_that_stand_still_lack_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PORTION", 40)
    bench.bind(blocks=200)
    for carry in (3, 4):
        frames = {f"r{carry}": request_payload(f"r{carry}", [1] * 160, 3)}
        assert bench.tell(m.Expect(carry, alone(0), frames, {})) == []
    (released,) = bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert isinstance(released, m.Released)
    bench.tell(m.Resume(5, GROUP, released.returned[0]), turns=3)
    large = m.CarriedRequest("r3", [7], 160, {0: [[*range(40)]], 1: [[*range(40)]]}, 161)
    messages = bench.tell(m.Import(3, alone(0), GROUP, [large]), turns=3)
    assert [type(message) for message in messages] == [m.Returning] * 3


def test_a_lease_grows_by_no_more_than_a_portion(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PORTION", 3)
    bench.bind(blocks=1)
    bench.tell(m.Grow(5, GROUP, {0: [], 1: []}))
    payload = request_payload("large", [1] * 200, 3)
    bench.network.controller.to_engine(0, m.AddRequest(GROUP, "large"), payload)
    bench.clock.advance(1.0)
    assert bench.turn() == [m.NeedBlocks(5, GROUP, 3, urgent=True)]
