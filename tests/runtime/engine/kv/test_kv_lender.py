"""KV buffers of which weights have memory: with GPUs whose memory is the host's, and on CPUs."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.kv_lender import KvLender, PiecesMemory
from shoal.runtime.engine.kv.kv_memory import HostMemory, Mapped
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.weights.sharing import filling as module
from shoal.runtime.engine.weights.sharing.descriptors import Descriptors
from shoal.runtime.engine.weights.sharing.device_pages import DevicePages, tensor_at
from shoal.runtime.engine.weights.sharing.filling import Filled, Filling
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.sharing.shared_weight import (
    ALIGNMENT,
    DOWN,
    GATE_UP,
    Degree,
    SharedWeight,
)
from shoal.runtime.engine.weights.sharing.slots import HostCopier
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights
from tests.preloaded import Process
from tests.runtime.engine.kv.test_backing import LAYERS, PAGE, config_of
from tests.runtime.engine.weights.sharing.simulated_cuda import HostDriver

HOST = torch.device("cpu")
BLOCKS = 10
SHAPES = {GATE_UP: (12, PAGE // 4), DOWN: (PAGE // 2, 6)}
"""Of whole weights, int8: 3 pages each, so a part ends within a page."""


class Engine:
    """One of two engines: what it keeps of the weights, and its KV buffer."""

    def __init__(self, directory: Path, place: int, blocks: int = BLOCKS) -> None:
        self.driver: Any = HostDriver()
        self.descriptors = Descriptors(directory, place)
        pages = DevicePages(HOST, self.driver)
        self.whole = WholeWeights(pages)
        self.whole.patience = 0.0  # no step streams here
        begin = 0
        self.weights: dict[str, SharedWeight] = {}
        for layer in range(LAYERS):
            for kind, shape in SHAPES.items():
                own = nested_shard(place, 2)
                weight = SharedWeight(layer, kind, shape, torch.int8, Degree(2, 2), own, begin)
                self.weights[f"{layer}.{kind}"] = weight
                self.whole.add(f"{layer}.{kind}", weight)
                begin += -(-weight.kept_bytes // ALIGNMENT) * ALIGNMENT
        draw = torch.Generator().manual_seed(place)
        self.kept = torch.randint(0, 256, (begin,), generator=draw, dtype=torch.uint8)
        for weight in self.weights.values():
            weight.keep_checksum(self.kept)
        self.lender = KvLender(place, pages, self.descriptors, self.whole)
        self.memory = self.lender.memory("test", HOST, config_of(blocks=blocks))
        self.raw = self.memory.allocate(LAYERS * blocks * PAGE)

    def fill(self, kept: dict[int, torch.Tensor], stages: int = 1) -> Filled:
        """Copy what both keep to the memory that KV lends."""
        filling = self.fill_again(kept, stages)
        assert filling is not None
        return filling.finish(HostCopier())

    def fill_again(self, kept: dict[int, torch.Tensor], stages: int) -> Filling | None:
        """Return what copies, None if there are copies."""
        return self.whole.fill(kept, self.lender.lent(self.raw, stages), stages)

    def wrong(self, other: "Engine") -> list[str]:
        """Return the weights of which the other's part is not what that one keeps."""
        found = []
        for name, weight in self.weights.items():
            seen = weight.within(self.whole.weight(name), 1 - weight.own, 2)
            expected = other.weights[name].part_in(other.kept)
            found += [] if torch.equal(seen, expected) else [name]
        return found


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    first, second = Engine(tmp_path, 0), Engine(tmp_path, 1)
    with closing(first.descriptors), closing(second.descriptors):
        yield [first, second]


