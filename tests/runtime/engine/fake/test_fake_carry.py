"""Requests go from one fake core to another, with their KV or without, and what damage does."""

from itertools import pairwise

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_core import FakeCore
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults
from shoal.runtime.engine.fake.step_times import Devices
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import CarriedRequest
from tests.runtime.loopback_node import problems, request_payload
from tests.units import tp

PAIR, FOUR = tp(0, 1), tp(0, 1, 2, 3)
STEP = 0.5
SETTINGS = FakeSettings(
    step_seconds=STEP,
    num_blocks=40,
    block_tokens=4,
    max_num_seqs=3,
    max_model_len=120,
    token_bytes=390,
    peer_bytes_per_second=390.0,
)
"""A member reads one token in a second."""
PROMPT, OUTPUT = [5] * 9, 12


class Node:
    """Four fake engines that share devices, and the tokens that their cores have sent."""

    def __init__(self, faults: Faults = NO_FAULTS, settings: FakeSettings = SETTINGS) -> None:
        self.clock = ManualClock()
        config = NodeConfig(4, 4, "manual", "unused", {}, fake=settings)
        devices = Devices()
        self.backends = [
            FakeBackend(config, engine, clock=self.clock, devices=devices, faults=faults)
            for engine in range(4)
        ]
        self.tokens: dict[str, list[int]] = {}
        self.outputs: list[wire.Output] = []

    def core(self, unit: Unit, blocks: int = 10) -> FakeCore:
        """Return the core of a unit; a group is bound first, with blocks of every member."""
        core = self.backends[unit.leader].cores[unit]
        if unit.is_group:
            lease = {engine: self.backends[engine].own.lend(blocks) for engine in unit.engines}
            self.backends[unit.leader].groups[unit].bind(1, lease, 0)
        return core

    def step(self, core: FakeCore) -> None:
        """Dispatch a step and wait until it is done."""
        core.dispatch()
        for _ in range(200):
            if not core.in_flight:
                return
            self.clock.advance(STEP)
            ended = core.collect()
            for outputs in ended.outputs if ended is not None else ():
                for output in msgspec.msgpack.decode(outputs.frames[0], type=wire.Outputs).outputs:
                    self.outputs.append(output)
                    self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        raise AssertionError("a step does not end")

    def finish(self, core: FakeCore) -> None:
        for _ in range(100):
            if not core.num_requests:
                return
            self.step(core)
        raise AssertionError("requests are left")

    def begin(self, core: FakeCore, steps: int = 3) -> None:
        core.add(request_payload("r", PROMPT, OUTPUT))
        for _ in range(steps):
            self.step(core)

    def carry(self, source: FakeCore, target: FakeCore, *, with_kv: bool = True) -> list[Copied]:
        """Carry the request from one core to another; return the copies."""
        target.expect("r", request_payload("r", PROMPT, OUTPUT))
        (carried,) = source.export(["r"])
        adoption = target.adopt(source.unit, carried, with_kv=with_kv)
        assert adoption is not None
        target.copy()
        self.clock.advance(100.0)
        copied = target.copied()
        source.abort(["r"])
        return copied

    def assert_sound(self) -> None:
        assert [line for backend in self.backends for line in problems(backend)] == []


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize(
    "units",
    [
        (alone(0), PAIR),
        (alone(1), PAIR),
        (alone(3), PAIR),
        (PAIR, alone(1)),
        (alone(0), PAIR, FOUR, tp(2, 3), alone(3)),
        (alone(0), alone(2)),
    ],
)
def test_a_request_goes_on_wherever_it_comes(
    node: Node, units: tuple[Unit, ...], with_kv: bool
) -> None:
    cores = [node.core(unit, 4) for unit in units]
    node.begin(cores[0])
    for source, target in pairwise(cores):
        done = len(node.tokens["r"])
        copies = node.carry(source, target, with_kv=with_kv)
        assert [copy.request_ids for copy in copies] == ([["r"]] if with_kv else [])
        node.step(target)
        assert len(node.tokens["r"]) == done + 1
        stats = node.outputs[-1].prefill_stats
        assert stats is not None
        assert stats.num_prompt_tokens == len(PROMPT) + done
    node.finish(cores[-1])
    assert node.tokens["r"] == expected_tokens(PROMPT, OUTPUT)
    node.assert_sound()


# --- what the source promises ---


def test_exported_requests_keep_their_blocks_and_wait_for_nothing(node: Node) -> None:
    core = node.core(alone(0))
    node.begin(core)
    free = core.load.free_blocks
    (carried,) = core.export(["r", "unknown"])
    assert carried.tokens == node.tokens["r"] == expected_tokens(PROMPT, 3)
    assert carried.computed == len(PROMPT) + 2
    assert carried.blocks == {0: [[1, 2, 3]]}
    assert not core.dispatch()
    assert (core.num_requests, core.load.running, core.load.waiting) == (1, 0, 0)
    assert core.load.free_blocks == free
    assert core.export(["r"]) == [carried], "as often as one asks"
    assert len(node.backends[0].own.lend(40, urgent=True)) == free
    core.abort(["r"])
    assert (core.num_requests, core.load.free_blocks) == (0, 40 - free)


