"""What the controller believes of the units' prefix caches."""

import random
from typing import Any

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books import prefix_book
from shoal.runtime.controller.books.prefix_book import PrefixBook, UnitPrefixes
from shoal.runtime.controller.books.prompt_hashes import (
    ENDS,
    LEAST_BYTES,
    NO_HASHES,
    RESOLUTION,
    PromptHashes,
    prompt_hashes,
)
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.wire import RequestView
from tests.runtime.loopback_node import request_payload

ONE, TWO = alone(0), alone(1)


def tokens(seed: str, count: int, *, most: int = 120_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(most) for _ in range(count)]


def hashes(
    prompt: list[int],
    *,
    salt: str | None = None,
    lora: Any = None,
    images: dict[int, str] | None = None,
) -> PromptHashes:
    """Return the hashes of a prompt; ``images`` are those that begin at a token, by its place."""
    (frame,) = request_payload("r", prompt, 1)
    fields = msgspec.msgpack.decode(frame)
    features = [
        {"data": None, "modality": "image", "identifier": name, "mm_position": {"offset": place}}
        for place, name in (images or {}).items()
    ]
    for name, value in (
        ("cache_salt", salt),
        ("lora_request", lora),
        ("mm_features", features or None),
    ):
        fields[RequestView.__struct_fields__.index(name)] = value
    return prompt_hashes(wire.decode_request([msgspec.msgpack.encode(fields)]))


def found(unit: UnitPrefixes, prompt: PromptHashes) -> int:
    return prompt.tokens(unit.find(prompt))


def cached(known: list[int], asked: list[int]) -> int:
    unit = UnitPrefixes()
    unit.put(hashes(known))
    return found(unit, hashes(asked))


@pytest.mark.parametrize("length", [300, 3000, 30_000])
@pytest.mark.parametrize("most", [100, 30_000, 120_000])
def test_a_common_beginning_is_found_and_nothing_more(length: int, most: int) -> None:
    beginning = tokens("common", length, most=most)
    known, asked = ([*beginning, *tokens(end, 2000, most=most)] for end in "ab")
    share, token_bytes = cached(known, asked), hashes(asked).token_bytes
    # Some tokens are longer than others, so that the number of tokens is an estimate.
    assert share <= 1.02 * length
    assert share >= 0.98 * length * (1 - 1 / RESOLUTION) - LEAST_BYTES / token_bytes


@pytest.mark.parametrize("rest", [600, 3000])
def test_what_prompts_have_in_common_is_as_often_more_than_expected_as_less(rest: int) -> None:
    """Whole stretches alone would be too little in every case."""
    rng = random.Random(3)
    expected, whole, common = 0.0, 0.0, 0.0
    for number in range(60):
        length = rng.randrange(2000, 12_000)
        beginning = tokens(f"{number}", length)
        known, asked = (hashes([*beginning, *tokens(f"{number}{end}", rest)]) for end in "ab")
        unit = UnitPrefixes()
        unit.put(known)
        stretches = unit.find(asked)
        expected += asked.common_tokens(stretches)
        whole += asked.tokens(stretches)
        common += length
    assert expected == pytest.approx(common, rel=0.01)
    assert whole < 0.975 * common
    assert NO_HASHES.common_tokens(0) == 0


def test_nothing_is_found_of_what_differs_in_its_first_token() -> None:
    prompt = tokens("a", 3000)
    assert cached(prompt, [prompt[0] + 1, *prompt[1:]]) == 0
    assert cached(prompt, prompt) > 2500


def test_the_lengths_of_prompts_do_not_decide_about_what_they_have_in_common() -> None:
    """The head of an array has another length from 16 elements on, and from 65,536."""
    prompt = tokens("a", 70_000)
    assert cached(prompt, prompt[:60_000]) > 55_000
    assert cached(prompt[:60_000], prompt) > 55_000


@pytest.mark.parametrize("other", [{"salt": "b"}, {"salt": None}, {"lora": ["l", 1, "p"]}])
def test_what_else_is_in_vllms_hashes_keeps_requests_apart(other: dict[str, Any]) -> None:
    prompt, unit = tokens("a", 1000), UnitPrefixes()
    unit.put(hashes(prompt, salt="a"))
    assert found(unit, hashes(prompt, salt="a")) > 800
    assert unit.find(hashes(prompt, **other)) == 0


@pytest.mark.parametrize("most", [100, 120_000])
def test_an_image_keeps_apart_what_follows_and_nothing_before_it(most: int) -> None:
    """The tokens in its place are the same for all images."""
    place = 4000
    prompt = [*tokens("a", place, most=most), *[7] * 500, *tokens("b", 2000, most=most)]
    unit = UnitPrefixes()
    unit.put(hashes(prompt, images={place: "x"}))
    assert found(unit, hashes(prompt, images={place: "x"})) > 6000
    for others in ({}, {place: "y"}, {place: "x", 200: "y"}):
        assert found(unit, hashes(prompt, images=others)) <= place
    # A token has up to five bytes here, and none is known to have more than one.
    least = place / hashes(prompt).token_bytes * (1 - 1 / RESOLUTION)
    assert found(unit, hashes(prompt, images={place: "y"})) >= least - LEAST_BYTES
    later = {place: "x", 6400: "y"}
    assert found(unit, hashes([*prompt, *tokens("c", 500)], images=later)) > least


