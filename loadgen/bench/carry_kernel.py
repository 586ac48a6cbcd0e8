"""Times how fast two GPUs read the KV of requests from each other, beside their copy engines.

``python -m shoal.loadgen.bench.carry_kernel`` needs two GPUs that reach each other's memory. With
one GPU both members are on it: then only the number of wrong words says something. It prints JSON:
for each case the milliseconds of the slower GPU, the GB/s of the bytes that came over the link,
what the host took to plan and launch, and how many of some words that were looked at are wrong. The
KV is that of the 8B Llama shape: 32 layers, 8 heads of 128 in 16 bits, in blocks of 16 tokens.

With ``--path host`` the KV goes through memory of the host, as between GPUs that cannot read each
other. Two GPUs need not reach each other then, and one GPU with two members says almost as much:
each byte goes to the host and comes back. The milliseconds are those of a clock, and the planning
is part of them. One case is read while a long kernel runs on the other GPU, for ``BUSY_SECONDS``:
if the copy waited for that, as a carry must not, its milliseconds would say so.

The JSON comes at the end, on stdout. Before that each member says on stderr what it does, and each
case is printed there when both members are through with it.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as multiprocessing

from shoal.loadgen.bench.member_processes import say
from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import Layout, Unit, alone, tensor_parallel
from shoal.runtime.clock import Clock
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, HostMemory, kv_memory
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.kv.staged_reader import Lane, StagedReader
from shoal.runtime.engine.kv.staging_memory import Pins, pins_of
from shoal.runtime.engine.kv.staging_server import StagingServer, address_of
from shoal.runtime.engine.link.instructions import Arrival

LAYERS, HEADS, SIZE, TOKENS = 32, 8, 128, 16
TOKEN_BYTES = 2 * SIZE * 2
PAIR = tensor_parallel((0, 1))
WORD = torch.int64
LOOKS = 4096
"""Words that are looked at after a case, of each source."""
_OWNER = 48
"""In what a word is at first: the bit from which on it says whose buffer it is of."""


class Case(NamedTuple):
    """Requests whose KV a TP2 group reads."""

    name: str
    requests: int
    tokens: int
    last: int
    """Only so many of its last tokens are read of each."""
    sources: Sequence[Unit]
    """Who has the requests, in turn."""
    busy: bool = False
    """Whether the first GPU computes something else meanwhile."""


CASES = (
    Case("8 requests of 4k, from one GPU", 8, 4096, 4096, (alone(0),)),
    Case("8 requests of 4k, half of them from each", 8, 4096, 4096, (alone(0), alone(1))),
    Case("1 request of 16k, from one GPU", 1, 16384, 16384, (alone(0),)),
    Case("the last 32 tokens of 8 requests, from one GPU", 8, 4096, 32, (alone(0),)),
)


REPEATS = {"peer": 10, "host": 3}
"""How often each case is timed. Through the host some cases take half a second."""
BUSY_SECONDS = 0.5
"""How long the other kernel runs, at least."""
BUSY = Case("8 requests of 4k, from one GPU that computes", 8, 4096, 4096, (alone(0),), busy=True)


class Carried(NamedTuple):
    """What a unit's requests of a case need: read in one go."""

    source: Unit
    requests: list[Arrival]


class TalkingPins:
    """``Pins`` that say what they pin, and how long that takes.

    Args:
        pins: do it.
        engine: the member whose device reaches the memory.
        clock: in seconds.
    """

    def __init__(self, pins: Pins, engine: int, clock: Clock = time.perf_counter) -> None:
        self._pins, self._engine, self._clock = pins, engine, clock

    def enter(self) -> None:
        """See ``Pins.enter``."""
        self._pins.enter()

    def pin(self, buffer: torch.Tensor) -> None:
        """See ``Pins.pin``."""
        began = self._clock()
        self._pins.pin(buffer)
        took = 1e3 * (self._clock() - began)
        say(self._engine, f"registered {buffer.numel()} bytes of the host in {took:.1f} ms")

    def unpin(self, buffer: torch.Tensor) -> None:
        """See ``Pins.unpin``."""
        self._pins.unpin(buffer)


def cases_of(path: str) -> Sequence[Case]:
    """Return what is timed of a path."""
    return CASES if path == "peer" else (*CASES, BUSY)


def pages_of(blocks: int, *, head_major: bool, layers: int = LAYERS) -> KvPages:
    """Return the pages of a buffer with so many blocks, layer after layer."""
    page = TOKENS * HEADS * TOKEN_BYTES
    first = tuple(layer * page * blocks for layer in range(layers))
    return KvPages(KvGeometry(layers, HEADS, TOKENS), first, page, TOKEN_BYTES, head_major)


