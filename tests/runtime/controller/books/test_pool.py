"""The task pool by itself: order, aging, deadlines, counts."""

import random

import pytest

from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol.wire import Terms

AGING = 10.0


def request(
    name: str,
    arrival: float = 0.0,
    priority: int = 0,
    *,
    tokens: int = 5,
    caller: str | None = None,
) -> Request:
    seen = PoolRequest(name, tokens, tokens + 1, priority, arrival)
    return Request(name, 0, [], seen, terms=Terms(caller=caller))


def order(pool: TaskPool) -> list[str]:
    return [r.id for r in pool.all()]


def test_priority_then_arrival_among_those_that_came_together() -> None:
    pool = TaskPool(AGING)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -3)]:
        pool.add(request(name, 0.0, priority))
    assert order(pool) == ["d", "b", "a", "c"]
    assert [seen.request_id for seen in pool.head(2)] == ["d", "b"]


@pytest.mark.parametrize(
    ("later", "first"), [(AGING - 0.001, "urgent"), (AGING, "waiting"), (AGING + 1, "waiting")]
)
def test_one_class_is_worth_one_aging_time(later: float, first: str) -> None:
    pool = TaskPool(AGING)
    pool.add(request("waiting", 100.0, 0))
    pool.add(request("urgent", 100.0 + later, -1))
    assert order(pool)[0] == first


def test_nothing_starves_under_a_flood_of_urgent_requests() -> None:
    """A request is served after at most the difference in priority times the aging time."""
    pool, now, least_urgent = TaskPool(AGING), 0.0, request("patient", 0.0, 5)
    pool.add(least_urgent)
    served = ""
    while served != "patient":
        # One is served a second, and a more urgent one arrives for it: without aging, for ever.
        now += 1.0
        pool.add(request(f"urgent-{now}", now, -5))
        served = order(pool)[0]
        pool.remove(served)
        assert now <= (5 - -5) * AGING + 1
    assert now >= (5 - -5) * AGING - 1


def test_a_request_that_comes_back_gets_its_old_place() -> None:
    pool = TaskPool(AGING)
    for k in range(4):
        pool.add(request(f"r{k}", float(k)))
    back = pool.remove("r1")
    assert back is not None
    pool.add(back)
    assert order(pool) == ["r0", "r1", "r2", "r3"]


def test_counts_follow_what_comes_and_goes() -> None:
    pool = TaskPool(AGING)
    pool.add(request("a", tokens=7, caller="x"))
    pool.add(request("b", tokens=4))
    pool.add(request("c", tokens=2, caller="x"))
    assert (len(pool), pool.tokens, pool.waiting_of("x")) == (3, 13, 2)
    pool.remove("a")
    assert pool.remove("a") is None
    assert (len(pool), pool.tokens, pool.waiting_of("x")) == (2, 6, 1)
    assert pool.waiting_of("nobody") == 0


def test_deadlines_expire_in_order_and_only_while_a_request_waits() -> None:
    pool = TaskPool(AGING)
    for name, deadline in [("late", 9.0), ("soon", 3.0), ("gone", 1.0), ("never", None)]:
        pool.add(request(name), deadline=deadline)
    pool.remove("gone")
    assert pool.next_deadline == 3.0
    assert pool.take_expired(2.999) == []
    assert [r.id for r in pool.take_expired(3.0)] == ["soon"]
    assert [r.id for r in pool.take_expired(100.0)] == ["late"]
    assert (order(pool), pool.next_deadline) == (["never"], None)


def test_deadlines_of_requests_that_have_left_do_not_pile_up_behind_one_that_waits() -> None:
    pool = TaskPool(AGING)
    pool.add(request("waits"), deadline=5.0)
    for number in range(1000):
        pool.add(request(f"left-{number}"), deadline=10.0**9)
        pool.remove(f"left-{number}")
    assert len(pool._due) < 100
    pool.add(request("soon"), deadline=3.0)
    assert [r.id for r in pool.take_expired(6.0)] == ["soon", "waits"]


def test_a_request_that_comes_back_has_no_deadline_any_more() -> None:
    pool = TaskPool(AGING)
    pool.add(request("a"), deadline=3.0)
    started = pool.remove("a")
    assert started is not None
    pool.add(started)
    assert pool.next_deadline is None
    assert pool.take_expired(100.0) == []


def test_random_use_agrees_with_a_plain_list() -> None:
    rng, pool = random.Random(3), TaskPool(AGING)
    plain: dict[str, Request] = {}
    for k in range(2000):
        if plain and rng.random() < 0.5:
            name = rng.choice(list(plain))
            assert pool.remove(name) == plain.pop(name)
        else:
            made = request(f"r{k}", float(k), rng.randint(-3, 3), tokens=rng.randint(1, 9))
            plain[made.id] = made
            pool.add(made)
    wanted = sorted(plain.values(), key=lambda r: r.seen.priority * AGING + r.seen.arrival)
    assert order(pool) == [r.id for r in wanted]
    assert pool.tokens == sum(r.seen.prompt_tokens for r in wanted)