def test_the_blocks_of_a_group_are_each_members_own(node: Node) -> None:
    node.backends[1].own.lend(7)
    core = node.core(PAIR)
    node.begin(core)
    (carried,) = core.export(["r"])
    assert carried.blocks == {0: [[1, 2]], 1: [[8, 9]]}


@pytest.mark.parametrize("steps", [0, 3])
def test_kept_requests_go_on_where_they_were(node: Node, steps: int) -> None:
    core = node.core(alone(0))
    node.begin(core, steps)
    core.export(["r"])
    core.keep(["r", "unknown"])
    node.finish(core)
    assert node.tokens["r"] == expected_tokens(PROMPT, OUTPUT)
    assert sum(output.prefill_stats is not None for output in node.outputs) == 1
    node.assert_sound()


def test_nothing_leaves_during_a_step_or_before_its_own_copy_has_ended(node: Node) -> None:
    source, target = node.core(alone(0)), node.core(PAIR)
    node.begin(source)
    source.dispatch()
    with pytest.raises(AssertionError, match="during a step"):
        source.export(["r"])
    node.step(source)
    target.expect("r", request_payload("r", PROMPT, OUTPUT))
    (carried,) = source.export(["r"])
    target.adopt(source.unit, carried, with_kv=True)
    target.copy()
    assert target.copies == 1
    with pytest.raises(AssertionError, match="its own copy"):
        target.export(["r"])
    node.clock.advance(100.0)
    assert target.copies == 1, "nobody has been told that it has ended"
    assert len(target.copied()) == 1
    assert target.copies == 0
    assert target.export(["r"])[0].computed == carried.computed


# --- what the destination promises ---


def test_a_copy_takes_its_time_and_steps_come_after_it(node: Node) -> None:
    source, target = node.core(alone(0)), node.core(PAIR)
    node.begin(source)
    now = node.clock.now
    target.expect("r", request_payload("r", PROMPT, OUTPUT))
    (carried,) = source.export(["r"])
    target.adopt(source.unit, carried, with_kv=True)
    target.copy()
    target.dispatch()
    seconds = float(carried.computed)  # from one engine: a token in a second
    assert target.due == pytest.approx(now + seconds)
    node.clock.advance(seconds + STEP / 2)
    assert target.copied() == [Copied(["r"], 390 * carried.computed, seconds)]
    assert target.collect() is None
    node.clock.advance(STEP / 2)
    assert target.collect() is not None


def test_a_copy_from_a_group_uses_both_of_its_links(node: Node) -> None:
    source, target = node.core(PAIR, 4), node.core(FOUR, 4)
    node.begin(source)
    (copied,) = node.carry(source, target)
    assert copied.seconds == pytest.approx((len(PROMPT) + 2) / 2)


def test_a_copy_ends_a_run_of_steps() -> None:
    node = Node(settings=msgspec.structs.replace(SETTINGS, steps_at_once=64))
    source, target = node.core(alone(1)), node.core(alone(0))
    node.begin(source, steps=1)
    target.add(request_payload("runs", [1], 60))
    node.step(target)
    target.dispatch()
    target.expect("r", request_payload("r", PROMPT, OUTPUT))
    (carried,) = source.export(["r"])
    target.adopt(source.unit, carried, with_kv=True)
    target.copy()
    assert target.due == pytest.approx(node.clock.now + STEP)


def test_what_finds_no_room_stays_expected(node: Node) -> None:
    source, target = node.core(alone(0)), node.core(alone(1))
    node.begin(source)
    blocks = target.lend(38)
    target.expect("r", request_payload("r", PROMPT, OUTPUT))
    (carried,) = source.export(["r"])
    assert target.adopt(source.unit, carried, with_kv=True) is None
    assert (target.num_requests, target.load.free_blocks) == (0, 2)
    target.take_back(blocks)
    assert target.adopt(source.unit, carried, with_kv=True) is not None
    assert target.load.free_blocks == 40 - 3
    with pytest.raises(KeyError):
        target.adopt(source.unit, carried, with_kv=True)


def test_aborted_requests_are_no_longer_expected(node: Node) -> None:
    target = node.core(alone(1))
    target.expect("r", request_payload("r", PROMPT, OUTPUT))
    assert target.num_requests == 0
    target.abort(["r"])
    with pytest.raises(KeyError):
        target.adopt(alone(0), CarriedRequest("r", [], 0, {}, 9), with_kv=True)


def test_impossible_requests_are_not_expected(node: Node) -> None:
    target = node.core(alone(1))
    target.add(request_payload("here", [1], 3))
    with pytest.raises(ValueError, match="exists already"):
        target.expect("here", request_payload("here", [1], 3))
    with pytest.raises(ValueError, match="prompt of"):
        target.expect("long", request_payload("long", [1] * 200, 3))


