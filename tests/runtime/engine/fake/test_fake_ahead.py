"""What fake cores do for pre-copies, and what damage does to tokens."""

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.fake.fake_core import FakeCore
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol.messages import AheadRequest
from tests.runtime.engine.fake.test_fake_carry import OUTPUT, PROMPT, SETTINGS, STEP, Node
from tests.runtime.loopback_node import request_payload
from tests.units import tp

PAIR, FOUR = tp(0, 1), tp(0, 1, 2, 3)
CARRY = 7
UNITS = pytest.mark.parametrize(
    "units",
    [(alone(0), alone(1)), (alone(0), PAIR), (PAIR, alone(1)), (PAIR, FOUR), (FOUR, alone(3))],
)
LONG = [5, 6, 7] * 12


class AheadNode(Node):
    """Copies ahead from one core to another."""

    def begin(self, core: FakeCore, steps: int = 3) -> None:
        core.add(request_payload("r", LONG, OUTPUT))
        for _ in range(steps):
            self.step(core)

    def unbound(self, unit: Unit, blocks: int) -> FakeCore:
        """Return the core of a unit; a group is not bound, but has blocks."""
        core = self.backends[unit.leader].cores[unit]
        if unit.is_group:
            lease = {engine: self.backends[engine].own.lend(blocks) for engine in unit.engines}
            self.backends[unit.leader].groups[unit].grow(lease)
        return core

    def copy(self, source: FakeCore, target: FakeCore, *readers: FakeCore) -> list[AheadRequest]:
        """Let members of the target begin to read."""
        target.expect("r", request_payload("r", LONG, OUTPUT))
        requests = target.reserve(CARRY, source.unit, source.pin(CARRY, ["r", "unknown"]))
        for reader in readers:
            reader.copy_ahead(CARRY, source.unit, target.unit, requests)
        return requests

    def ended(self, *readers: FakeCore) -> list[Copied]:
        """Let what is read be read; return the copies."""
        self.clock.advance(100.0)
        return [copied for reader in readers for _, copied in reader.copied_ahead()]

    def arrive(self, source: FakeCore, target: FakeCore) -> list[Copied]:
        """Let the request go on at the target; return the copies of what was left."""
        (carried,) = source.export(["r"])
        assert target.adopt(source.unit, carried, with_kv=True) is not None
        target.copy()
        self.clock.advance(100.0)
        copied = target.copied()
        source.abort(["r"])
        return copied

    def finish(self, core: FakeCore) -> None:
        if core.unit.is_group:
            self.backends[core.unit.leader].groups[core.unit].bind(
                1, {engine: [] for engine in core.unit.engines}, 0
            )
        super().finish(core)

    @property
    def is_right(self) -> bool:
        return self.tokens["r"] == expected_tokens(LONG, OUTPUT)


@pytest.fixture
def node() -> AheadNode:
    return AheadNode(settings=msgspec.structs.replace(SETTINGS, num_blocks=100))


def cores_of(node: AheadNode, *units: Unit) -> tuple[FakeCore, FakeCore, list[FakeCore]]:
    """Return the cores of a source and of a destination, and those whose members read."""
    source = node.core(units[0], 20) if units[0].is_group else node.core(units[0])
    target = node.unbound(units[1], 20)
    current = [units[0], *(alone(e) for e in range(4) if e not in units[0].engines)]
    readers = [unit for unit in current if set(unit.engines) & set(units[1].engines)]
    return source, target, [node.backends[unit.leader].cores[unit] for unit in readers]


