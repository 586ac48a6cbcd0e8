"""What the fake engine's next step computes, and how many blocks that takes."""

import msgspec
import pytest

from shoal.policies.values.layouts import DP
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits
from tests.runtime.loopback_node import request_payload

LIMITS = LayoutLimits(DP, block_tokens=4, max_num_seqs=3, max_model_len=40)
SETTINGS = FakeSettings(max_num_batched_tokens=16, steps_at_once=8)


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(LIMITS, SETTINGS, FakeBlocks(range(1, 11)), ManualClock())


def request(name: str, prompt: int, max_tokens: int = 8, priority: int = 0) -> FakeRequest:
    """Return a request that shares no prefix with one of another name."""
    tokens = [ord(name[0])] * prompt
    view = wire.decode_request(request_payload(name, tokens, max_tokens, priority=priority))
    return FakeRequest(view, tokens, max_tokens)


def compute(scheduler: FakeScheduler) -> None:
    """Do what a step does."""
    for one, share in scheduler.schedule()[0]:
        one.computed += share
        if one.computed == one.tokens:
            one.generate()


def shares(scheduler: FakeScheduler) -> dict[str, int]:
    return {one.id: share for one, share in scheduler.schedule()[0]}


def test_the_lowest_blocks_go_first() -> None:
    blocks = FakeBlocks([5, 3, 9])
    assert blocks.take(2) == [3, 5]
    blocks.give([3, 5])
    assert (blocks.take(9), len(blocks)) == ([3, 5, 9], 0)


def test_a_step_computes_decodes_first_and_then_as_much_of_prompts_as_it_may(
    scheduler: FakeScheduler,
) -> None:
    scheduler.add(request("a", 4))
    compute(scheduler)
    scheduler.add(request("b", 20))
    assert shares(scheduler) == {"a": 1, "b": 15}


def test_beside_decodes_it_computes_less_of_prompts_where_the_layout_says_so() -> None:
    limits = msgspec.structs.replace(LIMITS, mixed_tokens=6)
    scheduler = FakeScheduler(limits, SETTINGS, FakeBlocks(range(1, 11)), ManualClock())
    scheduler.add(request("b", 20))
    assert shares(scheduler) == {"b": 16}, "nothing decodes"
    scheduler.remove(["b"])
    scheduler.add(request("a", 4))
    compute(scheduler)
    scheduler.add(request("c", 20))
    for share in (6, 6, 6, 2, 1):
        assert shares(scheduler) == {"a": 1, "c": share}
        compute(scheduler)


def test_the_latest_makes_room_and_is_the_next_to_start(scheduler: FakeScheduler) -> None:
    early, late = request("early", 16, 20), request("late", 16, 20)
    for one in (early, late):
        scheduler.add(one)
        compute(scheduler)
    scheduler.add(request("waits", 1))
    assert scheduler.pool.take(2) == [10]  # they hold the nine others
    while not scheduler.schedule()[1]:
        compute(scheduler)
    assert (scheduler.running, scheduler.waiting[0], late.blocks) == ([early], late, [])


def test_equal_steps_follow_each_other_as_far_as_tokens_and_blocks_reach(
    scheduler: FakeScheduler,
) -> None:
    one = request("a", 4, 7)
    scheduler.add(one)
    batch, _ = scheduler.schedule()
    assert scheduler.run_length(batch) == 1, "a prompt"
    compute(scheduler)
    batch, _ = scheduler.schedule()
    assert (scheduler.run_length(batch), len(one.blocks)) == (6, 3)


def test_a_run_is_halved_until_its_blocks_are_there(scheduler: FakeScheduler) -> None:
    one = request("a", 4, 20)
    scheduler.add(one)
    compute(scheduler)
    batch, _ = scheduler.schedule()
    scheduler.pool.take(len(scheduler.pool))
    assert (scheduler.run_length(batch), len(one.blocks)) == (4, 2)


def test_two_requests_of_one_name_are_refused(scheduler: FakeScheduler) -> None:
    scheduler.add(request("a", 4))
    with pytest.raises(ValueError, match="exists already"):
        scheduler.add(request("a", 4))


def test_requests_of_other_cores_go_on_in_the_order_of_arrival(scheduler: FakeScheduler) -> None:
    """As in the real cores (``CarriedRequests``), whatever the order in which they come."""
    for name, arrival in (("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0)):
        one = request(name, 4)
        one.arrival = arrival
        assert scheduler.adopt(one, [], 0 if name in "ab" else 4)
    assert [one.id for one in scheduler.waiting] == ["c", "d", "a", "b"]


@pytest.mark.parametrize(("patience", "first"), [(0.0, "long"), (2.0, "short")])
def test_prompts_start_in_the_order_of_arrival_and_patience(
    scheduler: FakeScheduler, patience: float, first: str
) -> None:
    scheduler.add(request("a", 16))
    compute(scheduler)
    long, short = request("long", 15), request("short", 4)
    short.arrival = long.arrival + 1.0
    scheduler.add(long, patience)
    scheduler.add(short)
    assert scheduler.waiting[0].id == first


def waits_behind(scheduler: FakeScheduler, *names: str) -> list[FakeRequest]:
    """Queue requests, each of which comes a second after the one before, behind one that runs."""
    scheduler.add(request("runs", 4))
    compute(scheduler)
    queued = [request(name, 4) for name in names]
    for arrival, one in enumerate(queued):
        one.arrival = float(arrival)
        scheduler.add(one)
    return queued


def test_urgent_requests_are_first(scheduler: FakeScheduler) -> None:
    """As in vLLM's scheduler."""
    waits_behind(scheduler, "a")
    urgent = request("urgent", 4, priority=-1)
    urgent.arrival = 5.0
    scheduler.add(urgent)
    assert [one.id for one in scheduler.waiting] == ["urgent", "a"]


def test_requests_that_do_not_leave_after_all_keep_their_place(scheduler: FakeScheduler) -> None:
    waits_behind(scheduler, "a", "b", "c")
    scheduler.park(["a", "b"])
    scheduler.unpark(["a", "b"])
    assert [one.id for one in scheduler.waiting] == ["a", "b", "c"]


def test_a_prompt_that_has_begun_lets_nobody_pass_any_more(scheduler: FakeScheduler) -> None:
    long, short = request("long", 4), request("short", 4)
    scheduler.add(long, patience=2.0)
    compute(scheduler)
    short.arrival = long.arrival + 1.0
    scheduler.add(short)
    scheduler.preempt(long)
    assert [one.id for one in scheduler.waiting] == ["long", "short"]


def test_who_comes_after_a_step_was_scheduled_holds_up_nobody_in_it() -> None:
    clock = ManualClock()
    scheduler = FakeScheduler(LIMITS, SETTINGS, FakeBlocks(range(1, 11)), clock)
    scheduler.add(request("runs", 4))
    compute(scheduler)
    long, short = request("long", 8), request("short", 4)
    scheduler.add(long, patience=2.0)
    clock.advance(1.0)
    short.arrival = 1.0
    scheduler.add(short)
    batch, is_followed_by_another = scheduler.schedule(known_until=0.5)
    assert [one.id for one, _ in batch] == ["runs", "long"]
    assert is_followed_by_another
    assert scheduler.waiting[0] is short
