"""Which heads a member reads from whom, and in which runs."""

import itertools

import numpy as np
import pytest

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import DP, Layout, Unit, alone, tensor_parallel, unit_of
from shoal.runtime.engine.kv.carry_plan import (
    Span,
    Strip,
    heads_of,
    layers_of,
    pieces,
    runs,
    strips,
)
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.link.instructions import Arrival
from tests.work_counts import bytecodes

LAYOUTS = [Layout(tp=tp) for tp in (1, 2, 4, 8)]
PAGES = KvPages(KvGeometry(2, 8, 16), (0, 1 << 20), 2048, 16, head_major=True)

# --- strips ---


def heads_only(heads: int) -> KvGeometry:
    """Return the geometry of a model with so many KV heads."""
    return KvGeometry(2, heads, 16)


@pytest.mark.parametrize("max_sp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, repeat=2)))
def test_every_head_of_a_member_comes_once_from_an_engine_that_has_it(
    source: Layout, target: Layout, kv_heads: int, max_sp: int
) -> None:
    units = unit_of(2, source), unit_of(5, target)
    for member, engine in enumerate(units[1].engines):
        needed = heads_of(member, target, kv_heads, max_sp)
        found = list[int]()
        for strip in strips(*units, engine, heads_only(kv_heads), max_sp):
            held = heads_of(units[0].engines.index(strip.engine), source, kv_heads, max_sp)
            assert strip.target == len(found)
            assert strip.layers == range(2)
            found += held[strip.source : strip.source + strip.heads]
        assert found == list(needed)


def test_heads_that_are_adjacent_on_both_sides_are_one_strip() -> None:
    pair, four = tensor_parallel((0, 1)), tensor_parallel(range(4))
    eight, all_layers = heads_only(8), range(2)
    assert strips(alone(7), pair, 1, eight, 1) == [Strip(7, 4, 0, 4, all_layers)]
    assert strips(pair, alone(7), 7, eight, 1) == [
        Strip(0, 0, 0, 4, all_layers),
        Strip(1, 0, 4, 4, all_layers),
    ]
    assert strips(pair, four, 3, eight, 1) == [Strip(1, 2, 0, 2, all_layers)]
    # With SP2, members 0 and 2 of four have the first half of the heads between them.
    assert strips(four, alone(7), 7, eight, 2) == [
        Strip(e, 0, 2 * i, 2, all_layers) for i, e in enumerate((0, 2, 1, 3))
    ]


STAGED = [DP, Layout(tp=4), Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2), Layout(tp=2, pp=4)]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(STAGED, repeat=2)))
def test_every_layer_and_head_of_a_member_comes_once_from_an_engine_that_has_it(
    source: Layout, target: Layout, kv_heads: int
) -> None:
    geometry = KvGeometry(8, kv_heads, 16)
    units = unit_of(2, source), unit_of(9, target)
    for member, engine in enumerate(units[1].engines):
        found = list[tuple[int, int]]()
        for strip in strips(*units, engine, geometry, 1):
            holder = units[0].engines.index(strip.engine)
            held = heads_of(holder, source, kv_heads, 1)[strip.source :][: strip.heads]
            assert set(strip.layers) <= set(layers_of(holder, source, 8))
            found += itertools.product(strip.layers, held)
        needed = heads_of(member, target, kv_heads, 1)
        assert sorted(found) == list(itertools.product(layers_of(member, target, 8), needed))


def test_a_stage_reads_its_own_layers_alone() -> None:
    pair, stages = tensor_parallel((0, 1)), Unit((0, 1), Layout(pp=2))
    geometry = KvGeometry(4, 2, 16)
    assert strips(alone(7), stages, 1, geometry, 1) == [Strip(7, 0, 0, 2, range(2, 4))]
    assert strips(stages, pair, 0, geometry, 1) == [
        Strip(0, 0, 0, 1, range(2)),
        Strip(1, 0, 0, 1, range(2, 4)),
    ]