@UNITS
def test_only_the_rest_is_read_when_the_request_comes(
    node: AheadNode, units: tuple[Unit, Unit]
) -> None:
    source, target, readers = cores_of(node, *units)
    node.begin(source)
    (request,) = node.copy(source, target, *readers)
    pinned = (len(LONG) + 2) // source._limits.block_tokens * source._limits.block_tokens
    size = target._limits.block_tokens
    assert (request.begin, request.end) == (0, pinned // size * size)
    node.step(source)
    copies = node.ended(*readers)
    assert sum(copied.bytes for copied in copies) == 390 * request.end
    target.settle(CARRY, copied=True)
    source.unpin(CARRY)
    (rest,) = node.arrive(source, target)
    assert rest.bytes == 390 * (len(LONG) + 3 - request.end)
    node.finish(target)
    assert node.is_right
    node.assert_sound()


def test_steps_do_not_wait_for_what_is_read_beside_them(node: AheadNode) -> None:
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    target.add(request_payload("other", PROMPT, OUTPUT))
    target.dispatch()
    now = node.clock.now
    (request,) = node.copy(source, target, *readers)
    assert target.due == pytest.approx(now + STEP)
    node.clock.advance(STEP)
    assert target.collect() is not None
    target.dispatch()
    node.clock.advance(STEP)
    assert target.collect() is not None
    assert target.copied_ahead() == []
    # It began after the step that was in flight, and an engine reads a token in a second.
    node.clock.advance(request.end - STEP)
    assert [carry for carry, _ in target.copied_ahead()] == [CARRY]


def test_a_group_has_two_links(node: AheadNode) -> None:
    source, target, readers = cores_of(node, PAIR, FOUR)
    node.begin(source)
    (request,) = node.copy(source, target, *readers)
    assert {copied.seconds for copied in node.ended(*readers)} == {request.end / 2}


def test_only_full_blocks_that_no_step_in_flight_writes_to_are_pinned(node: AheadNode) -> None:
    core = node.core(alone(0))
    core.add(request_payload("r", LONG, OUTPUT))
    core.dispatch()
    assert core.pin(CARRY, ["r"]) == []
    node.step(core)
    (pinned,) = core.pin(CARRY, ["r"])
    assert pinned.computed == len(LONG) // 4 * 4
    assert pinned.blocks == {0: [list(range(1, 1 + len(LONG) // 4))]}
    assert pinned.tokens == expected_tokens(LONG, 1)


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_pinned_blocks_outlive_their_request(node: AheadNode, end: str) -> None:
    core = node.core(alone(0))
    node.begin(core)
    (pinned,) = core.pin(CARRY, ["r"])
    if end == "abort":
        core.abort(["r"])
    else:
        assert len(node.backends[0].own.lend(100, urgent=True)) == 100 - len(LONG) // 4
    held = set(pinned.blocks[0][0])
    assert held.isdisjoint(core._scheduler.pool.ids)
    free = core.load.free_blocks
    core.unpin(CARRY)
    core.unpin(CARRY)
    assert core.load.free_blocks == free + len(held)
    assert node.backends[0].own.lent | set(core._scheduler.pool.ids) == set(range(1, 101))


# --- blocks that are reserved ---


def test_the_largest_requests_get_room_first(node: AheadNode) -> None:
    source, target = node.core(alone(0)), node.core(alone(1))
    prompts = {"small": [5] * 8, "large": [6] * 40, "unexpected": [7] * 20}
    for name, prompt in prompts.items():
        source.add(request_payload(name, prompt, OUTPUT))
    node.step(source)
    for name in ("small", "large"):
        target.expect(name, request_payload(name, prompts[name], OUTPUT))
    target.lend(100 - 11)
    pinned = source.pin(CARRY, ["small", "large", "unexpected"])
    assert [r.request_id for r in target.reserve(CARRY, source.unit, pinned)] == ["large"]
    assert target.load.free_blocks == 1


@pytest.mark.parametrize("copied", [True, False])
def test_blocks_of_requests_that_do_not_come_are_free_once_nobody_reads(
    node: AheadNode, copied: bool
) -> None:
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    node.copy(source, target, *readers)
    held = 100 - target.load.free_blocks
    target.abort(["r"])
    assert target.load.free_blocks == 100 - held, "members still read into them"
    node.ended(*readers)
    target.settle(CARRY, copied=copied)
    assert target.load.free_blocks == 100


def test_who_comes_before_the_blocks_are_settled_gets_others(node: AheadNode) -> None:
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    node.copy(source, target, *readers)
    (rest,) = node.arrive(source, target)
    assert rest.bytes == 390 * (len(LONG) + 2)
    node.ended(*readers)
    target.settle(CARRY, copied=False)
    source.unpin(CARRY)
    node.finish(target)
    assert node.is_right
    node.assert_sound()


def test_settled_blocks_of_who_finds_no_room_are_kept(node: AheadNode) -> None:
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    node.copy(source, target, *readers)
    node.ended(*readers)
    target.settle(CARRY, copied=True)
    source.unpin(CARRY)
    lent = target.lend(100)
    (carried,) = source.export(["r"])
    assert target.adopt(source.unit, carried, with_kv=True) is None
    target.take_back(lent)
    node.arrive(source, target)
    node.finish(target)
    assert node.is_right
    node.assert_sound()


def test_what_is_left_over_is_a_problem(node: AheadNode) -> None:
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    node.copy(source, target, *readers)
    assert source.check_integrity() == ["core (0,): blocks are pinned for carry 7"]
    assert target.check_integrity() == [
        "core (1,): blocks are reserved for carry 7",
        "core (1,): members read for carry 7",
    ]


# --- the prefix cache ---


def test_what_is_cached_there_or_read_for_another_request_is_not_read(node: AheadNode) -> None:
    source, target, readers = cores_of(node, alone(0), alone(1))
    prompts = {"a": [*LONG, 8, 8, 8, 8], "b": [*LONG, 9], "c": LONG[:21]}
    target.add(request_payload("before", LONG[:9], 1))
    node.finish(target)
    for name, prompt in prompts.items():
        source.add(request_payload(name, prompt, OUTPUT))
        node.step(source)
        target.expect(name, request_payload(name, prompt, OUTPUT))
    free = target.load.free_blocks
    requests = target.reserve(CARRY, source.unit, source.pin(CARRY, list(prompts)))
    assert {r.request_id: (r.begin, r.end) for r in requests} == {"a": (8, 40)}
    assert target.load.free_blocks == free - 10
    for reader in readers:
        reader.copy_ahead(CARRY, source.unit, target.unit, requests)
    assert [copied.bytes for copied in node.ended(*readers)] == [390 * 32]
    target.settle(CARRY, copied=True)
    source.unpin(CARRY)
    for carried in source.export(list(prompts)):
        assert target.adopt(source.unit, carried, with_kv=True) is not None
    target.copy()
    node.clock.advance(100.0)
    (rest,) = target.copied()
    assert rest.bytes == 390 * sum(request.computed % 4 for request in source._scheduler.requests)
    source.abort(list(prompts))
    node.finish(target)
    for name, prompt in prompts.items():
        assert node.tokens[name] == expected_tokens(prompt, OUTPUT)
    node.assert_sound()


def test_what_the_first_step_found_is_not_pinned_before_it_ends(node: AheadNode) -> None:
    """Another request of the same step may be what writes it."""
    core = node.core(alone(0))
    for name in "ab":
        core.add(request_payload(name, [*LONG, ord(name)], OUTPUT))
    core.dispatch()
    assert [request.computed for request in core._scheduler.requests] == [0, len(LONG)]
    assert core.pin(CARRY, ["a", "b"]) == []
    node.step(core)
    assert [pinned.computed for pinned in core.pin(CARRY, ["a", "b"])] == [len(LONG)] * 2
    core.unpin(CARRY)
    node.finish(core)
    node.assert_sound()


# --- damage ---


@UNITS
@pytest.mark.parametrize("waits", [True, False])
def test_blocks_that_are_used_before_they_are_read_give_wrong_tokens(
    node: AheadNode, units: tuple[Unit, Unit], waits: bool
) -> None:
    source, target, readers = cores_of(node, *units)
    node.begin(source)
    node.copy(source, target, *readers)
    if waits:
        node.ended(*readers)
    target.settle(CARRY, copied=True)
    node.arrive(source, target)
    node.ended(*readers)
    source.unpin(CARRY)
    node.finish(target)
    assert node.is_right == waits


@UNITS
@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_blocks_that_are_used_again_give_wrong_tokens(
    node: AheadNode, units: tuple[Unit, Unit], pinned: bool
) -> None:
    """The request is computed again elsewhere in its unit, so that its other blocks are right."""
    source, target, readers = cores_of(node, *units)
    node.begin(source)
    node.copy(source, target, *readers)
    source.forget_prefixes()
    if not pinned:
        source.unpin(CARRY)
    source._scheduler.preempt_until(source.load.free_blocks + 1)
    source._scheduler.waiting.appendleft(source._scheduler.waiting.pop())
    source.add(request_payload("other", LONG[::-1], OUTPUT))
    source._scheduler.waiting.rotate()
    node.step(source)
    node.ended(*readers)
    target.settle(CARRY, copied=True)
    if pinned:
        source.unpin(CARRY)
    node.arrive(source, target)
    node.finish(target)
    assert node.is_right == pinned


def test_what_is_read_over_blocks_of_others_makes_those_wrong(node: AheadNode) -> None:
    """The blocks were taken to be free although somebody still read into them."""
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    node.copy(source, target, *readers)
    target.abort(["r"])
    target.settle(CARRY, copied=False)
    target.add(request_payload("victim", PROMPT, OUTPUT))
    node.step(target)
    node.ended(*readers)
    node.finish(target)
    assert node.tokens["victim"] != expected_tokens(PROMPT, OUTPUT)


def test_what_reading_did_not_touch_is_right(node: AheadNode) -> None:
    """The control."""
    source, target, readers = cores_of(node, alone(0), alone(1))
    node.begin(source)
    node.copy(source, target, *readers)
    target.abort(["r"])
    target.add(request_payload("other", PROMPT, OUTPUT))
    node.step(target)
    node.ended(*readers)
    target.settle(CARRY, copied=False)
    node.finish(target)
    assert node.tokens["other"] == expected_tokens(PROMPT, OUTPUT)
