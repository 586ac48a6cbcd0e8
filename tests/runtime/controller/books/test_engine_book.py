"""The book of engines: states follow what happens, and nobody else writes in it."""

import msgspec
import pytest

from shoal.policies.values.layouts import DP, alone, tensor_parallel
from shoal.policies.values.level import Level
from shoal.runtime.controller.books.engine_book import EngineBook, EngineState
from shoal.runtime.protocol import messages as m

PAIR = tensor_parallel((0, 1))
LIMITS = [m.LayoutLimits(DP, 4, 8, 400), m.LayoutLimits(PAIR.layout, 4, 16, 800)]


def ready(engine: int, num_blocks: int = 64) -> m.EngineReady:
    return m.EngineReady(engine, num_blocks, LIMITS, b"")


@pytest.fixture
def book() -> EngineBook:
    book = EngineBook(2, returns=True)
    for engine in PAIR.engines:
        book.serve(ready(engine))
    return book


def test_a_node_has_started_when_every_engine_has_been_ready() -> None:
    book = EngineBook(2)
    book.serve(ready(0))
    assert not book.started
    book.serve(ready(1))
    assert book.started
    book.die([1], "killed")
    assert book.started, "it is not forgotten"


def test_a_silent_engine_serves_again_when_it_is_heard(book: EngineBook) -> None:
    book.silence([1], "no answer")
    assert (book[1].state, book[1].reason) == (EngineState.SILENT, "no answer")
    assert not book.serves(PAIR)
    assert book.hear(1)
    assert (book[1].state, book[1].reason) == (EngineState.SERVING, None)
    assert not book.hear(1), "it was not silent"


def test_only_who_serves_falls_silent(book: EngineBook) -> None:
    book.die([1], "killed")
    book.silence([1], "no answer")
    assert (book[1].state, book[1].reason) == (EngineState.DEAD, "killed")


def test_a_dead_engine_is_gone_until_it_serves_again(book: EngineBook) -> None:
    book.die([1], "killed")
    assert (book.gone, book.lost) == ({1}, set())
    book.restart(1, 1)
    assert book.gone == {1}
    book.serve(ready(1))
    assert book.gone == set()


def test_one_that_does_not_return_is_lost(book: EngineBook) -> None:
    book.die([1], "killed")
    book.expect(1, returns=False)
    assert book.lost == {1}
    assert book.in_state(EngineState.DEAD, EngineState.SERVING) == {0, 1}


def test_a_group_is_formed_of_its_engines_as_they_are(book: EngineBook) -> None:
    assert book.unformed([PAIR]) == []
    book.restart(1, 1)
    assert book.unformed([PAIR, alone(0), alone(1)]) == [PAIR]
    book.form(PAIR, book.incarnations(PAIR))
    assert book.unformed([PAIR]) == []
    book.restart(1, 2)
    assert not book.is_formed(PAIR)


def test_a_refusal_holds_until_the_members_try_again(book: EngineBook) -> None:
    book.refuse(PAIR, "they do not meet")
    assert book.refused == {PAIR: "they do not meet"}
    book.retry(PAIR)
    assert book.refused == {}


def test_limits_are_the_leaders_and_unknown_before_it_is_ready(book: EngineBook) -> None:
    assert book.limits(PAIR) == book.limits_of(PAIR.layout) == LIMITS[1]
    assert EngineBook(2).num_blocks(0) == 0
    with pytest.raises(LookupError):
        EngineBook(2).limits(PAIR)
    with pytest.raises(LookupError):
        book.limits(tensor_parallel(range(4)))


def test_an_engine_is_changed_by_its_book_alone(book: EngineBook) -> None:
    with pytest.raises(AttributeError):
        book[0].state = EngineState.DEAD  # type: ignore[misc]


def test_an_engine_with_fewer_blocks_holds_shorter_requests_until_it_has_all(
    book: EngineBook,
) -> None:
    said = book[0].ready
    book.resize(0, 40)
    assert book.num_blocks(0) == 40
    assert book.limits(alone(0)).max_model_len == LIMITS[0].tokens(40) == 160
    assert book.limits(PAIR).max_model_len == LIMITS[1].tokens(40)
    assert (book.num_blocks(1), book.at_start(0)) == (64, said)
    book.resize(0, 64)
    assert book[0].ready == said
    book.resize(0, 120)
    assert book.limits(alone(0)).max_model_len == 400, "it is no longer than the engine said"
    book.serve(ready(0))
    assert book.num_blocks(0) == 64


def test_an_engine_that_is_back_shares_weights_as_at_the_start() -> None:
    book = EngineBook(2, returns=True, level=Level(2))
    book.serve(ready(1))
    book.have_level(1, Level(2, 2), 4096)
    assert (book[1].level, book[1].weight_bytes) == (Level(2, 2), 4096)
    book.die([1], "killed")
    book.restart(1, 1)
    book.serve(ready(1))
    assert (book[1].level, book[1].weight_bytes) == (Level(2), 0)


def test_tiers_are_used_if_all_engines_have_one() -> None:
    book = EngineBook(2)
    book.serve(msgspec.structs.replace(ready(0), tier_blocks=7))
    book.serve(msgspec.structs.replace(ready(1), tier_blocks=9))
    assert [book.tier_blocks(engine) for engine in range(2)] == [7, 9]
    book.serve(ready(1))
    assert [book.tier_blocks(engine) for engine in range(2)] == [0, 0]