def test_half_a_prompt_goes_along() -> None:
    node = Node(settings=msgspec.structs.replace(SETTINGS, max_num_batched_tokens=4))
    source, target = node.core(alone(0)), node.core(PAIR)
    node.begin(source, steps=1)
    assert node.tokens == {}
    assert len(node.carry(source, target)) == 1
    node.finish(target)
    assert node.tokens["r"] == expected_tokens(PROMPT, OUTPUT)
    assert node.outputs[0].prefill_stats == wire.PrefillStats(9, 9)


def test_a_request_that_no_step_has_computed_needs_no_copy(node: Node) -> None:
    source, target = node.core(alone(0)), node.core(PAIR)
    node.begin(source, steps=0)
    assert node.carry(source, target) == []
    node.finish(target)
    assert node.tokens["r"] == expected_tokens(PROMPT, OUTPUT)


def test_more_than_a_full_batch_can_come(node: Node) -> None:
    source, target = node.core(PAIR, 10), node.core(alone(2))
    names = [f"r{number}" for number in range(3)]
    for core in (source, target):
        for name in names:
            id_ = f"{name} of {core.unit.leader}"
            core.add(request_payload(id_, PROMPT, OUTPUT))
        node.step(core)
    ids = [f"{name} of 0" for name in names]
    for id_ in ids:
        target.expect(id_, request_payload(id_, PROMPT, OUTPUT))
    for carried in source.export(ids):
        assert target.adopt(source.unit, carried, with_kv=True) is not None
    target.copy()
    assert target.load.running == target.load.waiting == 3
    node.assert_sound()
    node.clock.advance(100.0)
    target.copied()
    source.abort(ids)
    node.finish(target)
    assert all(tokens == expected_tokens(PROMPT, OUTPUT) for tokens in node.tokens.values())
    assert len(node.tokens) == 6
    node.assert_sound()


def test_those_that_wait_with_their_kv_stop_nobody(node: Node) -> None:
    """They give it up when the running requests lack blocks."""
    prompts = {name: [ord(name)] * 9 for name in "abcde"}
    source, target = node.core(PAIR, 10), node.core(alone(2))
    for core, names in ((source, "ab"), (target, "cde")):
        for name in names:
            core.add(request_payload(name, prompts[name], OUTPUT))
        node.step(core)
    for name in "ab":
        target.expect(name, request_payload(name, prompts[name], OUTPUT))
    target.lend(target.load.free_blocks - 6)
    for carried in source.export(list("ab")):
        assert target.adopt(source.unit, carried, with_kv=True) is not None
    target.copy()
    node.clock.advance(100.0)
    target.copied()
    assert target.load.free_blocks == 0
    node.finish(target)
    assert node.tokens == {name: expected_tokens(prompts[name], OUTPUT) for name in "abcde"}
    node.assert_sound()


# --- damage ---


@pytest.mark.parametrize(
    "faults", [Faults(lose_token=True), Faults(wrong_block=True)], ids=["token", "block"]
)
@pytest.mark.parametrize("units", [(alone(0), PAIR), (PAIR, alone(1))])
def test_a_damaged_carry_gives_wrong_tokens(faults: Faults, units: tuple[Unit, Unit]) -> None:
    node = Node(faults)
    source, target = (node.core(unit) for unit in units)
    node.begin(source)
    node.carry(source, target)
    node.finish(target)
    assert node.tokens["r"] != expected_tokens(PROMPT, OUTPUT)


@pytest.mark.parametrize("reused", [True, False])
def test_blocks_that_are_dropped_before_they_are_read_give_wrong_tokens(
    node: Node, reused: bool
) -> None:
    source, target = node.core(alone(0)), node.core(alone(1))
    node.begin(source)
    target.expect("r", request_payload("r", PROMPT, OUTPUT))
    (carried,) = source.export(["r"])
    target.adopt(source.unit, carried, with_kv=True)
    target.copy()
    source.abort(["r"])
    if reused:
        source.add(request_payload("other", PROMPT, OUTPUT))
        node.step(source)
    node.finish(target)
    assert node.tokens["r"] != expected_tokens(PROMPT, OUTPUT)


def test_who_does_not_see_all_that_is_written_judges_nothing() -> None:
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=FakeSettings())
    core = FakeBackend(config, 0, clock=ManualClock()).own
    core.expect("r", request_payload("r", PROMPT, OUTPUT))
    tokens = expected_tokens(PROMPT, 3)
    core.adopt(alone(1), CarriedRequest("r", tokens, 11, {1: [[1]]}, 12), with_kv=True)
    core.copy()
    core.dispatch()
    collected = core.collect()
    assert collected is not None
    outputs = msgspec.msgpack.decode(collected.outputs[0].frames[0], type=wire.Outputs).outputs
    assert outputs[0].new_token_ids == expected_tokens(PROMPT, 4)[3:]