def test_a_long_prompt_has_few_hashes() -> None:
    assert len(hashes(tokens("a", 1_000_000)).hashes) < 130
    assert list(ENDS) == sorted(set(ENDS))


def test_one_without_tokens_has_no_hashes() -> None:
    assert hashes([]).hashes == hashes([5]).hashes == ()


# --- units ----------------------------------------------------------------------------------------


def test_the_least_lately_used_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    old, new = hashes(tokens("old", 1000)), hashes(tokens("new", 1000))
    unit = UnitPrefixes()
    for prompt in (old, new):
        unit.put(prompt)
    both, whole = unit.tokens, found(unit, old)
    unit.fit(both - 1)
    assert 0 < found(unit, old) < whole
    assert found(unit, new) > 800
    unit.put(old)
    unit.fit(both // 2 + 10)
    assert (found(unit, old), found(unit, new)) == (whole, 0)


class Node:
    """A book of two units whose capacity a test sets."""

    def __init__(self) -> None:
        self.room = {ONE: 5000, TWO: 5000}
        self.book = PrefixBook(lambda unit: self.room.get(unit, 0))

    def place(self, prompt: PromptHashes, unit: Unit, length: int = 1000) -> int:
        return self.book.place(prompt, length, unit)


def test_it_is_known_where_a_prompt_was_sent() -> None:
    node, prompt = Node(), hashes(tokens("a", 1000))
    assert node.book.where(prompt, (ONE, TWO)) == {}
    assert node.place(prompt, TWO) == 0
    assert node.book.where(prompt, (ONE, TWO)) == {TWO: len(prompt.hashes)}
    assert node.book.where(prompt, (ONE,)) == {}
    whole = node.place(prompt, TWO)
    assert 1000 >= whole >= node.book.tokens(TWO) > 800
    assert node.book.hits.hit_share == pytest.approx(whole / 2000, rel=0.01)


def test_what_is_used_again_at_once_is_lost_only_once() -> None:
    """Half of the tokens are found, and what is lost with the caches depends on how soon."""

    def lost(order: str) -> float:
        node = Node()
        for name in order:
            node.place(hashes(tokens(name, 1000)), ONE)
        assert node.book.hits.hit_share == pytest.approx(0.475, abs=0.03)
        return node.book.hits.lost_tokens

    soon, late = lost("aabbccdd"), lost("abcdabcd")
    # What is found was used one prompt ago, or four.
    assert soon == pytest.approx(450, rel=0.1)
    assert late == pytest.approx(4 * soon, rel=0.02)
    assert Node().book.hits.lost_tokens == 0.0


def test_what_is_used_again_late_is_told_apart() -> None:
    """A twentieth of the latest prompts was last used a third of all tokens ago, or more."""

    def late(order: str) -> float:
        node = Node()
        for name in order:
            node.place(hashes(tokens(name, 1000)), ONE)
        hits = node.book.hits
        assert hits.watched_tokens == 1000 * len(order)
        return hits.late_share

    assert late("aaaaaaaaaaaaaaaaaaaa") < 0.05, "all is used again at once"
    assert late("abcdefghijabcdefghij") == pytest.approx(0.0, abs=0.01), "half of the time ago"
    assert late("abcdefghijklmnojklmno") > 0.2


def test_caches_are_of_no_use_once_enough_prompts_have_found_nothing() -> None:
    node = Node()
    enough = prefix_book.WATCHED_TOKENS // 1000
    for number in range(enough):
        assert node.book.hits.are_used, "chats may have had their first turns only"
        node.place(hashes([number, *tokens("a", 999)]), ONE)
    assert not node.book.hits.are_used
    for number in range(enough - 10, enough):
        node.place(hashes([number, *tokens("a", 999)]), ONE)
    assert node.book.hits.are_used, "one in thirty was found"


def test_what_was_used_until_now_is_young() -> None:
    node, prompt = Node(), hashes(tokens("a", 1000))
    node.place(prompt, ONE)
    for other in "bc":
        node.place(hashes(tokens(other, 1000)), ONE)
    node.book.use(prompt, ONE)
    node.place(prompt, ONE)
    assert node.book.hits.lost_tokens == 0.0


def test_one_that_reads_no_cache_finds_nothing_and_leaves_something() -> None:
    node, prompt = Node(), hashes(tokens("a", 1000))
    refuses = msgspec.structs.replace(prompt, reads_cache=False)
    assert [node.place(refuses, ONE) for _ in range(2)] == [0, 0]
    assert node.place(prompt, ONE) > 800


def test_what_does_not_fit_into_the_blocks_that_are_left_is_forgotten() -> None:
    node = Node()
    for name in "abc":
        node.place(hashes(tokens(name, 1000)), ONE)
    node.book.fit()
    assert node.book.tokens(ONE) > 2500
    node.room[ONE] = 1200
    node.book.fit()
    assert 800 < node.book.tokens(ONE) <= 1200
    assert node.place(hashes(tokens("c", 1000)), ONE) > 800
    del node.room[ONE]
    node.book.fit()
    assert node.book.tokens(ONE) == 0


def test_a_reset_forgets_all() -> None:
    node, prompt = Node(), hashes(tokens("a", 1000))
    node.place(prompt, ONE)
    node.book.clear()
    assert node.place(prompt, ONE) == 0
