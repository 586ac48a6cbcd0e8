"""The exchange of tokens for heads by all members at once, by collectives or peers' memory."""

import itertools
import mmap
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from shoal.loadgen.bench import all_to_all
from shoal.runtime.engine.groups.communicators import SpGroups
from shoal.runtime.engine.groups.head_order import base_of, head_shard, peers_of
from shoal.runtime.engine.groups.peer_memory import Slot, needed_words
from shoal.runtime.engine.sequence import peer_exchange_kernel
from shoal.runtime.engine.sequence.head_exchange import WORD, HeadExchange
from shoal.runtime.engine.sequence.peer_exchange import PeerExchange
from tests.depth import among

HEADS, SIZE = 8, 8

# --- all members of a group, each in a thread with gloo groups of its own ---


class SharedSlots:
    """``PeerMemory`` of members that are threads. What is read too late is not a number."""

    def __init__(self, place: int, slots: list[list[torch.Tensor]], barrier: Barrier) -> None:
        self._place, self._slots, self._barrier = place, slots, barrier
        self._published = 0

    def slot(self) -> Slot:
        return self._slot(self._published)

    def _slot(self, exchange: int) -> Slot:
        of_all = [mine[exchange % 2] for mine in self._slots]
        return Slot(of_all[self._place], torch.tensor([slot.data_ptr() for slot in of_all]))

    def publish(self) -> None:
        self._barrier.wait(timeout=240)
        # Everybody is done with the exchange before: whoever still read would see this.
        self._slot(self._published + 1).own.fill_(-1)
        self._barrier.wait(timeout=240)
        self._published += 1


WORDS = peer_exchange_kernel.words
KERNELS = {
    "give": peer_exchange_kernel._give_kernel,
    "take": peer_exchange_kernel._take_kernel,
}


class Interpreted:
    """A kernel through Triton's interpreter, which changes Triton's language while it runs one."""

    lock = Lock()

    def __init__(self, kernel: Any) -> None:
        self._kernel = InterpretedFunction(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with self.lock:
                self._kernel[grid](*args, **kwargs)

        return launch


@pytest.fixture(autouse=True)
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(peer_exchange_kernel, f"_{name}_kernel", Interpreted(kernel))
    monkeypatch.setattr(peer_exchange_kernel, "words", InterpretedFunction(WORDS.fn))


class Members:
    """Every member's exchange of one group, in one process, by collectives or peers' memory."""

    def __init__(self, tp: int, max_sp: int, kv_heads: int, *, peers: bool = False) -> None:
        self.tp, self.max_sp, self.kv_heads = tp, max_sp, kv_heads
        self._store = dist.HashStore()
        self.memories: dict[tuple[int, ...], tuple[list[list[torch.Tensor]], Barrier]] = {}
        for group in peers_of(tp, max_sp, kv_heads).sp:
            slots = [[torch.zeros(1 << 16, dtype=WORD) for _ in (0, 1)] for _ in group]
            self.memories[group] = slots, Barrier(len(group))
        make = self._peer_exchange if peers else self._exchange
        self.exchanges = self.each(make)

    def _exchange(self, member: int) -> HeadExchange:
        return HeadExchange(self._groups(member))

    def _peer_exchange(self, member: int) -> HeadExchange:
        group = next(group for group in self.memories if member in group)
        memory = SharedSlots(group.index(member), *self.memories[group])
        return PeerExchange(self._groups(member), memory)

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what every member's ``function`` returns; all run at the same time."""
        with ThreadPoolExecutor(self.tp) as pool:
            return list(pool.map(function, range(self.tp)))

    def _groups(self, member: int) -> SpGroups:
        peers = peers_of(self.tp, self.max_sp, self.kv_heads)
        within = self._group("within", member, peers.within)
        across = within and self._group("across", member, peers.across)
        return SpGroups(self._group("sp", member, peers.sp), across, within)

    def _group(self, kind: str, member: int, groups: Sequence[tuple[int, ...]]) -> Any:
        mine = next(group for group in groups if member in group)
        if len(mine) == 1 and kind != "sp":
            return None
        store = dist.PrefixStore(f"{kind}-{mine}", self._store)
        place, size = mine.index(member), len(mine)
        group = dist.ProcessGroup(store, place, size)
        gloo = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=240))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


