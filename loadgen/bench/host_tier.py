"""What a policy that re-shards could win with a buffer for KV in the host's memory (Seesaw, 4.2).

    python -m shoal.loadgen.bench.host_tier --hardware l40s --prompt-tokens 3000 --outputs 40 360

All requests are there at the beginning, and their outputs have lengths between two bounds. Each
static layout serves them in virtual time. A *cycle* computes prompts in DP until the host's memory
is full of their KV, which is written there beside the steps. Then it decodes in another layout. A
request is read from the host, beside the steps, as soon as a unit has room for all of its tokens.
When the host's memory is empty and prompts are left, the KV of the requests that still run is
written there, while nothing is computed, and the next cycle begins. So the batch is full until the
last prompts have been read.

It is a bound, because reads and writes take nothing from the steps beside them, and because lengths
are known when room is looked for. In DP no request decodes beside the prompts, as it could.

Beside the bound stands what the policy ``batch`` does, without any buffer and with it, and with
``--share-weights`` on engines that share weights and may get those of a pipeline's stage whole.

A static layout has the room for KV that Shoal's engines leave in that layout, and these hold all
weights. Each GPU of stock vLLM holds only its unit's part of them, so it has more room for KV with
the same memory: ``--divide-weights`` gives static layouts this room.
"""

import argparse
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from shoal.loadgen.workload import Arrival
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout
from shoal.policies.values.partition import Partition
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import BLOCK_TOKENS, MEMORY_SHARE, read_shape
from shoal.runtime.simulation.simulated_node import simulate

SEED = 1
"""Of the lengths of outputs."""
WHOLE_PROMPTS = 8192
"""Tokens of the steps of a cycle."""


def requests(count: int, prompt: int, output: int) -> list[Arrival]:
    """Return equal requests that come at once."""
    return [Arrival(0.0, prompt, output, 0) for _ in range(count)]


def seconds(node: Node, layout: Layout, chunk: int, asked: Sequence[Arrival]) -> float:
    """Return the time in which a layout serves requests.

    Args:
        node: the node.
        layout: that of all engines.
        chunk: most tokens of a step.
        asked: the requests.
    """
    found = replace(node, layout=layout, max_pp=layout.pp, max_num_batched_tokens=chunk)
    return max(life.ended or 0.0 for life in simulate(found, "manual", asked).lives)


def layouts(engines: int) -> list[Layout]:
    """Return all static layouts: groups of 1, 2, 4 or 8 engines, with and without stages."""
    sizes = [size for size in (1, 2, 4, 8) if size <= engines]
    return [Layout(tp=tp, pp=pp) for tp in sizes for pp in sizes if tp * pp <= engines]


@dataclass(frozen=True, slots=True)
class HostTier:
    """The host's memory for KV, and the way to it."""

    size: float
    """Bytes, of the whole node."""
    bytes_per_second: float
    """Rate of each GPU, each way."""
    switch_seconds: float = 0.1
    """Time of a switch in which nothing is carried."""


@dataclass(slots=True)
class Parked:
    """A request whose KV is in the host's memory, or on its way from there."""

    tokens: int
    left: int
    """Tokens of its output that are still to come."""

    @property
    def end(self) -> int:
        """Its tokens when it ends."""
        return self.tokens + self.left


@dataclass(slots=True)
class _Unit:
    """A unit that decodes; times are seconds since the cycle's decoding began."""

    room: int
    """Tokens that are free."""
    now: float = 0.0
    link: float = 0.0
    """When the last of its reads ends."""
    reading: deque[tuple[float, Parked]] = field(default_factory=deque)
    """Requests, each with the time at which it is there."""
    running: list[Parked] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.reading)


