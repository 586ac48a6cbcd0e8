"""The book of requests: each is in one place, and is found there."""

from typing import Any

import msgspec
import pytest

from shoal.policies.values.layouts import alone, tensor_parallel
from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.prefix_book import PrefixBook
from shoal.runtime.controller.books.prompt_hashes import PromptHashes
from shoal.runtime.controller.books.request import Request, pool_request
from shoal.runtime.controller.books.request_book import RequestBook
from shoal.runtime.controller.books.unit_book import UnitBook
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from tests.runtime.loopback_node import request_payload

PAIR = tensor_parallel((0, 1))
FIRST, SECOND = alone(0), alone(1)


def request(name: str, **fields: Any) -> Request:
    return Request(name, 0, [], PoolRequest(name, 8, 16, 0, arrival=0.0), **fields)


@pytest.fixture
def units() -> UnitBook:
    return UnitBook(2)


@pytest.fixture
def book(units: UnitBook) -> RequestBook:
    return RequestBook(units, TaskPool(), PrefixBook(lambda _: 1000))


def test_a_request_is_known_wherever_it_is(book: RequestBook) -> None:
    book.pool.add(request("waits"))
    book.place(request("runs"), FIRST)
    book.interrupt(request("interrupted"))
    assert all(name in book for name in ("waits", "runs", "interrupted"))
    assert "gone" not in book
    assert (book.where("runs"), book.where("waits")) == (FIRST, None)


def test_what_an_engine_writes_of_a_request_that_is_elsewhere_by_now_changes_nothing(
    book: RequestBook,
) -> None:
    book.place(request("r"), SECOND)
    assert book.remove("r", led_by=0) is None
    assert book.remove("r", led_by=1) is not None
    assert book.remove("r") is None


def test_a_report_ends_requests_of_its_core(book: RequestBook) -> None:
    for name in ("a", "b"):
        book.place(request(name), PAIR)
    book.place(request("c"), SECOND)
    load = m.Load(0, PAIR, 1, 0, 50, 2, ["a", "c"], {})
    assert [ended.id for ended in book.report(load)] == ["a"]
    assert book.core(PAIR).load is load
    assert list(book.core(PAIR).requests) == ["b"]


def test_all_requests_of_a_core_go_at_once(book: RequestBook) -> None:
    for name in ("a", "b"):
        book.place(request(name), FIRST)
    assert [removed.id for removed in book.remove_all(FIRST)] == ["a", "b"]
    assert book.find("a") is None
    assert book.core(FIRST).figures.prompt_tokens == 0


def test_requests_of_units_that_are_not_there_are_paused(
    book: RequestBook, units: UnitBook
) -> None:
    book.place(request("single"), SECOND)
    book.place(request("group"), PAIR)
    assert book.paused == {FIRST: 1}, "that of the group, by its leader's unit"
    units.bind(PAIR, 1)
    assert book.paused == {PAIR: 1}


def test_a_unit_gets_its_second_suspect_when_the_first_is_absolved(book: RequestBook) -> None:
    suspects = [request(name, suspect=True) for name in ("a", "b")]
    assert book.may_start(suspects[0], FIRST)
    book.place(suspects[0], FIRST)
    assert not book.may_start(suspects[1], FIRST)
    assert book.may_start(suspects[1], SECOND)
    assert book.may_start(request("c"), FIRST)
    book.absolve("a")
    assert book.may_start(suspects[1], FIRST)


def test_a_request_that_was_given_back_meanwhile_is_absolved(book: RequestBook) -> None:
    book.pool.add(request("first"))
    book.pool.add(request("a", suspect=True), deadline=5.0)
    book.absolve("a")
    waiting = book.pool.get("a")
    assert waiting is not None
    assert not waiting.suspect
    assert [each.id for each in book.pool.all()] == ["first", "a"]
    assert book.pool.next_deadline == 5.0
    assert book.check_integrity() == []


def test_a_request_whose_output_is_known_after_its_unit_died_is_suspect_and_not_guilty(
    book: RequestBook,
) -> None:
    book.interrupt(request("a", suspect=True, guilty=True))
    book.absolve("a")
    assert (book.interrupted["a"].suspect, book.interrupted["a"].guilty) == (True, False)
    assert book.check_integrity() == []


def test_a_carried_request_is_at_its_destination_alone(book: RequestBook) -> None:
    book.place(request("a"), FIRST)
    book.carry(request("a"), PAIR)
    assert book.where("a") == PAIR
    assert not book.core(FIRST).requests
    assert [each.id for each in book.core(PAIR).uncounted.requests] == ["a"], "no report has it yet"
    assert book.check_integrity() == []


def test_only_what_begins_here_counts_as_begun(book: RequestBook) -> None:
    core = book.core(FIRST)
    book.place(request("new"), FIRST)
    book.place(request("old"), SECOND)
    book.carry(request("old"), FIRST)
    begun = []
    for added, waiting in ((1, 1), (2, 2), (2, 1), (2, 0)):
        load = m.Load(0, FIRST, 0, waiting, 9, added, [])
        begun.append(core.begun_since(load))
        core.report(load)
    assert begun == [0, 0, 0, 1]


def test_interrupted_requests_are_taken_once(book: RequestBook) -> None:
    for name in ("a", "b", "c"):
        book.interrupt(request(name))
    taken = book.take_interrupted("b")
    assert taken is not None
    assert taken.id == "b"
    assert book.take_interrupted("b") is None
    assert [left.id for left in book.take_all_interrupted()] == ["a", "c"]
    assert book.interrupted == {}


def test_an_engine_that_is_started_again_has_no_cores(book: RequestBook) -> None:
    for unit in (FIRST, SECOND, PAIR):
        book.core(unit)
    book.forget_cores(0)
    assert list(book.cores) == [SECOND]


def test_a_request_in_two_places_is_noticed(book: RequestBook) -> None:
    book.place(request("r"), FIRST)
    assert book.check_integrity() == []
    book.interrupt(request("r"))
    assert len(book.check_integrity()) == 1
    book.take_interrupted("r")
    book.core(SECOND).put(request("s"))
    assert len(book.check_integrity()) == 1


def test_units_that_get_or_end_a_request_have_its_prompt(units: UnitBook) -> None:
    prefixes = PrefixBook(lambda _: 1000)
    book, prompt = RequestBook(units, TaskPool(), prefixes), PromptHashes((1, 2))
    assert book.place(request("r", prompt=prompt), FIRST) == 0
    book.carry(request("r", prompt=prompt), PAIR)
    assert prefixes.where(prompt, (FIRST, PAIR, SECOND)) == {FIRST: 2, PAIR: 2}
    prefixes.clear()
    book.report(m.Load(0, PAIR, 0, 0, 50, 1, ["r"], {}))
    assert prefixes.where(prompt, (FIRST, PAIR)) == {PAIR: 2}


@pytest.mark.parametrize(
    ("max_tokens", "total", "limit"),
    [(1, 11, 1), (20, 30, 20), (90, 11, None), (None, 11, None)],
    ids=["one", "some", "up to the model's length", "not given"],
)
def test_policies_see_a_bound_on_output_that_the_client_gave(
    max_tokens: int | None, total: int, limit: int | None
) -> None:
    payload = request_payload("r", range(10), max_tokens)[0]
    view = msgspec.msgpack.decode(payload, type=wire.RequestView)
    seen = pool_request(view, longest=100, now=0.0)
    assert (seen.total_tokens, seen.output_limit) == (total, limit)
