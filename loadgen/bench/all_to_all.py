"""Times the exchanges of a step by sequence, with collectives and through peers' memory.

``python -m shoal.loadgen.bench.all_to_all --members 2`` runs a process for each GPU. It prints how
many microseconds each exchange takes and for how many of them the host is busy, the GiB that
connecting took, and whether both kinds gave the same result. Without GPUs only collectives are
timed.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from shoal.policies.values.layouts import tensor_parallel
from shoal.runtime.engine.groups.communicators import SpGroups
from shoal.runtime.engine.groups.peer_memory import SymmetricMemory, needed_words
from shoal.runtime.engine.groups.rendezvous import Rendezvous, number_process
from shoal.runtime.engine.sequence.head_exchange import HeadExchange
from shoal.runtime.engine.sequence.peer_exchange import PeerExchange

_WARM_UP = 5


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time the exchanges of a step by sequence.")
    add = parser.add_argument
    add("--members", type=int, default=2, help="of the group (default: %(default)s)")
    add("--tokens", type=int, nargs="+", default=[1024, 8192], help="of a step")
    add("--heads", type=int, default=32, help="query heads of the model")
    add("--kv-heads", type=int, default=8, help="its KV heads, no fewer than members")
    add("--size", type=int, default=128, help="of a head")
    add("--repeats", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_member, (args, directory), nprocs=args.members)


def _member(place: int, args: argparse.Namespace, directory: str) -> None:
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", place) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    number_process(place, args.members)
    everyone = tuple(range(args.members))
    rendezvous = Rendezvous(Path(directory), tensor_parallel(everyone), place, 0, 60.0)
    sp = rendezvous.new_group(everyone, backend="nccl" if gpus else "gloo")
    finding = rendezvous.new_group(everyone, backend="gloo")
    groups = SpGroups(sp, None, None)
    row = (args.heads + 2 * args.kv_heads) * args.size * torch.bfloat16.itemsize
    share = -(-max(args.tokens) // args.members)

    def peers() -> HeadExchange:
        return PeerExchange(groups, SymmetricMemory(finding, needed_words(share, row), device))

    makers: dict[str, Callable[[], HeadExchange]] = {"collectives": lambda: HeadExchange(groups)}
    if gpus:
        # Peers come first, so that the memory of each kind is seen separately.
        makers = {"peers": peers, **makers}
    exchanges = {name: _connected(name, make, device, place) for name, make in makers.items()}
    for tokens in args.tokens:
        results = [
            _timed(name, exchange, args, tokens, device, place)
            for name, exchange in exchanges.items()
        ]
        if place == 0 and gpus:
            same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
            print(f"{tokens} tokens: {'the same' if same else 'DIFFERENT'} by both")
    dist.barrier(finding)


def _connected(
    name: str, make: Callable[[], HeadExchange], device: torch.device, place: int
) -> HeadExchange:
    before = _used(device)
    exchange = make()
    exchange.connect(device)
    if place == 0 and device.type == "cuda":
        torch.cuda.synchronize()
        print(f"{name}: connecting took {(_used(device) - before) / (1 << 30):.2f} GiB")
    return exchange


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _timed(
    name: str,
    exchange: HeadExchange,
    args: argparse.Namespace,
    tokens: int,
    device: torch.device,
    place: int,
) -> list[torch.Tensor]:
    """Print how long each exchange takes, and return the results of the exchanges."""
    exchange.begin(tokens)
    draw = torch.Generator().manual_seed(place)
    sizes = [args.heads, args.kv_heads, args.kv_heads]
    shape = (exchange.share, sum(sizes), args.size)
    fused = torch.randn(shape, generator=draw).to(device, torch.bfloat16)
    inputs = list(fused.split(sizes, 1))
    output = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)

    def to_heads() -> None:
        exchange.to_heads(inputs[0], inputs[1], inputs[2])

    # Copied, because a result is valid only until the exchange after the next one.
    given = [heads.clone() for heads in exchange.to_heads(inputs[0], inputs[1], inputs[2])]

    def to_tokens() -> None:
        heads = exchange.new_heads(output, args.heads // exchange.sp)
        heads[: exchange.num_tokens] = given[0]
        exchange.to_tokens(heads, output)

    def gather() -> None:
        exchange.gather(output.flatten(1))

    times = {f.__name__: _medians(f, args.repeats, device) for f in (to_heads, to_tokens, gather)}
    if place == 0:
        figures = ", ".join(
            f"{key} {seconds * 1e6:.0f} us (host {busy * 1e6:.0f})"
            for key, (seconds, busy) in times.items()
        )
        print(f"{name}, {tokens} tokens: {figures}")
    return [*given, output, exchange.gather(output.flatten(1))]


def _medians(
    function: Callable[[], None], repeats: int, device: torch.device
) -> tuple[float, float]:
    """Return the median seconds that a call takes on the device, and until it returns."""
    times = list(_each(function, repeats, device))[_WARM_UP:]
    return statistics.median(t for t, _ in times), statistics.median(t for _, t in times)


def _each(
    function: Callable[[], None], repeats: int, device: torch.device
) -> Iterator[tuple[float, float]]:
    for _ in range(_WARM_UP + repeats):
        events: Any = ()
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in (0, 1)]
            events[0].record()
        begin = time.perf_counter()
        function()
        busy = time.perf_counter() - begin
        if not events:
            yield busy, busy
            continue
        events[1].record()
        torch.cuda.synchronize()
        yield events[0].elapsed_time(events[1]) / 1e3, busy


if __name__ == "__main__":
    main()
