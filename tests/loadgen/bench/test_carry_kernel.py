"""The benchmark of reading KV from another GPU, with Triton's interpreter in place of GPUs."""

import json
from typing import Any

import pytest
import torch

from shoal.loadgen.bench import carry_kernel as bench
from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.engine.kv.kv_memory import HeldBuffer
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.staging_memory import NoPins
from shoal.runtime.engine.link.instructions import Copied
from tests.runtime.engine.kernels.test_kv_copy_kernel import InterpretedCopier, interpreted
from tests.runtime.engine.kv.test_kv_reader import Neighbours

__all__ = ["interpreted"]

CASES = (
    bench.Case("from one", 2, 40, 40, (alone(0),)),
    bench.Case("from each", 4, 40, 40, (alone(0), alone(1))),
    bench.Case("tails", 2, 40, 8, (alone(0),)),
)
LAYERS = 2


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_members_read_what_it_looks_for(case: bench.Case, head_major: bool) -> None:
    blocks = bench.blocks_for(CASES)
    pages = bench.pages_of(blocks, head_major=head_major, layers=LAYERS)
    given = bench.carried(case, pages, blocks)
    size = pages.layers[1] * LAYERS
    buffers = {engine: torch.zeros(size, dtype=torch.int8) for engine in (0, 1)}
    for engine, buffer in buffers.items():
        bench.fill(buffer, engine)
    for engine, buffer in buffers.items():
        own = HeldBuffer(buffer)
        copier = InterpretedCopier(32)
        reader = KvReader(engine, 1, [pages], own, Neighbours(buffers), copier)
        looked = (buffer, engine, case, pages, given)
        assert bench.wrong_words(*looked) == bench.LOOKS * len(case.sources)
        _, _, size = bench.time_case(reader, given, 1, wait=lambda: None)
        assert bench.wrong_words(*looked) == 0
        tokens = case.requests * case.last
        assert size == tokens * LAYERS * bench.HEADS // 2 * bench.TOKEN_BYTES
        others = [r for source, requests in given if engine not in source.engines for r in requests]
        assert bench.link_bytes(engine, given, size) == size * len(others) / case.requests


class Reader:
    """Says that a read took so many milliseconds, after so many of the host."""

    def __init__(self, clock: ManualClock, milliseconds: list[float]) -> None:
        self._clock, self._milliseconds = clock, milliseconds

    def read(self, *_: object) -> Any:
        self._clock.advance(0.002)
        return lambda: Copied(100, self._milliseconds.pop(0) / 1e3)


def test_the_first_time_does_not_count() -> None:
    clock, waits = ManualClock(), list[None]()
    reader: Any = Reader(clock, [50.0, 3.0, 9.0, 4.0])
    given = [bench.Carried(alone(0), [])]
    firsts = list[float]()
    found = bench.time_case(
        reader, given, 3, wait=lambda: waits.append(None), clock=clock, first=firsts.append
    )
    assert firsts == [pytest.approx(0.002)]
    assert found == (pytest.approx(4.0), pytest.approx(2.0), 100)
    assert len(waits) == 2 * 4


@pytest.mark.parametrize("path", ["peer", "host"])
def test_each_path_is_timed_with_its_cases(path: str) -> None:
    assert [case.busy for case in bench.cases_of(path)].count(True) == (path == "host")


def test_members_say_what_they_register_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, reached = ManualClock(), list[torch.Tensor]()

    class SlowPins(NoPins):
        def pin(self, buffer: torch.Tensor) -> None:
            clock.advance(0.5)
            reached.append(buffer)

    buffer = torch.zeros(4096, dtype=torch.int8)
    bench.TalkingPins(SlowPins(), 1, clock).pin(buffer)
    assert reached == [buffer]
    said = capsys.readouterr().err
    assert said.endswith("s, member 1: registered 4096 bytes of the host in 500.0 ms\n")


def test_the_slower_member_counts_and_all_that_is_wrong() -> None:
    members = [
        {"ms": 1.0, "host_ms": 0.3, "link_bytes": 0.0, "wrong": 1.0},
        {"ms": 2.0, "host_ms": 0.2, "link_bytes": 6e8, "wrong": 2.0},
    ]
    assert json.loads(json.dumps(bench.summary("a", members))) == {
        "case": "a",
        "ms": 2.0,
        "link GB/s": 300.0,
        "host ms": 0.3,
        "wrong words": 3,
    }
