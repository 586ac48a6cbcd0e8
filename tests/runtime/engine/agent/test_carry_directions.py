"""Agents carry requests between all kinds of units; the test is a controller that relays."""

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.agent.carrying import ROOM_SECONDS
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.engine.fake.step_times import Devices
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.loopback import LoopbackNetwork
from tests.runtime.loopback_node import problems, request_payload
from tests.units import tp

ENGINES = range(4)
SINGLES = [alone(engine) for engine in ENGINES]
PAIRS, FOUR = [tp(0, 1), tp(2, 3)], tp(0, 1, 2, 3)
STEP = 0.01
PROMPT, OUTPUT = [7] * 30, 40
_outputs = msgspec.msgpack.Decoder(wire.Outputs)


class Node:
    """Four agents whose engines share devices."""

    def __init__(self, num_blocks: int = 100, copy_seconds: float = 0.0) -> None:
        settings = FakeSettings(
            step_seconds=STEP,
            num_blocks=num_blocks,
            block_tokens=4,
            max_num_seqs=16,
            max_model_len=200,
            copy_seconds=copy_seconds,
            prefix_caching=False,  # prompts are the same, and room is to be short
        )
        config = NodeConfig(len(ENGINES), 4, "manual", "unused", {}, fake=settings)
        self.clock = ManualClock()
        self.network = LoopbackNetwork()
        devices = Devices()
        self.backends = [
            FakeBackend(config, engine, clock=self.clock, devices=devices) for engine in ENGINES
        ]
        self.agents = [
            Agent(backend, self.network.agent(backend.engine), clock=self.clock)
            for backend in self.backends
        ]
        self.heard: list[m.Message] = []
        self.imported: list[m.Imported] = []
        self._carries: dict[int, m.Import] = {}
        self._announced: dict[int, dict[str, m.CarriedRequest]] = {}
        self._leases: dict[Unit, dict[int, list[int]]] = {}
        self._epoch = 0

    # --- turns ---

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        for agent in self.agents:
            agent.turn()
        for queue in self.network.to_controller.values():
            while queue:
                self._hear(m.decode_to_controller(queue.popleft()[0]))

    def run_for(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            self.turn(STEP)
            for _ in range(3):
                self.turn()

    def tell(self, engine: int, message: m.Message) -> None:
        self.network.controller.to_engine(engine, message, ())

    def wait(self, kind: type, count: int) -> list:
        """Take turns until messages of a kind have come; return them."""
        for _ in range(100):
            self.turn(STEP / 4)
            found = [message for message in self.heard if isinstance(message, kind)]
            if len(found) == count:
                self.heard = [message for message in self.heard if message not in found]
                return found
        raise AssertionError(f"no {kind.__name__}: {self.heard}")

    def _hear(self, message: m.Message) -> None:
        match message:
            case m.Imported(carried=carried, recomputed=recomputed):
                self.imported.append(message)
                source = self._carries[message.carry].source
                self.tell(source.leader, m.Drop(source, [*carried, *recomputed]))
            case m.NeedBlocks(epoch, unit, blocks, urgent):
                self._leases[unit] = {}
                for engine in unit.engines:
                    self.tell(engine, m.Lend(epoch, unit, blocks, urgent))
            case m.Lent(epoch, engine, unit, blocks):
                self._grow(epoch, engine, unit, blocks)
            case m.Returning(epoch, unit, returned):
                for engine, blocks in returned.items():
                    self.tell(engine, m.TakeBack(blocks))
            case m.Leaving(carry, _, _, requests):
                self._announced[carry] = {each.request_id: each for each in requests}
            case m.Load() | m.EngineReady():
                pass
            case _:
                self.heard.append(message)

    def _grow(self, epoch: int, engine: int, unit: Unit, blocks: list[int]) -> None:
        lease = self._leases[unit]
        lease[engine] = blocks
        if len(lease) < len(unit.engines):
            return
        count = min(map(len, lease.values()))
        opened = {member: lent[:count] for member, lent in lease.items()}
        self.tell(unit.leader, m.Grow(epoch, unit, opened))
        for member, lent in lease.items():
            self.tell(member, m.TakeBack(lent[count:]))

    # --- what a controller does ---

    def bind(self, unit: Unit, blocks: int = 4) -> None:
        self._epoch += 1
        for engine in unit.engines:
            self.tell(engine, m.Prepare(self._epoch, unit, m.Treatment.HARD, blocks))
        prepared = self.wait(m.Prepared, len(unit.engines))
        count = min(len(answer.blocks) for answer in prepared)
        lease = {answer.engine: answer.blocks[:count] for answer in prepared}
        for answer in prepared:
            self.tell(answer.engine, m.TakeBack(answer.blocks[count:]))
            self.tell(answer.engine, m.Commit(self._epoch, unit, 1, lease))
        self.wait(m.Committed, len(unit.engines))

    def release(self, unit: Unit) -> None:
        epoch = self.agents[unit.leader].binding.epoch
        self.tell(unit.leader, m.Release(epoch, unit, m.Treatment.HARD))
        (released,) = self.wait(m.Released, 1)
        for engine in unit.engines:
            self.tell(engine, m.Resume(epoch, unit, released.returned[engine]))
        self.wait(m.Resumed, len(unit.engines))

    def add(self, unit: Unit, *ids: str) -> None:
        for id_ in ids:
            payload = request_payload(id_, PROMPT, OUTPUT)
            self.network.controller.to_engine(unit.leader, m.AddRequest(unit, id_), payload)

    def leave(self, source: Unit, target: Unit, ids: list[str]) -> m.Import:
        """Have requests leave a unit; return what tells the next one of them."""
        carry = len(self._carries)
        frames = {id_: request_payload(id_, PROMPT, OUTPUT) for id_ in ids}
        self.tell(target.leader, m.Expect(carry, target, frames, {}))
        self.tell(source.leader, m.Export(carry, source, ids))
        (exported,) = self.wait(m.Exported, 1)
        announced = self._announced.pop(carry, {})
        whole = [request.whole(announced) for request in exported.requests]
        self._carries[carry] = m.Import(carry, target, source, whole)
        return self._carries[carry]

    def switch(self, moves: dict[Unit, tuple[Unit, list[str]]], units: list[Unit]) -> None:
        """Dissolve every group, bind ``units``, and carry: source -> target and its requests."""
        imports = [self.leave(source, *target) for source, target in moves.items()]
        for unit in dict.fromkeys(source for source in moves if source.is_group):
            self.release(unit)
        for unit in units:
            self.bind(unit)
        for message in imports:
            self.tell(message.unit.leader, message)

    # --- what came of it ---

    def assert_exact(self, *ids: str) -> None:
        tokens: dict[str, list[int]] = {id_: [] for id_ in ids}
        for frames in self.network.front_outputs.get(0, []):
            for output in _outputs.decode(frames[0]).outputs:
                tokens[output.request_id] += output.new_token_ids
        assert tokens == dict.fromkeys(ids, expected_tokens(PROMPT, OUTPUT))
        assert [line for backend in self.backends for line in problems(backend)] == []
        cores = [core for backend in self.backends for core in backend.cores.values()]
        assert sum(core.num_requests for core in cores) == 0


def numbers_of(node: Node) -> tuple[int, int, int]:
    """Return how many requests were carried and recomputed, and what is left."""
    carried = sum(len(message.carried) for message in node.imported)
    recomputed = sum(len(message.recomputed) for message in node.imported)
    return carried, recomputed, sum(message.left == 0 for message in node.imported)


@pytest.mark.parametrize("copy_seconds", [0.0, 5 * STEP])
def test_from_single_engines_to_a_pair_and_back(copy_seconds: float) -> None:
    node = Node(copy_seconds=copy_seconds)
    ids = {SINGLES[0]: ["a", "b"], SINGLES[1]: ["c"]}
    for unit, names in ids.items():
        node.add(unit, *names)
    node.run_for(5 * STEP)
    node.switch({unit: (PAIRS[0], names) for unit, names in ids.items()}, [PAIRS[0]])
    node.run_for(15 * STEP)
    assert numbers_of(node) == (3, 0, 2)
    node.switch({PAIRS[0]: (SINGLES[1], ["a", "b", "c"])}, [])
    node.run_for(100 * STEP)
    assert numbers_of(node) == (6, 0, 3)
    node.assert_exact(*"abc")


def test_from_two_pairs_to_four_and_to_single_engines() -> None:
    node = Node()
    for pair in PAIRS:
        node.bind(pair)
    node.add(PAIRS[0], "a", "b")
    node.add(PAIRS[1], "c")
    node.run_for(5 * STEP)
    node.switch({PAIRS[0]: (FOUR, ["a", "b"]), PAIRS[1]: (FOUR, ["c"])}, [FOUR])
    node.run_for(10 * STEP)
    assert numbers_of(node) == (3, 0, 2)
    node.switch({FOUR: (SINGLES[3], ["a", "b", "c"])}, [])
    node.run_for(100 * STEP)
    node.assert_exact(*"abc")


def test_where_room_is_short_requests_come_in_portions() -> None:
    """What is dropped at the source makes room for the rest at the destination."""
    node = Node(num_blocks=45)
    node.add(SINGLES[0], "a", "b", "c", "d")
    node.run_for(6 * STEP)
    ids = ["a", "b", "c", "d"]
    node.switch({SINGLES[0]: (PAIRS[0], ids)}, [PAIRS[0]])
    node.run_for(200 * STEP)
    assert len(node.imported) > 1, [message.left for message in node.imported]
    assert numbers_of(node) == (4, 0, 1)
    node.assert_exact(*ids)


def test_a_full_pair_gives_up_one_request_for_each_engine_and_carries_the_rest() -> None:
    """What these two leave is room for the next two, and so on."""
    node = Node(num_blocks=41)
    node.bind(PAIRS[0], 41)
    ids = {SINGLES[0]: ["a", "b", "c", "d"], SINGLES[1]: ["e", "f", "g", "h"]}
    node.add(PAIRS[0], *"abcdefgh")
    node.run_for(6 * STEP)
    assert node.backends[0].groups[PAIRS[0]].load.free_blocks < 5, "less than a request takes"
    imports = [node.leave(PAIRS[0], unit, names) for unit, names in ids.items()]
    node.release(PAIRS[0])
    for message in imports:
        node.tell(message.unit.leader, message)
    node.run_for(ROOM_SECONDS / 2)
    assert numbers_of(node) == (0, 0, 0)
    node.run_for(ROOM_SECONDS)
    assert numbers_of(node) == (6, 2, 2)
    node.run_for(200 * STEP)
    node.assert_exact(*"abcdefgh")


def test_where_no_room_comes_they_are_computed_again() -> None:
    node = Node()
    target = node.backends[1].own
    lent = target.lend(100 - 8)
    node.add(SINGLES[0], "a", "b", "c", "d")
    node.run_for(6 * STEP)
    node.switch({SINGLES[0]: (SINGLES[1], ["a", "b", "c", "d"])}, [])
    node.run_for(ROOM_SECONDS / 2)
    assert numbers_of(node) == (0, 0, 0)
    computed_again = []
    for _ in range(3):
        node.run_for(1.1 * ROOM_SECONDS)
        computed_again.append(numbers_of(node)[1])
    assert computed_again == [1, 3, 4], "twice as many each time, so that nobody waits for long"
    assert numbers_of(node) == (0, 4, 1)
    target.take_back(lent)
    node.run_for(100 * STEP)
    node.assert_exact(*"abcd")
