"""Engines whose buffers hold known KV, and what a unit has to find after it has read that KV."""

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import Layout, Unit, alone, tensor_parallel
from shoal.runtime.engine.kv.carry_plan import heads_of
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.link.instructions import Arrival

BLOCKS = 96
"""Blocks of an engine's buffer."""
EMPTY = 0x5A
"""What every byte of a buffer is before anything is written to it."""
GROUP, WIDE = tensor_parallel((0, 1)), tensor_parallel((0, 1, 2, 3))
STAGES, LONG = Unit((0, 1), Layout(pp=2)), Unit((0, 1, 2, 3), Layout(pp=4))
BOTH = Unit((0, 1, 2, 3), Layout(tp=2, pp=2))


@dataclass(frozen=True)
class Case:
    """Units between which requests go, and what their KV is like."""

    source: Unit
    target: Unit
    heads: int = 4
    tokens: int = 4
    layers: int = 2
    token_bytes: int = 16
    head_major: bool = True
    kernel_limit: int = 1 << 20
    """Attention kernels divide larger blocks."""
    block_outermost: bool = False
    max_sp: int = 1
    spans: tuple[tuple[int, int], ...] = ((0, 21), (0, 1), (0, 16), (8, 37))
    """For each request its first token that is read, and how many it has computed."""

    @property
    def pages(self) -> KvPages:
        """The pages of the only KV group."""
        page = self.heads * self.tokens * self.token_bytes
        packed = page * self.layers
        step, stride = (page, packed) if self.block_outermost else (page * BLOCKS, page)
        return KvPages(
            KvGeometry(self.layers, self.heads, self.tokens),
            tuple(layer * step for layer in range(self.layers)),
            stride,
            self.token_bytes,
            self.head_major,
            lambda tokens: min(tokens, self.kernel_limit),
        )

    @property
    def size(self) -> int:
        """Bytes of an engine's buffer."""
        return BLOCKS * self.layers * self.heads * self.tokens * self.token_bytes


CASES = {
    "DP to TP2": Case(alone(1), GROUP),
    "DP of another engine to TP2": Case(alone(3), GROUP),
    "DP to TP2, NHD": Case(alone(0), GROUP, head_major=False),
    "TP2 to DP": Case(GROUP, alone(1)),
    "TP2 to DP, NHD": Case(GROUP, alone(2), head_major=False),
    "DP to DP": Case(alone(0), alone(1)),
    "TP2 to TP4": Case(GROUP, WIDE),
    "TP4 to TP2 of others, NHD": Case(WIDE, tensor_parallel((4, 5)), head_major=False),
    "SP2 of TP4 to DP": Case(WIDE, alone(0), heads=8, max_sp=2),
    "DP to SP2 of TP4": Case(alone(5), WIDE, heads=8, max_sp=2),
    "TP2 to SP4 of TP8": Case(GROUP, tensor_parallel(range(8)), heads=8, max_sp=4),
    "more members than heads": Case(alone(2), WIDE, heads=2),
    "fewer members again": Case(WIDE, alone(2), heads=2),
    "the same heads twice": Case(WIDE, tensor_parallel((4, 5, 6, 7)), heads=2, max_sp=2),
    "blocks outermost": Case(alone(0), GROUP, block_outermost=True),
    "blocks that kernels divide": Case(alone(0), WIDE, kernel_limit=8),
    "blocks that kernels divide, back": Case(WIDE, alone(0), kernel_limit=8, head_major=False),
    "DP to PP2": Case(alone(1), STAGES, layers=4, block_outermost=True),
    "PP2 to DP": Case(STAGES, alone(2), layers=4, block_outermost=True),
    "PP2 to TP2, NHD": Case(STAGES, GROUP, layers=4, head_major=False, block_outermost=True),
    "TP2 to PP2": Case(GROUP, STAGES, layers=4, block_outermost=True),
    "PP4 to TP2 x PP2": Case(LONG, BOTH, layers=4, block_outermost=True),
    "TP2 x PP2 to PP4, NHD": Case(BOTH, LONG, layers=4, head_major=False, block_outermost=True),
    "TP4 with SP2 to TP2 x PP2": Case(WIDE, BOTH, 8, layers=4, block_outermost=True, max_sp=2),
    "TP2 x PP2 to DP, one head": Case(BOTH, alone(3), 1, layers=4, block_outermost=True),
}