def blocks_for(cases: Sequence[Case]) -> int:
    """Return the blocks of a buffer of which one half is read, and the other written."""
    return 2 * (max(case.requests * -(-case.tokens // TOKENS) for case in cases) + 1)


def carried(case: Case, pages: KvPages, blocks: int) -> list[Carried]:
    """Return the requests of a case, in blocks in any order."""
    draw = np.random.default_rng(0)
    free = {
        unit: (draw.permutation(blocks // 2 - 1) + first).tolist()
        for unit, first in {**dict.fromkeys(case.sources, 1), PAIR: blocks // 2}.items()
    }

    def take(unit: Unit) -> dict[int, list[list[int]]]:
        count = -(-case.tokens // pages.geometry.block(unit.layout).tokens)
        ids = [free[unit].pop() for _ in range(count)]
        return {engine: [ids] for engine in unit.engines}

    found = [Carried(unit, []) for unit in case.sources]
    for number in range(case.requests):
        unit, requests = found[number % len(found)]
        begin = case.tokens - case.last
        blocks_of = (take(unit), take(PAIR))
        requests.append(Arrival(str(number), [], [], case.tokens, None, begin, *blocks_of))
    return found


def fill(buffer: torch.Tensor, engine: int) -> None:
    """Let each word of a buffer say whose it is, and where it is."""
    words = buffer.view(WORD)
    torch.arange(len(words), out=words)
    words += engine << _OWNER


class Looks(NamedTuple):
    """Words to look at: of which request, token, head of the member, layer and token's word."""

    request: Any
    token: Any
    head: Any
    layer: Any
    word: Any

    def places(self, pages: KvPages, layout: Layout, blocks: list[list[int]], first: int) -> Any:
        """Return where they are in an engine's buffer, in words.

        Args:
            pages: of the buffer.
            layout: the layout of the unit that has the blocks.
            blocks: of each request.
            first: place of the member's first head among those of the engine.
        """
        page = pages.page(layout)
        nth, within = np.divmod(self.token, page.tokens)
        begin = np.array(pages.layers)[self.layer]
        begin += np.array(blocks)[self.request, nth] * page.stride
        begin += (self.head + first) * page.head_stride + within * page.token_stride
        return begin // WORD.itemsize + self.word


def wrong_words(
    buffer: torch.Tensor, engine: int, case: Case, pages: KvPages, given: Sequence[Carried]
) -> int:
    """Return how many of some words of a member's buffer are not what it should have read."""
    draw, wrong = np.random.default_rng(engine), 0
    heads = pages.page(PAIR.layout).heads
    words = TOKEN_BYTES // WORD.itemsize
    for unit, requests in given:
        lows = (0, case.tokens - case.last, 0, 0, 0)
        highs = (len(requests), case.tokens, heads, len(pages.layers), words)
        looks = Looks(*(draw.integers(*of, LOOKS) for of in zip(lows, highs, strict=True)))
        (owner,) = unit.engines
        sources = [request.source[owner][0] for request in requests]
        targets = [request.target[engine][0] for request in requests]
        read = looks.places(pages, unit.layout, sources, engine * heads)
        written = torch.from_numpy(looks.places(pages, PAIR.layout, targets, 0))
        found = buffer.view(WORD)[written.to(buffer.device)].cpu().numpy()
        wrong += int((found != read + (owner << _OWNER)).sum())
    return wrong


def time_case(
    reader: KvReader,
    given: Sequence[Carried],
    repeats: int,
    wait: Callable[[], object],
    clock: Clock = time.perf_counter,
    before: Callable[[], object] = lambda: None,
    first: Callable[[float], object] = lambda _: None,
) -> tuple[float, float, int]:
    """Return median milliseconds of the device and of the host, and the bytes that were read.

    Args:
        reader: reads the KV.
        given: what it reads.
        repeats: how often, after one time more.
        wait: waits for the other member.
        clock: in seconds.
        before: what the device is given before each time.
        first: told how many seconds the first time took, which does not count.
    """
    device, host, size = list[float](), list[float](), 0
    for number in range(repeats + 1):
        wait()
        before()
        wait()
        began = clock()
        reads = [reader.read(source, PAIR, requests) for source, requests in given]
        host.append(clock() - began)
        copied = [read() for read in reads]
        device.append(sum(one.seconds for one in copied))
        size = sum(one.bytes for one in copied)
        if number == 0:
            first(clock() - began)
    return 1e3 * statistics.median(device[1:]), 1e3 * statistics.median(host[1:]), size


def summary(case: str, of_members: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return what is printed of a case, from what each member found."""
    slowest = max(of_members, key=lambda found: found["ms"])
    link = max(found["link_bytes"] for found in of_members)
    return {
        "case": case,
        "ms": round(slowest["ms"], 3),
        "link GB/s": round(link / slowest["ms"] / 1e6, 1) if link else None,
        "host ms": round(max(found.get("host_ms", 0.0) for found in of_members), 3),
        "wrong words": int(sum(found.get("wrong", 0) for found in of_members)),
    }


def link_bytes(engine: int, given: Sequence[Carried], size: int) -> float:
    """Return how many of the bytes that a member has read came from the other one."""
    here = sum(len(requests) for source, requests in given if engine not in source.engines)
    return size * here / sum(len(requests) for _, requests in given)


def _compute() -> None:
    """Let this GPU run a kernel that takes ``BUSY_SECONDS`` at any clock rate below 2 GHz."""
    torch.cuda._sleep(int(2e9 * BUSY_SECONDS))


def _staged(
    engine: int, directory: Path, pages: KvPages, own: HeldBuffer, copier: Any, order: str
) -> StagedReader:
    """Let the other member have KV through the host, and return what reads its KV so."""
    directory = directory / order
    directory.mkdir(exist_ok=True)
    memory, pins = HostMemory("shoal-bench"), TalkingPins(pins_of(own.bytes.device), engine)
    StagingServer(address_of(directory, engine), [pages], own, copier, memory, pins)
    lane = partial(Lane, directory, [pages], own, memory, pins)
    return StagedReader(lane, lambda _: False)


def _member(engine: int, args: argparse.Namespace, directory: str, barrier: Any, out: Any) -> None:
    from shoal.runtime.engine.kv.device_copy import DeviceCopier

    through_host = args.path == "host"
    device = torch.device("cuda", engine % torch.cuda.device_count())
    torch.cuda.set_device(device)
    blocks = blocks_for(CASES)
    say(engine, f"has imported all, and allocates on {device}")
    memory = kv_memory("", device)
    buffer = memory.allocate(blocks * LAYERS * TOKENS * HEADS * TOKEN_BYTES)
    say(engine, f"has {buffer.numel()} bytes of KV")
    peers = PeerBuffers(Path(directory), engine, memory)
    if not through_host:
        # Where only the host's memory can be shared, announcing the device's fails.
        peers.announce(buffer)
        if problems := peers.open_all(2, 60.0):
            raise RuntimeError(problems[1 - engine])
    own = HeldBuffer(buffer)
    for order, head_major in (("NHD", False), ("HND", True)):
        pages = pages_of(blocks, head_major=head_major)
        copier, staged = DeviceCopier(own, [pages]), None
        say(engine, f"{order}: the kernel is compiled")
        if through_host:
            staged = _staged(engine, Path(directory), pages, own, copier, order)
            barrier.wait()
            staged.connect(1 - engine)
            say(engine, f"{order}: connected to the other member")
        reader = KvReader(engine, 1, [pages], own, peers, copier, staged)
        for case in cases_of(args.path):
            fill(buffer, engine)
            torch.cuda.synchronize()
            given = carried(case, pages, blocks)
            is_busy = case.busy and engine == 0
            before = _compute if is_busy else lambda: None
            name = f"{order}: {case.name}"

            def first(seconds: float, name: str = name) -> None:
                say(engine, f"{name}: the first copy took {1e3 * seconds:.1f} ms")

            ms, host_ms, size = time_case(
                reader, given, args.repeats, barrier.wait, before=before, first=first
            )
            wrong = wrong_words(buffer, engine, case, pages, given)
            link = link_bytes(engine, given, size)
            found = {"ms": ms, "host_ms": host_ms, "link_bytes": link, "wrong": wrong}
            out.put((engine, name, found))
            barrier.wait()
    if through_host:
        # Threads that serve the other member would abort a process that ends as usual.
        out.close()
        out.join_thread()
        os._exit(0)
    with peers.reading():
        ms = _copy_engine_ms(buffer, peers.buffer(1 - engine).address, args.repeats, barrier.wait)
    found = {"ms": ms, "link_bytes": buffer.numel() / 2}
    out.put((engine, "copy engines, both ways at once", found))
    barrier.wait()


def _copy_engine_ms(
    buffer: torch.Tensor, peer: int, repeats: int, wait: Callable[[], object]
) -> float:
    """Return the milliseconds to read half of the peer's buffer in one piece."""
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    cuda, times = CudaRTLibrary(), list[float]()
    half = buffer.numel() // 2
    addresses = ctypes.c_void_p(buffer.data_ptr() + half), ctypes.c_void_p(peer)
    for _ in range(repeats + 1):
        wait()
        began = time.perf_counter()
        cuda.cudaMemcpy(*addresses, half)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def _next(out: Any, members: Any) -> Any:
    """Return what a member has found next; raise what a member has raised instead."""
    while True:
        try:
            return out.get(timeout=1.0)
        except Empty:
            members.join(timeout=0.0)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time reading KV from another GPU.")
    repeats = ", ".join(f"{count} of {path}" for path, count in REPEATS.items())
    parser.add_argument("--repeats", type=int, help=f"of each case (default: {repeats})")
    parser.add_argument("--path", choices=("peer", "host"), default="peer")
    args = parser.parse_args()
    args.repeats = args.repeats or REPEATS[args.path]
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(2), context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        members = multiprocessing.spawn(
            _member, (args, directory, barrier, out), nprocs=2, join=False
        )
        found = dict[str, dict[int, dict[str, float]]]()
        rows = list[dict[str, Any]]()
        for _ in range(2 * (2 * len(cases_of(args.path)) + (args.path == "peer"))):
            engine, name, values = _next(out, members)
            found.setdefault(name, {})[engine] = values
            if len(found[name]) == 2:
                rows.append(summary(name, list(found[name].values())))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        while not members.join():
            pass
    machine = {"device": torch.cuda.get_device_name(), "gpus": min(2, torch.cuda.device_count())}
    machine |= {"torch": torch.__version__, "path": args.path}
    print(json.dumps({**machine, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
