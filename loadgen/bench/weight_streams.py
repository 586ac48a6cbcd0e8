"""Times layers whose weights stream from other GPUs, beside layers that have theirs.

``python -m shoal.loadgen.bench.weight_streams`` needs two GPUs that reach each other's memory, or
as many as ``--share`` says. With one GPU all members are on it, and with none on the CPU: then only
the wrong weights say something. It uses the parts of ``--share-weights`` without a server and a
model: each member keeps its part of some layers' MLPs, and gets the others' by descriptors.

It prints JSON. For each number of tokens it has the microseconds of a layer, plain and streamed, on
the slowest member: from the number on at which both are equal, a node loses nothing by sharing. A
layer is its projections and its MLP; the time of attention itself, which also hides copies, is left
out. Then one member ends without a word. The others go on reading its part, and a new process in
its place gets that part back from them. ``wrong`` counts the weights that are not what their owner
has written, and has to be 0 everywhere.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing

from shoal.loadgen.bench.dummy_model import built_in_shapes, read_shape
from shoal.loadgen.bench.member_processes import gathered, say
from shoal.runtime.clock import Clock
from shoal.runtime.engine.weights.sharing.descriptors import Descriptors
from shoal.runtime.engine.weights.sharing.devices import memory_and_copier
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard, sources
from shoal.runtime.engine.weights.sharing.shard_memory import ShardMemory
from shoal.runtime.engine.weights.sharing.shared_weight import (
    ALIGNMENT,
    DOWN,
    GATE_UP,
    Degree,
    SharedWeight,
)
from shoal.runtime.engine.weights.sharing.slots import SLOTS, Copier, Copy, WeightSlots
from shoal.runtime.engine.weights.sharing.split_linear import INPUTS, OUTPUTS, split_linear

TOKENS = (32, 128, 256, 512, 1024, 2048, 4096, 8192)
REPEATS = 5
"""How often each step is timed in one go, after one time more."""
WAIT_SECONDS = 120.0
"""How long members wait for each other."""
TP = 1
"""Members of the layout that streams: DP."""
GONE = 1
"""The member that ends without a word."""


class Sizes(NamedTuple):
    """The sizes of a layer."""

    hidden: int
    inner: int
    qkv: int
    """Outputs of the projection before attention."""
    heads: int
    """Inputs of the projection after it."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Sizes":
        """Return those of a model, by its ``config.json``."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        size = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads", heads)
        qkv = (heads + 2 * kv_heads) * size
        return cls(hidden, config["intermediate_size"], qkv, heads * size)


class Part(NamedTuple):
    """What says what a member's weights are."""

    sizes: Sizes
    layers: int
    share: int
    dtype: torch.dtype = torch.bfloat16

    def weights(self, place: int) -> list[SharedWeight]:
        """Return all weights, as the member at a place keeps its part of them."""
        made: list[SharedWeight] = []
        hidden, inner, *_ = self.sizes
        shapes = {GATE_UP: (2 * inner, hidden), DOWN: (hidden, inner)}
        begin, own = 0, nested_shard(place, self.share)
        degree = Degree(self.share, self.share)
        for layer, (kind, shape) in itertools.product(range(self.layers), shapes.items()):
            made.append(SharedWeight(layer, kind, shape, self.dtype, degree, own, begin))
            begin += -(-made[-1].kept_bytes // ALIGNMENT) * ALIGNMENT
        return made


class Member:
    """One engine's part, its slots, and the parts of the others.

    Args:
        place: which member.
        part: what all of them keep.
        directory: in which they meet.
        device: its own.
        memory: what it keeps its part in.
        copier: fills its slots.
    """

    def __init__(
        self,
        place: int,
        part: Part,
        directory: Path,
        device: torch.device,
        memory: ShardMemory,
        copier: Copier,
    ) -> None:
        self.place, self.part, self.device = place, part, device
        self._memory, self.descriptors = memory, Descriptors(directory, place)
        self.weights = part.weights(place)
        self.size = self.weights[-1].begin + self.weights[-1].kept_bytes
        self.slots = WeightSlots(copier)
        self.buffers = {
            (weight.kind, weight.layer): torch.zeros(
                weight.whole_bytes, dtype=torch.uint8, device=device
            )
            for weight in self.weights
            if weight.layer < SLOTS
        }
        self.kept: dict[int, torch.Tensor] = {}

    def fill(self) -> None:
        """Write this member's part, and let the others have it."""
        file, self.kept[self.place] = self._memory.create(self.size)
        for number, weight in enumerate(self.weights):
            weight.part_in(self.kept[self.place]).copy_(self._written(number, self.place))
            weight.keep_checksum(self.kept[self.place])
        self._memory.seal(file)
        self.descriptors.hold(self.place, file)

    def open(self, place: int, holder: int, clock: Clock = time.monotonic) -> None:
        """Map what a member keeps, or has kept, by the descriptor that ``holder`` has."""
        deadline = clock() + WAIT_SECONDS
        while (file := self.descriptors.ask(holder, place)) is None:
            if clock() > deadline:
                raise TimeoutError(f"member {holder} has no weights of member {place}")
            time.sleep(0.05)
        self.kept[place] = self._memory.open(file, self.size)
        self.descriptors.hold(place, file)

    def meet(self) -> None:
        """Map what all others keep, and let the slots be filled from it."""
        for place in set(range(self.part.share)) - {self.place}:
            self.open(place, place)
        self.slots.copies[TP] = {layer: list(self._copies(layer)) for layer in self._layers}

    @property
    def _layers(self) -> range:
        return range(self.part.layers)

    def _copies(self, layer: int) -> Iterator[Copy]:
        for source in sources(self.place, self.part.share, TP):
            if source.place == self.place:
                continue
            for weight in self.weights:
                if weight.layer == layer:
                    target = weight.within(self.slot(weight), source.part, self.part.share)
                    yield Copy(target, weight.part_in(self.kept[source.place]))

    def slot(self, weight: SharedWeight) -> torch.Tensor:
        """Return the slot of a weight, as it is stored."""
        return weight.stored(self.buffers[weight.kind, weight.layer % SLOTS])

    def use(self, layer: int) -> None:
        """Have a layer's weights in its slot."""
        self.slots.use(TP, layer)

    def wrong(self) -> int:
        """Return how many weights are not what their owners have written, in a step's slots."""
        found = 0
        for number, weight in enumerate(self.weights):
            if weight.kind == GATE_UP:
                self.use(weight.layer)
            for place in set(range(self.part.share)) - {self.place}:
                part = nested_shard(place, self.part.share)
                seen = weight.within(self.slot(weight), part, self.part.share)
                found += int((seen != self._written(number, place)).sum())
        return found

    def wrong_own(self) -> int:
        """Return how many weights of its own part are not what its former process has written."""
        own = self.kept[self.place]
        return sum(
            int((weight.part_in(own) != self._written(number, self.place)).sum())
            for number, weight in enumerate(self.weights)
        )

    def _written(self, number: int, place: int) -> torch.Tensor:
        """Return what a member writes to its part of one of the weights."""
        draw = torch.Generator(self.device).manual_seed(1000 * place + number)
        there = self.weights[number].part_in(self.kept[place])
        made = torch.empty(there.shape, dtype=there.dtype, device=self.device)
        return made.uniform_(-0.02, 0.02, generator=draw)

    def fetch(self) -> tuple[Callable[[], None], int]:
        """Return what copies the others' parts of all layers into the slots, and their bytes."""
        copies = [copy for of in self.slots.copies[TP].values() for copy in of]

        def fetch() -> None:
            self.slots.copier.wait(self.slots.copier.start(copies))

        return fetch, sum(copy.target.nbytes for copy in copies)

    def step(self, tokens: int, *, streams: bool) -> Callable[[], None]:
        """Return a step of all layers; without streaming they compute with what the slots hold."""
        kind = {"dtype": self.part.dtype, "device": self.device}
        hidden, _, outputs, heads = self.part.sizes
        x = torch.randn(tokens, hidden, **kind)
        qkv, o = (torch.randn(size, **kind) / 50 for size in ((outputs, hidden), (hidden, heads)))

        def step() -> None:
            y = x
            for layer in self._layers:
                y = (y @ qkv.t())[:, :heads] @ o.t()
                gate_up, down = (
                    partial(self._split if streams else self._whole, weight)
                    for weight in self.weights[2 * layer : 2 * layer + 2]
                )
                if streams:
                    self.use(layer)
                gate, up = gate_up(y).chunk(2, dim=-1)
                y = down(torch.nn.functional.silu(gate) * up)

        return step

    def _whole(self, weight: SharedWeight, x: torch.Tensor) -> torch.Tensor:
        return x @ weight.of_layer(self.slot(weight)).t()

    def _split(self, weight: SharedWeight, x: torch.Tensor) -> torch.Tensor:
        own = weight.of_layer(weight.part_in(self.kept[self.place]))
        dimension = OUTPUTS if weight.kind == GATE_UP else INPUTS
        begin = weight.own * own.shape[dimension]
        return split_linear(x, weight.of_layer(self.slot(weight)), own, begin, dimension)

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)


