"""KV goes to memory of the host and from there to any unit, and every byte is in its place."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs

from shoal.policies.values.layouts import tier_of
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.host_copy import HostCopier
from shoal.runtime.engine.kv.kv_memory import HeldBuffer
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.staging_memory import NoPins
from shoal.runtime.engine.kv.tier_memory import Tiers
from tests.runtime.engine.kv.carried_kv import BLOCKS, CASES, EMPTY, Case, Engines
from tests.runtime.engine.kv.test_kv_reader import Neighbours, order

FROM_DP = {name: case for name, case in CASES.items() if case.source.size == 1}


class CountedPins(NoPins):
    """Counts what is pinned, and refuses it if it is told to."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: list[int] = []

    def pin(self, buffer: torch.Tensor) -> None:
        if self.refuses:
            raise NotSharedError("memory of the host cannot be pinned (CUDA error 2)")
        self.pinned.append(buffer.numel())


def reader(case: Case, engine: int, engines: Engines, tiers: Tiers) -> KvReader:
    own, neighbours = HeldBuffer(engines.buffers[engine]), Neighbours(engines.buffers)
    copier = HostCopier(partial(order, case, 8))
    return KvReader(engine, case.max_sp, [case.pages], own, neighbours, copier, None, tiers)


@pytest.mark.parametrize("late", [0, 1], ids=["", "a block late"])
@pytest.mark.parametrize("case", FROM_DP.values(), ids=list(FROM_DP))
def test_members_find_in_the_tier_what_the_engine_had(
    case: Case, tmp_path: Path, late: int
) -> None:
    (source,), tier = case.source.engines, tier_of(case.source.leader)
    engines = Engines(case)
    expected = {engine: engines.expected(engine) for engine in case.target.engines}
    all_tiers = {
        engine: Tiers(tmp_path, engine, case.size, [case.pages], NoPins())
        for engine in {source, *case.target.engines}
    }
    assert all_tiers[source].blocks == BLOCKS - 1
    # Parked in blocks of the tier, from the last one on.
    free = iter(range(BLOCKS - 1, 0, -1))
    parked = {
        r.request_id: {source: [[next(free) for _ in r.source[source][0]]]}
        for r in engines.requests
    }
    going = [structs.replace(r, begin=0, target=parked[r.request_id]) for r in engines.requests]
    parking = reader(case, source, engines, all_tiers[source])
    copied = parking.read(case.source, tier, going, beside=True)()
    sizes = case.heads * case.layers * case.token_bytes
    assert copied.bytes == sizes * sum(r.computed for r in engines.requests)
    if source not in case.target.engines:
        engines.buffers[source].fill_(EMPTY)  # others have its blocks now
    back = [
        structs.replace(
            r, source={e: [[b - late for b in ids] for ids in g] for e, g in blocks.items()}
        )
        for r in engines.requests
        for blocks in [parked[r.request_id]]
    ]
    for engine in case.target.engines:
        reading = reader(case, engine, engines, all_tiers[engine])
        reading.read(tier, case.target, back)()
    found = [engines.buffers[engine].equal(expected[engine]) for engine in case.target.engines]
    assert all(found) != bool(late)


def test_all_tiers_are_mapped_and_pinned_at_the_start(tmp_path: Path) -> None:
    case, pins = CASES["DP to TP2"], CountedPins()
    size = case.pages.block_bytes * 10
    tiers = [Tiers(tmp_path, engine, size, [case.pages], pins) for engine in range(2)]
    assert pins.pinned == [size] * 2
    assert [each.open_all(2, 1.0) for each in tiers] == ["", ""]
    assert pins.pinned == [size] * 4
    assert "engine 2" in tiers[0].open_all(3, 0.0)


def test_memory_that_cannot_be_pinned_is_refused_and_others_hear_of_it(tmp_path: Path) -> None:
    case = CASES["DP to TP2"]
    other = Tiers(tmp_path, 1, 1 << 20, [case.pages], CountedPins())
    kept = files_of_tiers(tmp_path)
    with pytest.raises(NotSharedError, match="cannot be pinned"):
        Tiers(tmp_path, 0, 1 << 20, [case.pages], CountedPins(refuses=True))
    assert "cannot be pinned" in other.open_all(2, 0.0)
    assert files_of_tiers(tmp_path) == kept
    assert kept


def files_of_tiers(directory: Path) -> list[Path]:
    """Return this process's descriptors of tiers' memory, which keep that memory from ending."""
    files = Path("/proc/self/fd").iterdir()
    return [file for file in files if f"memfd:{directory.name}-tier" in os.path.realpath(file)]


def test_a_tier_that_is_smaller_than_two_blocks_holds_nothing(tmp_path: Path) -> None:
    case = CASES["DP to TP2"]
    assert Tiers(tmp_path, 0, case.pages.block_bytes, [case.pages], NoPins()).blocks == 0
