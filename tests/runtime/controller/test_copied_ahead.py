"""Pre-copies through the whole protocol: less is left to read when requests stop, in any direction.

Nothing is computed twice, tokens are the same, and no engine holds anything afterwards.
"""

import msgspec
import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books import prefix_book
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages.views import SwitchView
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.computed_tokens import ComputedTokens
from tests.runtime.loopback_node import LoopbackNode, request_payload
from tests.units import tp

CARRY = m.Treatment.CARRY
ALONE = (alone(0), alone(1), alone(2), alone(3))
PAIRS = (tp(0, 1), tp(2, 3))
ALL = (tp(0, 1, 2, 3),)
STEP = 0.01
PROMPT, OUTPUT, REQUESTS = 50, 60, 8
TOKEN_BYTES = 10
SETTINGS = FakeSettings(
    step_seconds=STEP,
    num_blocks=256,
    block_tokens=4,
    max_num_seqs=8,
    max_model_len=400,
    token_bytes=TOKEN_BYTES,
    peer_bytes_per_second=TOKEN_BYTES * 10_000.0,
)
"""An engine reads all that a request has in half a step."""
WAYS = {
    "dp-tp4": (ALONE, ALL),
    "tp4-dp": (ALL, ALONE),
    "tp2-tp4": (PAIRS, ALL),
    "tp2-dp": (PAIRS, ALONE),
    "dp-tp2": (ALONE, PAIRS),
    "tp4-tp2": (ALL, PAIRS),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def under_way(
    layout: Partition, settings: FakeSettings = SETTINGS, *, earlier: int = 0, **limits: int
) -> LoopbackNode:
    """Return a node of this layout whose requests have some of their tokens.

    Args:
        layout: the layout.
        settings: of the fake engines.
        earlier: requests that have ended, whose prompts are in the prefix caches.
        limits: fields of ``NodeConfig``.
    """
    node = LoopbackNode(4, settings=settings, **{"precopy_tokens": 1} | limits)
    node.settle()
    if layout != ALONE:
        node.switch(*layout)
    for k in range(earlier):
        node.send(f"earlier{k}", 300, 1)
    run(node, earlier)
    assert node.missing == []
    for k in range(REQUESTS):
        node.send(f"r{k}", PROMPT, OUTPUT)
    run(node, 15)
    assert all(0 < len(node.tokens[f"r{k}"]) < OUTPUT for k in range(REQUESTS))
    return node


def run(node: LoopbackNode, steps: float) -> None:
    """Let everybody have turns while some steps take their time."""
    for _ in range(round(4 * steps)):
        node.turns(2)
        node.clock.advance(STEP / 4)
        node.collect()


def switched(node: LoopbackNode, *after: Partition) -> SwitchView:
    """Switch; return the view. Then let all requests end."""
    call = node.set_layout(*after, treatment=CARRY)
    for _ in range(40):
        run(node, 1)
        if node.reply(call) is not None:
            break
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone), reply
    run(node, OUTPUT)
    node.run_for(2.0)
    assert_sound(node)
    return reply.switch


def assert_sound(node: LoopbackNode) -> None:
    assert node.missing == []
    node.assert_exact()
    assert {node.finish[r] for r in node.prompts} == {FinishReason.LENGTH}
    assert node.audit() == []
    assert not node.controller._carries.unsettled


@pytest.mark.slow
@EVERY_WAY
def test_less_is_left_to_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = WAYS[way]
    computed = ComputedTokens(monkeypatch)
    with_it = switched(under_way(before), *after)
    assert computed.requests == REQUESTS
    assert computed.again == {}
    without = switched(under_way(before, precopy_tokens=0), *after)
    assert (with_it.carried, with_it.recomputed) == (without.carried, without.recomputed)
    assert with_it.carried == REQUESTS
    assert without.precopied_bytes == 0
    # What is left is no more than a block of the larger layout, and the steps meanwhile.
    assert with_it.precopied_bytes >= REQUESTS * 48 * TOKEN_BYTES
    assert with_it.carried_bytes * 2 < without.carried_bytes
    assert with_it.carry_seconds < without.carry_seconds
    assert 0 < with_it.precopy_seconds < with_it.duration_seconds


@pytest.mark.parametrize("way", ["tp4-dp", "tp2-dp", "tp2-tp4", "tp4-tp2"])
def test_a_group_that_has_all_blocks_makes_room(way: str) -> None:
    before, after = WAYS[way]
    node = under_way(before, earlier=20)
    lent = [len(backend.own.lent) for backend in node.backends.values()]
    assert lent == [SETTINGS.num_blocks] * 4
    switch = switched(node, *after)
    assert (switch.carried, switch.recomputed) == (REQUESTS, {})
    assert switch.precopied_bytes >= REQUESTS * 48 * TOKEN_BYTES


def cached(node: LoopbackNode, request_id: str) -> int:
    """Return how many tokens of an ended request's prompt a unit has, at most."""
    prompt, output = node.prompts[request_id]
    view = wire.decode_request(request_payload(request_id, prompt, output))
    found = []
    for unit in node.partition:
        size = SETTINGS.kv_geometry.block(unit.layout).tokens
        pool = node.backends[unit.leader].cores[unit]._scheduler.pool
        found.append(size * len(pool.find(FakeRequest(view, prompt, output).prefixes(size))))
    return max(found)