def kept(tensor: torch.Tensor, shard: int, of: int) -> torch.Tensor:
    """Return a shard of the heads of ``[tokens, heads, size]`` as vLLM cuts them."""
    heads = tensor.shape[1]
    size = max(1, heads // of)
    return tensor.narrow(1, shard * heads // of, size)


@dataclass(frozen=True)
class Step:
    """What one step's attention gets, of the whole model and all tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def of_base(self, members: Members, member: int) -> list[torch.Tensor]:
        """Return what the base's projections give a member: a share of the tokens, its heads."""
        base = base_of(members.tp, members.max_sp)
        shard = head_shard(member % base.tp, base.tp, members.max_sp)
        exchange = members.exchanges[member]
        parts = [kept(tensor, shard, base.tp) for tensor in (self.query, self.key, self.value)]
        # Side by side in one tensor, as a projection leaves them.
        sizes = [part.shape[1] for part in parts]
        rows = torch.stack([exchange.own(column) for column in torch.cat(parts, 1).flatten(1).T], 1)
        return list(rows.unflatten(1, (-1, SIZE)).split(sizes, 1))


def random_step(tokens: int, kv_heads: int, dtype: torch.dtype, query_heads: int = HEADS) -> Step:
    draw = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, heads, SIZE) for heads in (query_heads, kv_heads, kv_heads))
    return Step(*(torch.randn(shape, generator=draw).to(dtype) for shape in shapes))


SHAPES = [
    (tp, max_sp, kv_heads)
    for tp, max_sp, kv_heads in itertools.product((2, 4, 8), (2, 4, 8), (1, 2, 4, 8))
    if max_sp <= tp
]


SHAPES_BY_PEERS = among([(2, 2, 1), (4, 4, 4)], (4, 2, 1), (8, 2, 1), (8, 4, 4), (8, 8, 4))
"""An interpreted kernel takes long: bases of all members and of some, with one KV head and with
several; ``BY_PEERS`` has another number."""


@pytest.mark.parametrize(
    ("tp", "max_sp", "kv_heads", "peers"),
    [*((*s, False) for s in SHAPES), *((*s, True) for s in SHAPES_BY_PEERS)],
)
def test_every_member_gets_the_heads_that_its_tp_layout_keeps(
    tp: int, max_sp: int, kv_heads: int, peers: bool
) -> None:
    """Of steps that a group does not divide, of fewer tokens than members, and that it divides."""
    members = Members(tp, max_sp, kv_heads, peers=peers)
    steps = [(13, torch.bfloat16), (3, torch.float32), (16, torch.float32)]
    # An interpreted kernel takes long, and has no other way for the last.
    for tokens, dtype in steps[:2] if peers else steps:
        step = random_step(tokens, kv_heads, dtype)

        def exchanged(member: int, step: Step = step) -> tuple[list[torch.Tensor], torch.Tensor]:
            exchange: HeadExchange = members.exchanges[member]
            exchange.begin(step.query.shape[0])
            inputs = step.of_base(members, member)
            heads = [tensor.clone() for tensor in exchange.to_heads(*inputs)]
            output = torch.empty(inputs[0].shape, dtype=inputs[0].dtype)
            padded = exchange.new_heads(output, heads[0].shape[1]).zero_()
            padded[: exchange.num_tokens] = heads[0]
            exchange.to_tokens(padded, output)
            assert torch.equal(output, inputs[0]), "there and back"
            return heads, exchange.gather(inputs[0].flatten(1))

        base = base_of(tp, max_sp)
        for member, (heads, gathered) in enumerate(members.each(exchanged)):
            shard = head_shard(member, tp, max_sp)
            for got, whole in zip(heads, (step.query, step.key, step.value), strict=True):
                assert torch.equal(got, kept(whole, shard, tp))
            place = head_shard(member % base.tp, base.tp, max_sp)
            assert torch.equal(gathered, kept(step.query, place, base.tp).flatten(1))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal grouped-query attention of ``[tokens, heads, size]`` each."""
    by_head = (tensor.transpose(0, 1) for tensor in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
    return attended.transpose(0, 1)


def attended_by_sequence(members: Members, step: Step) -> list[torch.Tensor]:
    """Return what every member has of attention that all compute, each for its heads."""

    def attended(member: int) -> torch.Tensor:
        exchange: HeadExchange = members.exchanges[member]
        exchange.begin(step.query.shape[0])
        inputs = step.of_base(members, member)
        mine = attention(*exchange.to_heads(*inputs))
        output = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        heads = exchange.new_heads(output, mine.shape[1]).zero_()
        heads[: exchange.num_tokens] = mine
        exchange.to_tokens(heads, output)
        return output

    return members.each(attended)


def matching(members: Members, outputs: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Return whether every member has its tokens and heads of ``whole``, padding left aside."""
    found = []
    for member, output in enumerate(outputs):
        expected = Step(whole, whole[:, :1], whole[:, :1]).of_base(members, member)[0]
        real = expected.flatten(1).any(1)
        found.append(torch.allclose(output[real], expected[real]))
    return all(found)


