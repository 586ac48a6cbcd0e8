"""Which unit each request of a group goes to when the group becomes two pairs."""

import pytest

from shoal.runtime.controller.switching.destinations import Destinations
from tests.runtime.controller.scripted_node import ScriptedNode
from tests.units import tp

ALL, PAIR, OTHER_PAIR = tp(0, 1, 2, 3), tp(0, 1), tp(2, 3)
PROMPTS = {"long": 300, "a": 5, "b": 5, "c": 5, "d": 5, "longer": 320}


def divided(*, begun: bool) -> list[set[str]]:
    """Return the requests by pair; all prompts wait, or all requests have begun."""
    node = ScriptedNode(4, blocks=512)
    node.view(node.switch(ALL))
    node.load(ALL, 512)
    for name, tokens in PROMPTS.items():
        node.clock.advance(0.1)
        node.send(name, tokens)
    core = node.books.requests.core(ALL)
    assert list(core.requests) == list(PROMPTS)
    if begun:
        node.load(ALL, 512)
    capacity = node.controller._capacity
    found = Destinations(node.books, capacity, (PAIR, OTHER_PAIR)).divide(
        ALL, core.requests.values()
    )
    assert found.keys() == {PAIR, OTHER_PAIR}
    return [{request.id for request in found[unit]} for unit in (PAIR, OTHER_PAIR)]


def test_short_prompts_that_wait_need_not_wait_for_all_long_ones() -> None:
    assert divided(begun=False) == [{"long", "longer"}, {"a", "b", "c", "d"}]


def test_requests_that_have_begun_are_divided_evenly() -> None:
    tokens = [sum(PROMPTS[name] for name in names) for names in divided(begun=True)]
    assert tokens == [pytest.approx(320, abs=15)] * 2