@EVERY_WAY
def test_what_is_cached_of_the_latest_requests_goes_along(way: str) -> None:
    before, after = WAYS[way]
    node, without = (under_way(before, earlier=3, precopy_tokens=n) for n in (1, 0))
    latest = [f"earlier{k}" for k in range(3)]
    assert all(cached(node, one) > 280 for one in latest)
    switched(node, *after)
    assert all(cached(node, one) > 280 for one in latest)
    switched(without, *after)
    if way.startswith("dp"):
        assert [cached(without, one) for one in latest] == [0, 0, 0]


def test_caches_go_along_from_switch_to_switch() -> None:
    """Units have them that never ran the requests, and pass them on."""
    node = under_way(ALONE, earlier=3)
    for partition in (ALL, PAIRS):
        switched(node, *partition)
        node.run_for(2.0)
        assert all(cached(node, f"earlier{k}") > 280 for k in range(3))


def test_caches_in_which_no_prompt_finds_anything_stay_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The switch would wait for their copy, and running requests for the switch."""
    node = under_way(ALONE, earlier=3)
    monkeypatch.setattr(prefix_book, "WATCHED_TOKENS", 1)
    switched(node, *ALL)
    assert [cached(node, f"earlier{k}") for k in range(3)] == [0, 0, 0]
    outcomes = ("copied", "nothing", "stopped")
    counts = [node.value("shoal_precopies_total", outcome=each) for each in outcomes]
    assert counts == [4, 0, 0], "running requests of each engine go ahead as ever"


def test_without_a_prefix_cache_no_switch_copies_ahead() -> None:
    node = under_way(ALONE, msgspec.structs.replace(SETTINGS, prefix_caching=False))
    assert switched(node, *PAIRS).carried == REQUESTS
    outcomes = ("copied", "nothing", "stopped")
    assert [node.value("shoal_precopies_total", outcome=each) for each in outcomes] == [0, 0, 0]


def test_policies_know_whether_switches_copy_ahead() -> None:
    for caches in (True, False):
        node = under_way(ALONE, msgspec.structs.replace(SETTINGS, prefix_caching=caches))
        assert node.controller.snapshot().copies_ahead is caches


def test_requests_get_tokens_while_their_kv_is_copied() -> None:
    slow = msgspec.structs.replace(SETTINGS, copy_seconds=20 * STEP)
    node = under_way(ALONE, slow)
    had = {request_id: len(tokens) for request_id, tokens in node.tokens.items()}
    call = node.set_layout(*ALL, treatment=CARRY)
    run(node, 10)
    node.send("new", 10, 5)
    run(node, 8)
    assert node.partition == ALONE
    assert all(len(node.tokens[request_id]) >= n + 15 for request_id, n in had.items())
    assert node.finish["new"] is FinishReason.LENGTH, "it began and ended meanwhile"
    run(node, 60)
    node.run_for(2.0)
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone)
    assert_sound(node)


@pytest.mark.slow
@EVERY_WAY
def test_again_and_again(way: str) -> None:
    first, second = WAYS[way]
    node = under_way(first)
    for layout in (second, first, second, first):
        node.set_layout(*layout, treatment=CARRY)
        run(node, 8)
    run(node, OUTPUT)
    node.run_for(2.0)
    assert_sound(node)
    assert node.value("shoal_precopies_total", outcome="copied") >= 4


def test_where_blocks_are_short_some_go_ahead_and_the_rest_as_ever() -> None:
    tight = msgspec.structs.replace(SETTINGS, num_blocks=80)
    node = under_way(ALONE, tight)
    call = node.set_layout(*PAIRS, treatment=CARRY)
    for _ in range(20):
        run(node, 10)
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone)
    assert reply.switch.precopied_bytes > 0
    assert reply.switch.carried + sum(reply.switch.recomputed.values()) == REQUESTS
    node.run_for(2.0)
    assert_sound(node)


def test_an_idle_engine_does_not_give_back_what_it_was_lent_ahead() -> None:
    """Its group is not bound; nobody may take the blocks for idle before they are needed."""
    slow = msgspec.structs.replace(SETTINGS, copy_seconds=10 * STEP)
    node = under_way(ALONE, slow)
    node.set_layout(*ALL, treatment=CARRY)
    run(node, 5)
    assert node.partition == ALONE
    lent = [len(backend.own.lent) for backend in node.backends.values()]
    assert min(lent) > 0
    run(node, 3)
    assert [len(backend.own.lent) for backend in node.backends.values()] == lent
    run(node, OUTPUT)
    node.run_for(2.0)
    assert_sound(node)


def test_a_switch_that_fails_leaves_nothing_lent() -> None:
    slow = msgspec.structs.replace(SETTINGS, copy_seconds=10 * STEP)
    node = under_way(ALONE, slow)
    node.set_layout(*PAIRS, treatment=CARRY)
    run(node, 5)
    node.kill(3)
    run(node, OUTPUT)
    node.run_for(40.0, tick=1.0)
    assert node.partition == ALONE
    assert node.audit() == []
    assert all(node.backends[engine].own.lent == frozenset() for engine in range(3))
    assert not node.controller._carries.unsettled