WIDE_SHAPES = [
    (tp, max_sp, kv_heads)
    for tp, max_sp, kv_heads in itertools.product((4, 8), (2, 4, 8), (1, 2, 4))
    if max_sp <= tp
]


BY_PEERS = [
    (*shape, True) for shape in among([(4, 4, 2), (8, 4, 2)], (4, 2, 2), (8, 2, 2), (8, 8, 2))
]
"""An interpreted kernel takes long; the test above has the other numbers of KV heads."""


@pytest.mark.parametrize(
    ("tp", "max_sp", "kv_heads", "peers"), [*((*s, False) for s in WIDE_SHAPES), *BY_PEERS]
)
def test_attention_by_sequence_is_that_of_the_whole_model(
    tp: int, max_sp: int, kv_heads: int, peers: bool
) -> None:
    """Three heads or six for each member, of fewer KV heads; 21 tokens leave padding."""
    members = Members(tp, max_sp, kv_heads, peers=peers)
    step = random_step(21, kv_heads, torch.float64, query_heads=24)
    outputs = attended_by_sequence(members, step)
    assert matching(members, outputs, attention(step.query, step.key, step.value))


def test_attention_to_other_kv_heads_is_another() -> None:
    """What the comparison above would say of KV heads that went to the wrong members."""
    members = Members(8, 8, 2)
    step = random_step(21, 2, torch.float64, query_heads=24)
    outputs = attended_by_sequence(members, step)
    assert matching(members, outputs, attention(step.query, step.key, step.value))
    swapped = attention(step.query, step.key.flip(1), step.value.flip(1))
    assert not matching(members, outputs, swapped)


@pytest.mark.parametrize("peers", [False, True], ids=["collectives", "peers"])
def test_types_may_differ(peers: bool) -> None:
    """A backend may want queries as FP8 beside keys and values that are not."""
    members = Members(4, 4, 2, peers=peers)
    step = random_step(9, 2, torch.bfloat16)
    step = replace(step, query=step.query.to(torch.float8_e4m3fn).view(torch.uint8))

    def exchanged(member: int) -> Sequence[torch.Tensor]:
        exchange: HeadExchange = members.exchanges[member]
        exchange.begin(9)
        first = member * exchange.share
        share = slice(first, first + exchange.share)
        padded = [
            nn.functional.pad(tensor, (0, 0, 0, 0, 0, 12 - 9))[share]
            for tensor in (step.query, step.key, step.value)
        ]
        return exchange.to_heads(*padded)

    for member, (query, key, value) in enumerate(members.each(exchanged)):
        assert torch.equal(query, kept(step.query, member, 4))
        assert torch.equal(key, kept(step.key, member, 4))
        assert torch.equal(value, kept(step.value, member, 4))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Return what members have used so far: collectives, each of a group, and kernels."""
    found: set[tuple[str, int]] = set()

    def collective(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*tensors: torch.Tensor, group: dist.ProcessGroup) -> Any:
            found.add((name, id(group)))
            return run(*tensors, group=group)

        return counted

    class Counted(Interpreted):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            found.add(("kernel", id(self)))
            return super().__getitem__(grid)

    for name in ("all_to_all_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, collective(name, getattr(dist, name)))
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(peer_exchange_kernel, f"_{name}_kernel", Counted(kernel))
    return found


@pytest.mark.parametrize("connects", [True, False], ids=["connected", "not-connected"])
@pytest.mark.parametrize("peers", [False, True], ids=["collectives", "peers"])
def test_the_first_step_uses_nothing_that_is_not_connected_and_compiled(
    used: set[tuple[str, int]], peers: bool, connects: bool
) -> None:
    members = Members(4, 4, 2, peers=peers)
    if connects:
        members.each(lambda member: members.exchanges[member].connect(torch.device("cpu")))
    before = set(used)
    step = random_step(9, 2, torch.float32)

    def first_step(member: int) -> None:
        exchange: HeadExchange = members.exchanges[member]
        exchange.begin(9)
        inputs = step.of_base(members, member)
        heads = exchange.to_heads(*inputs)[0]
        padded = exchange.new_heads(inputs[0], heads.shape[1]).zero_()
        exchange.to_tokens(padded, inputs[0].contiguous())
        exchange.gather(inputs[0].flatten(1))

    members.each(first_step)
    assert before if connects else not before
    assert (used == before) is connects


def test_the_benchmark_compares_what_each_way_gives() -> None:
    """Of peers' memory it may not keep what later exchanges write over."""
    args = Namespace(heads=HEADS, kv_heads=HEADS, size=SIZE, repeats=1)
    cpu = torch.device("cpu")
    results = []
    for peers in (False, True):
        members = Members(2, 2, HEADS, peers=peers)
        exchanges = members.exchanges
        results.append(
            members.each(lambda m, e=exchanges: all_to_all._timed("", e[m], args, 6, cpu, m))
        )
    for by_collectives, by_peers in zip(*results, strict=True):
        assert len(by_peers) == 5
        assert all(map(torch.equal, by_collectives, by_peers))