def test_ends_of_layers_hold_weights_and_then_blocks_again(engines: list[Engine]) -> None:
    kept = {place: engine.kept for place, engine in enumerate(engines)}
    for engine, other in zip(engines, engines[::-1], strict=True):
        assert not engine.raw.any()
        assert engine.whole.moving_bytes() == [2 * PAGE] * 2 * LAYERS
        assert engine.lender.loan is not None
        assert engine.lender.loan.blocks == BLOCKS - 4
        blocks = engine.raw.view(LAYERS, BLOCKS, PAGE)[:, : BLOCKS - 4]
        for turn in range(1, 4):
            blocks.fill_(turn)
            engine.fill(kept)
            assert engine.wrong(other) == list(engine.weights), "slots are behind them still"
            calls = len(engine.driver.seen)
            engine.whole.use_copies()
            assert engine.wrong(other) == []
            assert len(engine.driver.seen) - calls == 1 + 3 * 2 * LAYERS, "settle, and each range"
            assert (blocks == turn).all()
            engine.whole.use_slots()
            assert engine.wrong(other) == list(engine.weights)
            assert (blocks == turn).all()
            assert not engine.raw.view(LAYERS, BLOCKS, PAGE)[:, BLOCKS - 4 :].any()


def in_the_midst(
    engines: list[Engine], look: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> Filled:
    """Fill an engine's memory layer by layer; ``look`` is told how many are copied, none first."""
    counts, claim = itertools.count(), Filling._claim

    def claimed(filling: Filling) -> Any:
        look(next(counts))
        return claim(filling)

    monkeypatch.setattr(module, "_FETCHED", 1)
    monkeypatch.setattr(Filling, "_claim", claimed)
    return engines[0].fill({place: engine.kept for place, engine in enumerate(engines)})


def test_steps_in_the_midst_of_copies_find_slots(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine, other), counts = engines, list[int]()

    def look(count: int) -> None:
        counts.append(count)
        assert not engine.whole.layers
        assert engine.wrong(other) == list(engine.weights), "slots are behind all addresses"

    assert in_the_midst(engines, look, monkeypatch)[:2] == (0, LAYERS)
    assert counts == list(range(LAYERS + 1))
    engine.whole.use_copies()
    assert engine.wrong(other) == []


def test_copies_that_are_used_in_the_midst_are_wrong(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: so much is wrong if weights are used before all are copied."""
    engine, other = engines
    wrong = list[int]()

    def look(count: int) -> None:
        if count == 1:
            engine.whole.use_copies()
            wrong.append(len(engine.wrong(other)))

    in_the_midst(engines, look, monkeypatch)
    assert wrong == [2 * (LAYERS - 1)]
    assert engine.wrong(other) == []


def test_nothing_is_made_or_given_back_by_a_change(engines: list[Engine]) -> None:
    engine = engines[0]
    engine.driver.seen.clear()
    kept = {place: engine.kept for place, engine in enumerate(engines)}
    engine.fill(kept)
    engine.whole.use_copies()
    engine.whole.use_slots()
    assert {what[0] for what in engine.driver.seen} == {"settle", "unmap", "map", "allow"}


@pytest.fixture
def opened(engines: list[Engine]) -> Iterator[Mapped]:
    told = engines[0].memory.handle(engines[0].raw)
    opened = engines[1].memory.open(os.getpid(), told)
    yield opened
    opened.close()


def test_others_see_all_of_the_buffer_at_one_address(engines: list[Engine], opened: Mapped) -> None:
    engine = engines[0]
    engine.raw.copy_((torch.arange(engine.raw.numel()) % 127).to(torch.int8))
    seen = tensor_at(opened.address, engine.raw.numel(), HOST).view(torch.int8)
    assert torch.equal(seen, engine.raw)
    kept = {place: of.kept for place, of in enumerate(engines)}
    engine.fill(kept)
    engine.whole.use_copies()
    assert torch.equal(seen, engine.raw), "also while weights have some of it"


def be_engine_1(directory: str, value: int) -> int:
    engine = Engine(Path(directory), 1)
    engine.raw.fill_(value)
    PeerBuffers(Path(directory), 1, engine.memory).announce(engine.raw)
    print("announced", flush=True)
    signal.pause()
    return 0


def test_the_memory_of_an_engine_that_ends_is_unmapped_and_its_successors_is_mapped(
    tmp_path: Path,
) -> None:
    own = Engine(tmp_path, 0)
    settled: list[int] = []
    peers = PeerBuffers(tmp_path, 0, own.memory, lambda: settled.append(len(own.driver.seen)))
    size = own.raw.numel()
    for life in range(1, 3):
        told = [str(tmp_path), life]
        with Process(f"{__name__}:{be_engine_1.__name__}", told, os.environ) as peer:
            assert peer.stdout.readline() == "announced\n"
            assert peers.open_all(2, 0.0) == {}
            with peers.reading():
                seen = tensor_at(peers.buffer(1).address, size, HOST)
                assert seen.unique().tolist() == [life]
            peer.kill()
        deadline = time.monotonic() + 120
        while own.driver.seen[-1] != ("free", size):
            assert time.monotonic() < deadline
            os.sched_yield()
        taken = [what[0] for what in own.driver.seen[settled[-1] :]]
        assert taken == ["unmap"] * (len(taken) - 1) + ["free"], "once nothing reads it"
        with peers.reading(), pytest.raises(NotSharedError, match="runner of engine 1 has ended"):
            peers.buffer(1)
    own.descriptors.close()


def test_a_buffer_of_an_engine_that_hands_out_nothing_is_refused(engines: list[Engine]) -> None:
    told = engines[0].memory.handle(engines[0].raw)
    with pytest.raises(NotSharedError, match=r"^engine 2 does not hand out its KV cache$"):
        engines[1].memory.open(os.getpid(), {**told, "engine": 2})


def test_kv_that_is_too_small_has_memory_that_does_not_move(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 0)
    with closing(engine.descriptors):
        memory = engine.lender.memory("test", HOST, config_of(blocks=5))
        assert engine.lender.loan is None
        assert isinstance(memory, HostMemory)
        assert isinstance(engine.memory, PiecesMemory)
        with pytest.raises(AssertionError, match="there is not enough memory"):
            engine.lender.lent(engine.raw)


def test_a_stage_gets_the_end_of_the_loan(engines: list[Engine]) -> None:
    engine, other = engines
    engine.whole.stages[2] = [0]
    engine.memory = engine.lender.memory("test", HOST, config_of(blocks_outermost=True))
    engine.raw = engine.memory.allocate(LAYERS * BLOCKS * PAGE)
    assert (engine.lender.blocks(), engine.lender.blocks(2)) == (BLOCKS - 4, BLOCKS - 2)
    kept = {place: each.kept for place, each in enumerate(engines)}
    blocks = engine.raw.view(BLOCKS, LAYERS, PAGE)[: BLOCKS - 2]
    for _ in range(2):
        blocks.fill_(7)
        engine.fill(kept, 2)
        engine.whole.use_copies()
        assert engine.wrong(other) == [name for name in engine.weights if name[0] != "0"]
        assert engine.fill_again(kept, 2) is None
        with pytest.raises(AssertionError, match="copies of other layers are in use"):
            engine.fill_again(kept, 1)
        assert (blocks == 7).all()
        engine.whole.use_slots()
        assert engine.wrong(other) == list(engine.weights)
        assert not engine.raw.view(BLOCKS, LAYERS, PAGE)[BLOCKS - 2 :].any()


def test_kv_that_is_too_small_for_all_weights_may_do_for_those_of_a_stage(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 0)
    engine.whole.stages |= {2: [0, 1], 4: [2]}
    for blocks, left in ((6, {1: 2, 2: 3, 4: 4}), (5, {1: 0, 2: 2, 4: 3}), (4, {1: 0, 2: 0, 4: 2})):
        config = config_of(blocks_outermost=True, blocks=blocks)
        assert isinstance(engine.lender.memory("test", HOST, config), PiecesMemory)
        assert {stages: engine.lender.blocks(stages) for stages in left} == left
    engine.descriptors.close()


def test_on_cpus_the_buffer_is_as_ever(tmp_path: Path, engines: list[Engine]) -> None:
    whole = WholeWeights(HostPages())
    for name, weight in engines[0].weights.items():
        whole.add(name, weight)
    lender = KvLender(0, HostPages(), engines[0].descriptors, whole)
    assert isinstance(lender.memory("test", HOST, config_of()), HostMemory)
    assert lender.loan == engines[0].lender.loan
