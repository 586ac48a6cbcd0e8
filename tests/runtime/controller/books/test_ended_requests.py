"""The requests that have ended, whose prompts a switch takes along."""

import pytest
from msgspec import structs

from shoal.policies.values.layouts import alone
from shoal.policies.values.snapshot import NORMAL_PRIORITY, PoolRequest
from shoal.runtime import latest
from shoal.runtime.controller.books.ended_requests import MOST_BYTES, SPARE_BYTES, EndedRequests
from shoal.runtime.controller.books.prefix_book import PrefixBook
from shoal.runtime.controller.books.prompt_hashes import NO_HASHES, prompt_hashes
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol import wire
from tests.runtime.controller.books.test_prefix_book import tokens
from tests.runtime.loopback_node import request_payload

ONE, TWO = alone(0), alone(1)
PLENTY = 10**6


class Node:
    """Two units with caches."""

    def __init__(self) -> None:
        self.room = PLENTY
        self.prefixes = PrefixBook(lambda _unit: self.room)
        self.ended = EndedRequests(self.prefixes)

    def end(self, name: str, prompt: list[int]) -> Request:
        """Let a request end on the first unit."""
        frames = request_payload(name, prompt, 1)
        seen = PoolRequest(name, len(prompt), len(prompt) + 1, NORMAL_PRIORITY, 0.0)
        request = Request(name, 0, frames, seen, prompt_hashes(wire.decode_request(frames)))
        self.prefixes.place(request.prompt, len(prompt), ONE)
        self.ended.put(request, ONE)
        return request

    def chosen(self, most: int = PLENTY) -> list[str]:
        return [request.id for request in self.ended.choose(ONE, most)]


def test_the_latest_come_first_as_many_as_there_is_room_for() -> None:
    node = Node()
    for name in "abcd":
        node.end(name, tokens(name, 1000))
    assert node.ended.choose(TWO, PLENTY) == []
    assert node.chosen() == ["d", "c", "b", "a"]
    assert node.chosen(2500) == ["d", "c"]
    assert node.chosen() == ["d", "c"], "nobody will have the others soon"


def test_the_last_turn_of_a_chat_has_the_others() -> None:
    node, said = Node(), tokens("a", 3000)
    for turn in (1000, 2000, 3000):
        node.end(f"turn {turn}", said[:turn])
    node.end("other", tokens("b", 500))
    assert node.chosen() == ["other", "turn 3000"]


def test_what_prompts_have_in_common_counts_once() -> None:
    node, system = Node(), tokens("system", 2000)
    for name in "abc":
        node.end(name, system + tokens(name, 500))
    assert node.chosen(3600) == ["c", "b", "a"]
    assert node.chosen(3000) == ["c", "b"]


def test_of_the_oldest_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "MOST_TOKENS", 2500)
    node = Node()
    for name in "abcd":
        node.end(name, tokens(name, 1000))
    assert len(node.ended._ends) == 2
    assert node.chosen() == ["d", "c"]


def test_what_a_unit_has_evicted_is_left() -> None:
    node = Node()
    for name in "abc":
        node.end(name, tokens(name, 1000))
    node.room = 2200
    node.prefixes.fit()
    assert node.chosen() == ["c", "b"]


def test_what_was_copied_is_where_it_goes() -> None:
    node = Node()
    request = node.end("a", tokens("a", 1000))
    node.ended.copied(request, TWO)
    assert node.prefixes.has(request.prompt, TWO)
    assert node.ended.choose(TWO, PLENTY) == [request]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": NO_HASHES},
        {"frames": [b"prompt", b"image"]},
        {"frames": [bytes(1000 * (MOST_BYTES + 1) + SPARE_BYTES)]},
    ],
)
def test_what_cannot_be_found_or_is_large_is_not_remembered(change: dict[str, object]) -> None:
    node = Node()
    request = node.end("a", tokens("a", 1000))
    node.ended.choose(ONE, 0)
    node.ended.put(structs.replace(request, **change), ONE)
    assert node.chosen() == []
    node.ended.put(request, ONE)
    assert node.chosen() == ["a"]