def seconds(
    member: Member,
    action: Callable[[], None],
    wait: Callable[[], object],
    clock: Clock = time.perf_counter,
) -> float:
    """Return how long an action takes, where all members begin at once."""
    action()
    member.settle()
    wait()
    began = clock()
    for _ in range(REPEATS):
        action()
    member.settle()
    return (clock() - began) / REPEATS


def timings(
    member: Member, tokens: Sequence[int], wait: Callable[[], object]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield by name what one member finds, while all do the same."""
    fetch, size = member.fetch()
    yield "from the others", {"bytes": size, "seconds": seconds(member, fetch, wait)}
    yield "weights", {"wrong": member.wrong()}
    with torch.inference_mode():
        for count in tokens:
            found = {
                name: seconds(member, member.step(count, streams=streams), wait)
                for name, streams in (("plain", False), ("streamed", True))
            }
            yield f"{count} tokens", {name: s / member.part.layers for name, s in found.items()}


def summary(name: str, of_members: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return what is printed, from what each member has found: the slowest counts."""
    row: dict[str, Any] = {"case": name}
    worst = {key: max(found[key] for found in of_members) for key in of_members[0]}
    if "bytes" in worst:
        return row | {"GB/s": round(worst["bytes"] / worst["seconds"] / 1e9, 1)}
    if "wrong" in worst:
        return row | {"wrong": int(worst["wrong"])}
    return row | {f"{key} us": round(1e6 * value, 1) for key, value in worst.items()}


# --- processes ------------------------------------------------------------------------------------


def member_of_process(place: int, part: Part, directory: str) -> Member:
    """Return the member that this process is, on a GPU if there is one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    say(place, f"is on {device}")
    return Member(place, part, Path(directory), device, *memory_and_copier("shoal-bench", device))


class Signals(NamedTuple):
    """How processes wait for each other."""

    barrier: Any
    """Of all members."""
    ended: Any
    """Set when one has ended."""
    back: Any
    """Set when that one's part is back."""
    out: Any
    """What members have found: name, values."""

    def all_here(self) -> None:
        """Wait for all members."""
        self.barrier.wait(WAIT_SECONDS)


def _first_life(
    place: int, part: Part, directory: str, tokens: Sequence[int], signals: Signals
) -> None:
    member = member_of_process(place, part, directory)
    member.fill()
    say(place, f"keeps {member.size / 1e9:.2f} GB")
    member.meet()
    say(place, "has mapped what the others keep")
    for name, found in timings(member, tokens, signals.all_here):
        signals.out.put((name, found))
    signals.all_here()
    if place == GONE:
        signals.out.close()
        signals.out.join_thread()
        os._exit(0)  # without a word, as if it had been killed
    signals.ended.wait(WAIT_SECONDS)
    signals.out.put((f"member {GONE} has ended", {"wrong": member.wrong()}))
    fetch, size = member.fetch()
    found = {"bytes": size, "seconds": seconds(member, fetch, lambda: None)}
    signals.out.put((f"from the others, member {GONE} has ended", found))
    signals.back.wait(WAIT_SECONDS)


def _second_life(part: Part, directory: str, signals: Signals) -> None:
    member = member_of_process(GONE, part, directory)
    member.open(GONE, holder=0)
    name = f"member {GONE} has its part back"
    signals.out.put((name, {"wrong": member.wrong_own()}))
    with torch.inference_mode():
        found = {
            name: seconds(member, multiply, lambda: None)
            for name, multiply in products(member).items()
        }
    signals.out.put(("a product with its weights", found))


def products(member: Member) -> dict[str, Callable[[], None]]:
    """Return products with weights where they are, and with a copy in torch's own memory."""
    there = member.weights[0].part_in(member.kept[member.place])
    x = torch.rand(TOKENS[0], there.shape[1], dtype=there.dtype, device=there.device)

    def multiply(weight: torch.Tensor) -> Callable[[], None]:
        return lambda: torch.mm(x, weight.t(), out=y)

    y = torch.empty(TOKENS[0], there.shape[0], dtype=there.dtype, device=there.device)
    return {"plain": multiply(there.clone()), "kept by others": multiply(there)}


def _rows(
    count: int, members: int, processes: Sequence[Any], signals: Signals
) -> Iterator[dict[str, Any]]:
    for name, of_members in gathered(count, members, processes, signals.out):
        row = summary(name, of_members)
        print(json.dumps(row), file=sys.stderr, flush=True)
        yield row


def run(part: Part, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return all rows."""
    context = multiprocessing.get_context("spawn")
    signals = Signals(
        context.Barrier(part.share), context.Event(), context.Event(), context.Queue()
    )
    with tempfile.TemporaryDirectory() as directory:
        members = [
            context.Process(target=_first_life, args=(place, part, directory, tokens, signals))
            for place in range(part.share)
        ]
        try:
            for member in members:
                member.start()
            rows = list(_rows(2 + len(tokens), part.share, members, signals))
            members[GONE].join()
            signals.ended.set()
            rows += _rows(2, part.share - 1, members, signals)
            members.append(context.Process(target=_second_life, args=(part, directory, signals)))
            members[-1].start()
            rows += _rows(2, 1, members, signals)
            signals.back.set()
        finally:
            for member in members:
                member.join(WAIT_SECONDS if signals.back.is_set() else 0.0)
                member.kill()
        return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time layers whose weights stream.")
    shapes = ", ".join(built_in_shapes())
    parser.add_argument("--model-shape", default="qwen-2.5-32b", help=f"{shapes}, or a config.json")
    parser.add_argument("--layers", type=int, default=4, help="layers (default: %(default)s)")
    parser.add_argument("--share", type=int, default=2, choices=(2, 4, 8), help="members")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a step")
    args = parser.parse_args()
    part = Part(Sizes.of(read_shape(args.model_shape)), args.layers, args.share)
    gpus = torch.cuda.device_count()
    machine = {"device": torch.cuda.get_device_name() if gpus else "cpu", "gpus": gpus}
    machine |= {"torch": torch.__version__, "shape": args.model_shape, "share": args.share}
    print(json.dumps({**machine, "rows": run(part, args.tokens)}, indent=1))


if __name__ == "__main__":
    main()