@pytest.mark.parametrize("name", ["give", "take"])
def test_each_kernel_compiles_for_a_gpu_in_one_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses have eight bytes, all else is a number of four, and nothing its value."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(peer_exchange_kernel, "words", WORDS)
    kernel = KERNELS[name]
    addresses = {"query", "key", "value", "slots", "out"}
    assert set(kernel.do_not_specialize) == {*kernel.arg_names} - {"tile"}
    types = {argument: "i64" if argument in addresses else "i32" for argument in kernel.arg_names}
    source = ASTSource(kernel, types | {"tile": "constexpr"}, {"tile": peer_exchange_kernel._TILE})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def low(words: int) -> torch.Tensor:
    """Return zeros at an address that four bytes hold, as those of a heap without randomisation."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40  # MAP_32BIT, which the module lacks
    tensor = torch.frombuffer(mmap.mmap(-1, words * WORD.itemsize, flags=flags), dtype=WORD)
    assert tensor.data_ptr() < 1 << 31
    return tensor


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="no memory is low there"
)
def test_addresses_may_be_small_numbers() -> None:
    """Which Triton takes for numbers of four bytes."""
    slots = [low(6), low(6)]
    addresses = torch.tensor([slot.data_ptr() for slot in slots])
    query, key, value = (low(2).view(1, 2, 1) for _ in range(3))
    for begin, tensor in zip((10, 20, 30), (query, key, value), strict=True):
        tensor += torch.tensor([begin, begin + 1]).view(1, 2, 1)
    peer_exchange_kernel.give([query, key, value], [1, 1, 1], addresses, 0, 1)
    assert [slot.tolist()[:3] for slot in slots] == [[10, 20, 30], [11, 21, 31]]
    out = low(2)
    peer_exchange_kernel.take(out, 1, (2, 1), 1, addresses, 0, 2)
    assert out.tolist() == [30, 31]


def test_a_slot_holds_all_that_a_member_gives_of_its_tokens() -> None:
    assert needed_words(tokens=2, bytes_of_token=128) == 32
    assert needed_words(tokens=3, bytes_of_token=48) == 32, "the last cache line is not full"


def test_one_slot_instead_of_two_would_be_seen() -> None:
    """What the comparisons above would say of members that write what others still read."""
    members = Members(2, 2, 8, peers=True)
    for slots, _ in members.memories.values():
        for mine in slots:
            mine[1] = mine[0]
    step = random_step(16, 8, torch.float32)

    def query(member: int) -> torch.Tensor:
        exchange: HeadExchange = members.exchanges[member]
        exchange.begin(16)
        return exchange.to_heads(*step.of_base(members, member))[0]

    for member, got in enumerate(members.each(query)):
        assert not torch.equal(got, kept(step.query, member, 2))
