"""A member reads all KV that its blocks are to hold, and writes nothing else."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.runtime.engine.kv.host_copy import HostCopier, plain_order
from shoal.runtime.engine.kv.kv_memory import HeldBuffer
from shoal.runtime.engine.kv.kv_pages import Page
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from tests.runtime.engine.kv.carried_kv import CASES, Case, Engines


class Neighbours(PeerBuffers):
    """Buffers that this process has anyway."""

    def __init__(self, buffers: dict[int, torch.Tensor]) -> None:
        unused: Any = None
        super().__init__(Path(), -1, unused)
        self._buffers = buffers

    def buffer(self, engine: int) -> HeldBuffer:
        return HeldBuffer(self._buffers[engine])


def order(case: Case, element: int, _group: int, page: Page) -> torch.Tensor:
    return plain_order(page, case.token_bytes, element)


@pytest.mark.parametrize("element", [1, 2, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_member_reads_what_it_is_to_hold_and_writes_nothing_else(
    case: Case, element: int
) -> None:
    engines = Engines(case)
    for engine in case.target.engines:
        expected, buffer = engines.expected(engine), engines.buffers[engine]
        assert not buffer.equal(expected)
        own = HeldBuffer(buffer)
        reader = KvReader(
            engine,
            case.max_sp,
            [case.pages],
            own,
            Neighbours(engines.buffers),
            HostCopier(partial(order, case, element)),
        )
        copied = reader.read(case.source, case.target, engines.requests)()
        assert buffer.equal(expected)
        tokens = sum(request.computed - request.begin for request in engines.requests)
        heads = max(1, case.heads // case.target.layout.tp)
        layers = case.layers // case.target.layout.pp
        assert copied.bytes == tokens * heads * layers * case.token_bytes
        assert not copied.problem