class Decoding:
    """All units of a layout, which decode what the host's memory holds.

    Args:
        node: the node.
        layout: that of all engines.
        tier: the host's memory.
    """

    def __init__(self, node: Node, layout: Layout, tier: HostTier) -> None:
        size = layout.world_size
        self._layout, self._step = layout, node.step_times()
        self._block = BLOCK_TOKENS * layout.tp
        self._seats = node.max_num_seqs
        self._token = node.shape.model_shape().kv_bytes_per_token
        self._read = self._token / (size * tier.bytes_per_second)
        blocks = node.hardware.num_blocks(node.shape)
        self._units = [_Unit(blocks * self._block) for _ in range(node.engines // size)]

    def run(self, parked: deque[Parked], *, to_the_end: bool) -> tuple[float, list[Parked]]:
        """Decode, and return the seconds and the requests that still run then.

        Args:
            parked: what the host's memory holds, in the order in which it is read.
            to_the_end: whether to decode until all have ended; otherwise until all are read.
        """
        busy = list(self._units)
        while busy and (parked or to_the_end):
            unit = min(busy, key=lambda one: one.now)
            self._admit(unit, parked)
            if unit.running:
                self._decode(unit)
            elif unit.reading:
                unit.now = unit.reading[0][0]
            else:
                busy.remove(unit)
        left = [one for unit in self._units for one in unit.running]
        left += [one for unit in self._units for _, one in unit.reading]
        return max(max(unit.now, unit.link) for unit in self._units), left

    def _rows(self, request: Parked) -> int:
        return -(-request.end // self._block) * self._block

    def _even_share(self, parked: int) -> int:
        return -(-(parked + sum(unit.requests for unit in self._units)) // len(self._units))

    def _admit(self, unit: _Unit, parked: deque[Parked]) -> None:
        seats = min(self._seats, self._even_share(len(parked)))
        while parked and unit.requests < seats and self._rows(parked[0]) <= unit.room:
            request = parked.popleft()
            unit.room -= self._rows(request)
            unit.link = max(unit.link, unit.now) + request.tokens * self._read
            unit.reading.append((unit.link, request))
        while unit.reading and unit.reading[0][0] <= unit.now:
            unit.running.append(unit.reading.popleft()[1])

    def _decode(self, unit: _Unit) -> None:
        batch = Batch(len(unit.running), sum(one.tokens for one in unit.running))
        unit.now += self._step(self._layout, batch)
        for one in unit.running:
            one.tokens, one.left = one.tokens + 1, one.left - 1
        unit.room += sum(self._rows(one) for one in unit.running if one.left == 0)
        unit.running = [one for one in unit.running if one.left]


def cycles(
    node: Node, decode: Layout, tier: HostTier, prompt: int, outputs: Sequence[int]
) -> tuple[float, int]:
    """Return the seconds in which cycles serve requests, and the number of cycles.

    Args:
        node: the node.
        decode: the layout of outputs; prompts are computed in DP.
        tier: the host's memory, with room for more than the GPUs hold.
        prompt: tokens of each prompt.
        outputs: tokens of each output; the first of them comes with the prompt.

    Raises:
        ValueError: the host's memory has no room for what is left of a cycle and one more prompt.
    """
    token = node.shape.model_shape().kv_bytes_per_token
    all_links = node.engines * tier.bytes_per_second / token
    waiting, parked = deque(outputs), deque[Parked]()
    total, count = 0.0, 0
    while waiting:
        free = tier.size / token - sum(one.tokens for one in parked)
        new = min(len(waiting), int(free / (prompt + 1)))
        if new < 1:
            raise ValueError("the host's memory has no room for one more prompt")
        computed = seconds(node, DP, WHOLE_PROMPTS, requests(new, prompt, 1))
        total += max(computed, new * prompt / all_links) + tier.switch_seconds
        for _ in range(new):
            if (output := waiting.popleft()) > 1:
                parked.append(Parked(prompt + 1, output - 1))
        took, left = Decoding(node, decode, tier).run(parked, to_the_end=not waiting)
        total, count = total + took, count + 1
        if waiting:
            total += tier.switch_seconds + sum(one.tokens for one in left) / all_links
        parked = deque(left)
    return total, count


def drawn(count: int, least: int, most: int) -> list[int]:
    """Return lengths of outputs, drawn evenly between two bounds."""
    draw = random.Random(SEED)
    return [draw.randint(least, most) for _ in range(count)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--model-shape", default="llama-3-8b-bf16")
    parser.add_argument("--weight-dtype", help="in place of the shape's")
    parser.add_argument("--arithmetic", help="compute as fast as with weights of this dtype")
    parser.add_argument("--hardware", required=True)
    parser.add_argument(
        "--link-scale",
        type=float,
        default=1.0,
        help="multiplies the rate of all-reduces, as in the paper's Figure 14",
    )
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--outputs", type=int, nargs=2, required=True, help="shortest, longest")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512])
    parser.add_argument("--host-gib", type=float, nargs="*", default=[80], help="for each GPU")
    parser.add_argument(
        "--share-weights",
        type=int,
        nargs="*",
        default=[],
        help="levels of nodes on which the policy may move memory and form pipelines",
    )
    parser.add_argument("--static", nargs="*", help="static layouts; default: all")
    parser.add_argument("--max-pp", type=int, default=8, help="most stages of these pipelines")
    parser.add_argument("--pcie-gb", type=float, default=12, help="GB/s of each GPU, each way")
    parser.add_argument("--gpu-memory-utilization", type=float, default=MEMORY_SHARE)
    parser.add_argument(
        "--divide-weights",
        action="store_true",
        help="static layouts keep a part of the weights on each GPU, as stock vLLM does",
    )
    return parser


def node_of(args: argparse.Namespace) -> Node:
    """Return the node that the options describe."""
    shape, hardware = read_shape(args.model_shape), hardware_named(args.hardware)
    if args.weight_dtype is not None:
        shape = msgspec.structs.replace(shape, weight_dtype=args.weight_dtype)
    if args.arithmetic is not None:
        rates = hardware.flops_per_second | {
            shape.weight_dtype: hardware.flops_per_second[args.arithmetic]
        }
        hardware = msgspec.structs.replace(hardware, flops_per_second=rates)
    hardware = msgspec.structs.replace(
        hardware,
        link_bytes_per_second=args.link_scale * hardware.link_bytes_per_second,
        allreduce_seconds=hardware.allreduce_seconds / args.link_scale,
        memory_bytes=hardware.memory_bytes * args.gpu_memory_utilization / MEMORY_SHARE,
    )
    node = Node(shape, hardware, args.engines, args.engines, prefix_caching=False)
    return replace(node, max_num_seqs=args.max_num_seqs)


def divided(node: Node, layout: Layout) -> Node:
    """Return a node with the room for KV that stock vLLM has in a layout.

    What a GPU does not hold of the weights is added to its memory, so it is free for KV.
    """
    spared = node.shape.weight_bytes * (1 - 1 / layout.world_size)
    hardware = node.hardware
    memory = hardware.memory_bytes + spared / MEMORY_SHARE
    return replace(node, hardware=msgspec.structs.replace(hardware, memory_bytes=memory))


def _policy(node: Node, asked: Sequence[Arrival]) -> str:
    """Return what the policy ``batch`` does with these requests, in words."""
    run = simulate(node, "batch", asked)
    took = max(life.ended or 0.0 for life in run.lives)
    ways = " -> ".join(_named(partition) for _, partition in run.layouts)
    return f"policy batch: {len(asked) / took:.2f}/s by {ways}"


def _named(partition: Partition) -> str:
    """Return the layouts of a partition, each with the number of its units."""
    counts = Counter(unit.name for unit in partition)
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each layout."""
    args = _parser().parse_args(argv)
    node, outputs = node_of(args), drawn(args.requests, *args.outputs)
    asked = [Arrival(0.0, args.prompt_tokens, output, 0) for output in outputs]
    for layout in layouts(args.engines):
        if args.static is not None and layout.name not in args.static:
            continue
        own = divided(node, layout) if args.divide_weights else node
        found = {chunk: len(asked) / seconds(own, layout, chunk, asked) for chunk in args.chunks}
        best = max(found, key=lambda chunk: found[chunk])
        print(f"static {layout.name}: {found[best]:.2f}/s, in chunks of {best}", flush=True)
    for chunk in args.chunks:
        sized = replace(node, max_num_batched_tokens=chunk)
        print(f"{_policy(sized, asked)}, in chunks of {chunk}", flush=True)
        for share in args.share_weights:
            shared = replace(sized, share_weights=share, max_pp=args.max_pp, move_memory=True)
            print(
                f"{_policy(shared, asked)}, weights shared by {share}, in chunks of {chunk}",
                flush=True,
            )
    for gib in args.host_gib:
        sized = replace(
            node,
            max_num_batched_tokens=args.chunks[0],
            tier_gib=gib,
            tier_bytes_per_second=args.pcie_gb * 1e9,
        )
        print(f"{_policy(sized, asked)}, {gib:g} GiB for each GPU", flush=True)
        tier = HostTier(args.engines * gib * 2**30, args.pcie_gb * 1e9)
        for layout in layouts(args.engines):
            if layout.pp == 1:
                took, count = cycles(node, layout, tier, args.prompt_tokens, outputs)
                rate = f"{len(asked) / took:.2f}/s, {count} cycles"
                print(f"cycle to {layout.name}, {gib:g} GiB for each GPU: {rate}", flush=True)


if __name__ == "__main__":
    main()