@functools.cache
def _bytes_of(seed: int, count: int) -> torch.Tensor:
    """Return so many random bytes, which most tests ask for again."""
    numbers = random.Random(seed)
    return torch.tensor([numbers.randrange(-128, 128) for _ in range(count)])


class Engines:
    """The buffers of a node's engines, and requests whose KV the source unit's members hold."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._random = random.Random(seed)
        engines = {*case.source.engines, *case.target.engines}
        self.buffers = {
            engine: torch.full((case.size,), EMPTY, dtype=torch.int8) for engine in engines
        }
        self._free = {
            engine: self._random.sample(range(1, BLOCKS), BLOCKS - 1) for engine in engines
        }
        self.requests = [self._arrival(i, *span) for i, span in enumerate(case.spans)]
        for request, place in self._places(case.source):
            self._cells(case.source, request.source, *place)[:] = self._content(request, *place)

    def _arrival(self, number: int, begin: int, computed: int) -> Arrival:
        source = self._blocks(self.case.source, computed)
        target = self._blocks(self.case.target, computed)
        name = f"request {number}"
        return Arrival(name, [], [], computed, None, begin, source, target)

    def _blocks(self, unit: Unit, tokens: int) -> dict[int, list[list[int]]]:
        count = -(-tokens // self.case.pages.geometry.block(unit.layout).tokens)
        return {e: [[self._free[e].pop() for _ in range(count)]] for e in unit.engines}

    def _places(self, unit: Unit) -> Iterator[tuple[Arrival, tuple[int, int, int, int, int]]]:
        """Yield request, and layer, engine, head of the model, slot and token of all its KV."""
        for member, engine in enumerate(unit.engines):
            heads = heads_of(member, unit.layout, self.case.heads, self.case.max_sp)
            for layer, (slot, head), request in itertools.product(
                self._layers(member, unit.layout), enumerate(heads), self.requests
            ):
                for token in range(request.computed):
                    yield request, (layer, engine, head, slot, token)

    def _layers(self, member: int, layout: Layout) -> range:
        each, stage = self.case.layers // layout.pp, member // layout.tp
        return range(stage * each, (stage + 1) * each)

    def _cells(
        self,
        unit: Unit,
        blocks: dict[int, list[list[int]]],
        layer: int,
        engine: int,
        _head: int,
        slot: int,
        token: int,
    ) -> torch.Tensor:
        """Return the bytes of one token and head, found without the code that is tested."""
        case, kind = self.case, unit.layout
        block_tokens = case.pages.geometry.block(kind).tokens
        heads, layers = max(1, case.heads // kind.tp), case.layers // kind.pp
        kernel = min(block_tokens, case.kernel_limit)
        nth, within = divmod(token, block_tokens)
        part, within = divmod(within, kernel)
        block = blocks[engine][0][nth]
        order = (heads, kernel) if case.head_major else (kernel, heads)
        shape = (BLOCKS, layers) if case.block_outermost else (layers, BLOCKS)
        layer %= layers
        rows = self.buffers[engine].view(*shape, block_tokens // kernel, *order, case.token_bytes)
        row = (slot, within) if case.head_major else (within, slot)
        chosen = (block, layer) if case.block_outermost else (layer, block)
        return rows[(*chosen, part, *row)]

    def _content(
        self, request: Arrival, layer: int, _engine: int, head: int, _slot: int, token: int
    ) -> torch.Tensor:
        name = int(request.request_id.split()[-1])
        return _bytes_of(hash((name, layer, head, token)), self.case.token_bytes)

    def expected(self, engine: int) -> torch.Tensor:
        """Return what a member of the target has to have once it has read all."""
        before = self.buffers[engine].clone()
        for request, place in self._places(self.case.target):
            if place[1] == engine and place[-1] >= request.begin:
                cells = self._cells(self.case.target, request.target, *place)
                cells[:] = self._content(request, *place)
        after, self.buffers[engine] = self.buffers[engine], before
        return after
