"""The book of units: binds and releases move the partition, and it covers every engine once."""

from shoal.policies.values.layouts import alone, tensor_parallel
from shoal.policies.values.partition import singles
from shoal.runtime.controller.books.unit_book import UnitBook

PAIR = tensor_parallel((0, 1))
LAST = tensor_parallel((2, 3))


def test_a_bind_makes_one_unit_of_engines_and_a_release_takes_it_apart() -> None:
    book = UnitBook(4)
    book.bind(LAST, 7)
    assert book.partition == (alone(0), alone(1), LAST)
    assert book.bound == {LAST: 7}
    assert book.unit_of(3) == LAST
    book.release(LAST)
    assert book.partition == singles(4)
    assert book.bound == {}


def test_epochs_rise() -> None:
    book = UnitBook(1)
    assert [book.next_epoch() for _ in range(3)] == [1, 2, 3]


def test_a_partition_that_is_none_is_noticed() -> None:
    book = UnitBook(2)
    assert book.check_integrity(2) == []
    assert len(book.check_integrity(3)) == 1, "engine 2 is in no unit"
    book.release(PAIR)
    assert len(book.check_integrity(2)) == 1, "engines are in two"


def test_a_bind_of_no_unit_is_noticed() -> None:
    book = UnitBook(2)
    book.bind(PAIR, 1)
    book.bind(alone(0), 2)
    problems = book.check_integrity(2)
    assert any("bound groups" in problem for problem in problems)
