"""When running requests go to a unit that has less to do or more room, and how many."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.rebalance import MOST_AT_ONCE, Rebalance, rebalance
from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.snapshot import PoolRequest, Snapshot, UnitState
from tests.policies.snapshots import MODEL, request, snapshot, unit
from tests.units import tp

BLOCKS, BLOCK_TOKENS = 10_000, 16


def busy(of: Unit, running: int, tokens: int = 2000, waiting: int = 0, **figures: Any) -> UnitState:
    """Return a unit whose requests have prompts of 1,000 tokens, and so many tokens in all."""
    free = BLOCKS - running * tokens // BLOCK_TOKENS
    return unit(
        of,
        requests=running + waiting,
        slots=256 - running,
        total_blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        max_model_len=100_000,
        **{
            "blocks": free,
            "running": running,
            "waiting": waiting,
            "context_tokens": 1000 * (running + waiting),
            "prefill_tokens": 1000 * waiting,
        }
        | figures,
    )


def node(*units: UnitState, **figures: Any) -> Snapshot:
    return replace(snapshot(*units), cost_model=MODEL, output_tokens=100.0, **figures)


UNEVEN = busy(alone(0), 40), busy(alone(1), 2)


def test_requests_go_from_the_busiest_unit_to_the_idlest() -> None:
    units = busy(alone(0), 10), busy(alone(1), 40), busy(alone(2), 2), busy(alone(3), 9)
    assert rebalance(node(*units)) == Rebalance(alone(1), alone(2), MOST_AT_ONCE)


def test_groups_exchange_requests_too_but_only_with_groups_of_their_layout() -> None:
    units = busy(tp(0, 1), 2), busy(tp(2, 3), 60, 4000)
    assert rebalance(node(*units)) == Rebalance(tp(2, 3), tp(0, 1), MOST_AT_ONCE)
    assert rebalance(node(busy(tp(0, 1), 60), busy(alone(2), 1), busy(alone(3), 1))) is None


@pytest.mark.parametrize("running", [0, 1, 20])
def test_even_units_keep_what_they_have(running: int) -> None:
    assert rebalance(node(busy(alone(0), running), busy(alone(1), running))) is None
    assert rebalance(node(busy(alone(0), running + 1), busy(alone(1), running))) is None


def test_little_is_not_worth_a_move() -> None:
    """Weights decide the time of a step, so the requests would not be faster elsewhere."""
    assert rebalance(node(busy(alone(0), 4, 50), busy(alone(1), 0))) is None


def test_a_move_that_costs_more_than_it_gains_is_not_made() -> None:
    slow = replace(MODEL, hardware=replace(MODEL.hardware, peer_bytes_per_second=1e7))
    assert rebalance(node(*UNEVEN)) is not None
    assert rebalance(replace(node(*UNEVEN), cost_model=slow)) is None


def test_requests_that_are_nearly_done_stay() -> None:
    """They have had few tokens, and others have had few in all."""
    uneven = busy(alone(0), 40, context_tokens=80_000), busy(alone(1), 2, context_tokens=4_000)
    assert rebalance(replace(node(*uneven), output_tokens=1000.0)) is not None
    assert rebalance(replace(node(*uneven), output_tokens=0.01)) is None


def test_requests_that_wait_for_blocks_go_even_if_few_run() -> None:
    few = busy(alone(0), 3, 2000), busy(alone(1), 0)
    assert rebalance(node(*few)) is None
    waiting = busy(alone(0), 3, 2000, waiting=3, blocks=0), busy(alone(1), 0)
    found = rebalance(replace(node(*waiting), output_tokens=1000.0))
    assert found is not None
    assert found.requests == 2


LARGE = request(prompt=64_000)
"""It takes one block more than the roomier one of ``SPLIT`` has free."""
SPLIT = busy(alone(0), 30, 4000), busy(alone(1), 24, 4000)


def waiting(*units: UnitState, first: PoolRequest = LARGE, **figures: Any) -> Snapshot:
    return replace(node(*units), waiting=1, pool=(first,), **figures)


def test_requests_make_room_for_the_first_of_the_pool() -> None:
    assert rebalance(waiting(*SPLIT)) == Rebalance(alone(1), alone(0), 1)
    more = request(prompt=64_000 + 4000)  # a request has 250 blocks
    assert rebalance(waiting(*SPLIT, first=more)) == Rebalance(alone(1), alone(0), 2)


@pytest.mark.parametrize(
    "changed",
    [
        waiting(*SPLIT, first=request(prompt=63_999)),
        waiting(*SPLIT, first=request(prompt=99_000, total=100_001)),
        waiting(*SPLIT, first=request(prompt=64_000 + MOST_AT_ONCE * 4000)),
        waiting(replace(SPLIT[0], free_blocks=BLOCKS // 8), SPLIT[1]),
        waiting(replace(SPLIT[0], free_slots=0), SPLIT[1]),
        waiting(replace(SPLIT[0], waiting=1), SPLIT[1]),
        waiting(SPLIT[0], replace(SPLIT[1], free_slots=0), first=request(prompt=96_000)),
        waiting(SPLIT[0], replace(SPLIT[1], serving=False)),
        waiting(
            *(replace(each, context_tokens=4000 * each.running) for each in SPLIT),
            output_tokens=1.0,
        ),
        replace(waiting(*SPLIT), cost_model=None),
        replace(waiting(*SPLIT), pool=()),
    ],
    ids=[
        *("it fits", "no unit ever holds it", "too many would go", "the other has no blocks"),
        *("nor a seat", "the other waits itself", "no seat for it", "there is no other"),
        *("some end soon", "no cost model", "it is not known"),
    ],
)
def test_nothing_makes_room_where(changed: Snapshot) -> None:
    assert rebalance(changed) is None


@pytest.mark.parametrize(
    "changed",
    [
        replace(node(*UNEVEN), waiting=1, pool=(request(),)),
        replace(node(*UNEVEN), cost_model=None),
        node(UNEVEN[0], replace(UNEVEN[1], serving=False)),
        node(replace(UNEVEN[0], serving=False), UNEVEN[1]),
        node(UNEVEN[0], replace(UNEVEN[1], free_slots=0)),
        node(UNEVEN[0], replace(UNEVEN[1], free_blocks=BLOCKS // 8)),
        node(UNEVEN[0], replace(UNEVEN[1], waiting=1)),
    ],
    ids=[
        *("requests wait in the pool", "no cost model", "the idle unit does not serve"),
        *("nor does the busy one", "no seat", "no blocks", "the idle one waits itself"),
    ],
)
def test_nothing_goes_where(changed: Snapshot) -> None:
    assert rebalance(changed) is None


@given(
    running=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    tokens=st.tuples(st.integers(1000, 1500), st.integers(1000, 1500)),
    output=st.floats(1, 10_000),
)
def test_nothing_goes_back(
    running: tuple[int, int], tokens: tuple[int, int], output: float
) -> None:
    units = [
        busy(alone(k), many, each, blocks=BLOCKS // 2)
        for k, (many, each) in enumerate(zip(running, tokens, strict=True))
    ]
    before = replace(node(*units), output_tokens=output)
    found = rebalance(before)
    if found is None:
        return
    change = {found.source: -found.requests, found.destination: found.requests}
    after = [
        busy(each.unit, each.running + change[each.unit], 1000, blocks=BLOCKS // 2)
        for each in units
    ]
    again = rebalance(replace(node(*after), output_tokens=output))
    assert again is None or again.source == found.source
