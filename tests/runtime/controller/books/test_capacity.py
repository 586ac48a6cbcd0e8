"""What units are said to be able to take, and what it costs to say so."""

import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.values.batch import Mode
from shoal.policies.values.layouts import DP, Unit, alone
from shoal.policies.values.snapshot import PoolRequest, UnitState
from shoal.runtime.config import BACKGROUND_PRIORITY, FakeSettings
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.demand import Demand
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode
from tests.runtime.random_run import RandomRun
from tests.units import tp
from tests.work_counts import bytecodes

LARGE = FakeSettings(step_seconds=1.0, num_blocks=4096, max_num_seqs=256, max_model_len=512)
BLOCK_TOKENS = 4
LIMITS = m.LayoutLimits(DP, BLOCK_TOKENS, 8, 400)
SEVERAL = msgspec.structs.replace(LIMITS, group_limits=(0, 2))


def request(number: int, rng: random.Random) -> Request:
    prompt = rng.randint(1, 40)
    total, priority = prompt + rng.randint(1, 9), rng.choice((-1, 0, 0, 2))
    seen = PoolRequest(f"r{number}", prompt, total, priority, arrival=0.0)
    return Request(seen.request_id, 0, [], seen)


def load(core: CoreBook, waiting: int) -> m.Load:
    return m.Load(0, core.unit, 0, waiting, 100, core.sent, [], {})


@pytest.mark.parametrize("through_host", [0, 100 << 20])
def test_copies_through_the_host_say_how_fast_these_are(through_host: int) -> None:
    model = CostModel(ModelShape(2, 64, 8, 8, 16, parameters=1e6), Hardware(1e12, 1e15, 1e11))
    node = LoopbackNode(2, cost_model=model)
    node.settle()
    capacity = node.controller._capacity
    imported = m.Imported(1, 0, tp(0, 1), ["r"], {}, 0, 100 << 20, 0.01, through_host)
    capacity.costs.observe_copy(alone(0), imported)
    (before, after) = (of.carry_seconds(1000, 1) for of in (model, capacity.costs.model))
    assert (after > 2 * before) == bool(through_host)