def test_a_member_reads_its_own_memory_if_that_has_the_head() -> None:
    four = tensor_parallel(range(4))
    for engine in range(4):
        assert {s.engine for s in strips(four, four, engine, heads_only(2), 1)} == {engine}


def test_members_read_the_same_head_from_different_engines() -> None:
    four, others = tensor_parallel(range(4)), tensor_parallel(range(4, 8))
    for max_sp in (1, 2):
        read = [
            strip.engine
            for e in others.engines
            for strip in strips(four, others, e, heads_only(1), max_sp)
        ]
        assert sorted(read) == [0, 1, 2, 3]


# --- runs ---


def test_runs_are_as_long_as_the_smaller_page_and_cut_where_the_request_begins_and_ends() -> None:
    source, target = PAGES.page(DP), PAGES.page(Layout(tp=2))
    found = runs([Span(20, 70, [9, 8, 7, 6, 5], [3, 2, 1])], source, target)
    assert np.stack(found, axis=1).tolist() == [
        [8, 4, 3, 20, 12],
        [7, 0, 2, 0, 16],
        [6, 0, 2, 16, 16],
        [5, 0, 1, 0, 6],
    ]


def test_the_runs_of_many_requests_are_those_of_each_one_after_the_other() -> None:
    source, target = PAGES.page(DP), PAGES.page(Layout(tp=2))
    spans = [
        Span(20, 70, [9, 8, 7, 6, 5], [3, 2, 1]),
        Span(7, 7, [2], [2]),
        Span(15, 17, [11, 12], [4]),
        Span(0, 32, [0, 13], [5]),
    ]
    together = np.stack(runs(spans, source, target), axis=1).tolist()
    each = [np.stack(runs([span], source, target), axis=1).tolist() for span in spans]
    assert together == [run for found in each for run in found]
    assert [len(found) for found in each] == [4, 0, 2, 1]


def test_a_request_shorter_than_a_block_is_one_run() -> None:
    page = PAGES.page(DP)
    (found,) = np.stack(runs([Span(3, 7, [4], [5])], page, page), axis=1).tolist()
    assert found == [4, 3, 5, 3, 4]


def test_nothing_is_read_where_a_null_block_stands() -> None:
    """Sliding windows leave null blocks behind."""
    page = PAGES.page(DP)
    found = runs([Span(0, 64, [0, 0, 4, 5], [0, 6, 7, 8])], page, page)
    assert found.source_page.tolist() == [4, 5]
    assert found.target_page.tolist() == [7, 8]


def test_where_nothing_has_been_computed_there_is_nothing_to_read() -> None:
    request = Arrival("a", [1], [2], computed=0, sampling=None)
    assert pieces(alone(0), alone(1), 1, [request], 0, PAGES, 1) == []
    assert runs([Span(5, 5, [1], [2])], PAGES.page(DP), PAGES.page(DP)).tokens.tolist() == []


def long_requests(source: Unit, target: Unit, count: int, tokens: int) -> list[Arrival]:
    def blocks(unit: Unit) -> dict[int, list[list[int]]]:
        number = tokens // PAGES.geometry.block(unit.layout).tokens
        return {engine: [list(range(1, number + 1))] for engine in unit.engines}

    return [
        Arrival(str(i), [], [], tokens, None, 0, blocks(source), blocks(target))
        for i in range(count)
    ]


def test_what_a_request_costs_to_plan_does_not_depend_on_its_length() -> None:
    source, target = alone(0), tensor_parallel((0, 1))

    def cost(tokens: int) -> int:
        requests = long_requests(source, target, 8, tokens)
        (piece,) = pieces(source, target, 1, requests, 0, PAGES, 1)
        assert piece.tokens == 8 * tokens
        return bytecodes(lambda: pieces(source, target, 1, requests, 0, PAGES, 1))

    assert cost(16_384) == cost(1024) < 8 * 1000