def test_a_switch_takes_along_no_more_of_caches_than_is_copied_soon() -> None:
    def portable(rate: float, unit: Unit, **limits: int) -> int:
        shape = ModelShape(2, 64, 8, 8, 16, parameters=1e6)
        model = CostModel(shape, Hardware(1e12, 1e15, 1e11, peer_bytes_per_second=rate))
        node = LoopbackNode(2, cost_model=model, **{"precopy_tokens": 1} | limits)
        assert shape.kv_bytes_per_token == 2 * 2 * 8 * 16 * 2
        return node.controller._capacity.costs.portable_tokens(unit, 10_000)

    assert portable(1e12, alone(0)) == 4000, "it lies in two places"
    assert portable(1024 * 2000.0, alone(0)) == 1000, "what half a second copies"
    assert portable(1024 * 2000.0, tp(0, 1)) == 2000
    assert portable(1e12, alone(0), precopy_tokens=0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_the_requests_whatever_comes_and_goes(seed: int) -> None:
    rng, core = random.Random(seed), CoreBook(alone(0))
    for number in range(300):
        match rng.randrange(3):
            case 0 if core.requests:
                core.take(rng.choice(list(core.requests)))
            case 1 if core.requests:
                core.report(load(core, rng.randint(0, min(3, len(core.requests)))))
            case _:
                core.put(request(number, rng))

        seen = [r.seen for r in core.requests.values()]
        assert core.figures.prompt_tokens == sum(r.prompt_tokens for r in seen)
        assert core.figures.longest_tokens == max((r.total_tokens for r in seen), default=0)
        priorities = Counter(r.priority for r in seen)
        assert core.figures.by_priority == tuple(sorted(priorities.items()))
        new, waiting = len(seen), 0
        if core.load is not None:
            new, waiting = min(new, core.sent - core.load.added), core.load.waiting
        uncounted = core.uncounted
        found = [r.seen for r in uncounted.requests]
        assert found[len(found) - new :] == seen[len(seen) - new :]
        assert len({r.request_id for r in found}) == len(found) == min(len(seen), new + waiting)
        assert uncounted.prompt_tokens == sum(r.prompt_tokens for r in found)
        of_each = [-(-(r.prompt_tokens + 1) // BLOCK_TOKENS) for r in found]
        blocks = sum(of_each)
        assert uncounted.blocks(LIMITS) == blocks
        assert uncounted.blocks(SEVERAL) == blocks + sum(min(2, each) for each in of_each)


@pytest.mark.slow
def test_a_unit_that_has_not_changed_is_as_if_it_were_looked_at_anew() -> None:
    run = RandomRun(LoopbackNode(4, seed=11))
    controller, config = run.node.controller, run.node.config
    kept = seen = 0
    before: dict[Unit, UnitState] = {}
    for _ in range(1500):
        run.act()
        shown = controller.snapshot()
        anew = Capacity(config, controller.books)
        # All that serves now: only a switch keeps units from it here.
        demand = Demand(shown.now)
        expected = anew.snapshot(shown.now, demand, switching=False, busy=(), pending=None).units
        assert [replace(u, serving=True) for u in shown.units] == list(expected)
        units = {unit.unit: unit for unit in shown.units}
        kept += sum(before.get(group) is unit for group, unit in units.items())
        seen, before = seen + len(units), units
    assert seen / 10 < kept < seen


def test_a_turn_costs_the_same_however_many_requests_run() -> None:
    def turn(requests: int, *, reports: bool) -> int:
        node = LoopbackNode(2, settings=LARGE)
        node.settle()
        for number in range(2 * requests):
            node.send(f"{number:03}", 8, 100)
        for _ in range(4):
            node.controller.turn()
            for engine in (0, 1):
                node.turn_agent(engine)
        node.clock.advance(1.0)
        for engine in (0, 1) if reports else (0,):
            node.turn_agent(engine)
        node.controller.turn()  # what comes next is a turn like any other
        node.send("last", 8, 100)
        return bytecodes(node.controller.turn)

    # But for a branch that depends on how fast they came.
    assert turn(200, reports=True) == pytest.approx(turn(4, reports=True), rel=0.01)
    # Nor how many have been sent to an engine whose step takes so long that it has not said so.
    assert turn(200, reports=False) == pytest.approx(turn(4, reports=False), rel=0.01)


def test_the_first_steps_after_a_switch_say_nothing_of_how_fast_a_unit_is() -> None:
    """They waited for steps of other units, too."""
    model = CostModel(ModelShape(2, 64, 8, 8, 16, parameters=1e6), Hardware(1e12, 1e15, 1e11))
    node = LoopbackNode(2, cost_model=model)
    node.settle()
    controller, group = node.controller, tp(0, 1)
    capacity, core = controller._capacity, CoreBook(group)

    def report(steps: int) -> tuple[str, ...]:
        """Report so many steps of 1 s each; return the layouts of which something is known."""
        work = m.Work(steps, float(steps), 4 * steps, 4 * steps)
        done = {Mode.TP: m.ModeWork(decoding=work, total=work)}
        seen = m.Load(0, group, 4, 0, 100, 0, [], done)
        capacity.observe(core, seen)
        core.load = seen
        assert capacity.costs.model is not None
        return tuple(known.layout.name for known in capacity.costs.model.corrections)

    before = report(0)
    controller.books.units.bind(group, 1)
    assert report(0) == before
    assert report(2) == before
    assert report(3) == (*before, group.layout.name)
    assert report(4) == (*before, group.layout.name)


def test_steps_tell_what_decodes_check_and_get() -> None:
    model = CostModel(ModelShape(2, 64, 8, 8, 16, parameters=1e6), Hardware(1e12, 1e15, 1e11))
    node = LoopbackNode(1, cost_model=model)
    node.settle()
    capacity, core = node.controller._capacity, CoreBook(alone(0))

    def report(steps: int, drafts: int, accepted: int) -> tuple[float, float]:
        work = m.Work(steps, float(steps), 4 * steps, 4 * steps, 0, 0, drafts, accepted)
        seen = m.Load(0, alone(0), 4, 0, 100, 0, [], {Mode.TP: m.ModeWork(work, total=work)})
        capacity.observe(core, seen)
        core.load = seen
        assert capacity.costs.model is not None
        known = capacity.costs.model.speculation
        return known.checked, known.yielded

    assert report(0, 0, 0) == (1, 1)
    assert report(10, 0, 0) == (1, 1)
    assert report(20, 120, 30) == (4, 1.75)
    assert report(30, 240, 90) == (4, 2.125)


def test_policies_learn_nothing_of_background_requests() -> None:
    node = LoopbackNode(2, settings=LARGE)
    node.settle()
    for number in range(20):
        node.send(f"batch-{number}", priority=BACKGROUND_PRIORITY)
    node.clock.advance(0.5)
    node.turns(1)
    seen = node.controller.snapshot()
    assert seen.requests == 20
    assert (seen.smoothed_requests, seen.arrival_rate, seen.prompt_rate) == (0.0, 0.0, 0.0)
    node.send("person")
    node.clock.advance(0.5)
    node.turns(1)
    node.clock.advance(0.5)
    seen = node.controller.snapshot()
    assert 0.0 < seen.smoothed_requests < 1.0
    assert seen.arrival_rate > 0.0
