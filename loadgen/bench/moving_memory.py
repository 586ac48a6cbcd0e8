"""Moves memory between weights and KV on two GPUs, and looks at all that it holds.

``python -m shoal.loadgen.bench.moving_memory`` needs two GPUs that reach each other's memory, but
no server and no model. With one GPU both members are on it, and with none on the CPU: then the
times say nothing. Each of two members keeps its half of the MLPs, has slots and a KV buffer, and
has the other's buffer mapped. Then both let the weights have memory of KV, and give it back, ten
times at the same time, by the code that ``POST /admin/memory`` uses.

It prints JSON: for each change the milliseconds on the slower member of copying and comparing
weights (``fill``), of putting them behind their addresses (``use``), and of the way back
(``back``). Steps go on during the first, and not during the others. ``wrong`` counts what is not
as it has to be: weights at their addresses, sums of weights by a CUDA graph that was captured
before all changes, blocks of KV that stay, blocks that come back, and the buffer as the other
member has it mapped. ``stale`` counts the graph's sums that are right before and after a change,
when slots are behind the addresses. Both have to be 0.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing

from shoal.loadgen.bench.dummy_model import built_in_shapes, read_shape
from shoal.loadgen.bench.member_processes import gathered
from shoal.loadgen.bench.weight_streams import Member, Part, Sizes, member_of_process
from shoal.runtime.clock import Clock
from shoal.runtime.engine.groups.rendezvous import LOAD_SECONDS
from shoal.runtime.engine.kv.kv_lender import KvLender
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.weights.sharing.device_pages import tensor_at
from shoal.runtime.engine.weights.sharing.devices import pages_on
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights

SHARE = 2
CHANGES = 10
WAIT_SECONDS = 300.0
"""How long members wait for each other."""
BLOCK_TOKENS = 16
STAYS = 0.2
"""How much of KV's blocks stays, as a part of what is lent."""


class Found(NamedTuple):
    """What one member finds in one change."""

    fill: float
    use: float
    back: float
    """Seconds."""
    wrong: int
    stale: int


def kv_config(part: Part, lent: int) -> Any:
    """Return what there is of a ``KVCacheConfig`` for buffers of layers that lend so many bytes."""
    kv_width = part.sizes.qkv - part.sizes.heads
    block = BLOCK_TOKENS * kv_width * int(part.dtype.itemsize)
    blocks = int((1 + STAYS) * lent / part.layers / block) + 3
    tensor = SimpleNamespace(
        **{"size": part.layers * blocks * block, "layers": [""] * part.layers, "offset": 0},
        **{"layer_stride": blocks * block, "block_stride": block},
    )
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[tensor])


class Mover:
    """One member's weights and KV.

    Args:
        member: what it keeps, and how it finds the other.
        directory: in which they meet.
    """

    def __init__(self, member: Member, directory: Path) -> None:
        self._member, self._device = member, member.device
        pages = pages_on(member.device)
        self.whole = WholeWeights(pages)
        self.whole.patience = 0.0  # no step streams here
        self._weights = {f"{weight.kind} {weight.layer}": weight for weight in member.weights}
        for name, weight in self._weights.items():
            self.whole.add(name, weight)
        lender = KvLender(member.place, pages, member.descriptors, self.whole)
        self._config = kv_config(member.part, sum(self.whole.moving_bytes()))
        (tensor,) = self._config.kv_cache_tensors
        memory = lender.memory(f"{directory.name}-kv", member.device, self._config)
        self.raw = memory.allocate(tensor.size)
        self.lent = lender.lent(self.raw)
        assert lender.loan is not None
        blocks = self.raw.view(member.part.layers, self._config.num_blocks, -1)
        self._stays = blocks[:, : lender.loan.blocks]
        self._peers = PeerBuffers(directory, member.place, memory, settle=member.settle)
        self._peers.announce(self.raw)

    def meet(self) -> None:
        """Map the other's buffer, and capture a graph that reads all weights."""
        self._peers.open_all(SHARE, LOAD_SECONDS)
        with self._peers.reading():
            address = self._peers.buffer(1 - self._member.place).address
        seen = tensor_at(address, self.raw.nbytes, self._device)
        self.others = seen.view(torch.int8).view_as(self._whole_kv())
        self._expected = torch.stack([_sum(self._kept(name)) for name in self._weights])
        self._sums, self._replay = self._captured()

    def _whole_kv(self) -> torch.Tensor:
        return self.raw.view(self._member.part.layers, self._config.num_blocks, -1)

    def _kept(self, name: str) -> torch.Tensor:
        """Return the other's part of a weight, where that member keeps it."""
        other = 1 - self._member.place
        return self._weights[name].part_in(self._member.kept[other])

    def _seen(self, name: str) -> torch.Tensor:
        """Return the other's part of a weight at the addresses of the weight."""
        weight = self._weights[name]
        return weight.within(self.whole.weight(name), 1 - weight.own, SHARE)

    def _captured(self) -> tuple[torch.Tensor, Callable[[], None]]:
        sums = torch.zeros_like(self._expected)

        def add() -> None:
            for number, name in enumerate(self._weights):
                sums[number] = _sum(self._seen(name))

        add()
        if self._device.type == "cpu":
            return sums, add
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add()
        return sums, graph.replay

    def _right_sums(self) -> int:
        self._sums.zero_()
        self._replay()
        return int((self._sums == self._expected).sum())

    def _wrong_kv(self, kv: torch.Tensor, place: int, change: int) -> int:
        """Return in how many layers blocks that stay are not what a member has written."""
        blocks = kv[:, : self._stays.shape[1]]
        return sum(
            int((layer != _value(place, number, change)).any())
            for number, layer in enumerate(blocks)
        )

    def _wrong_weights(self) -> int:
        return sum(not torch.equal(self._seen(name), self._kept(name)) for name in self._weights)

    def change(self, number: int, wait: Callable[[], object], clock: Clock) -> Found:
        """Let weights have memory of KV, and give it back."""
        place, whole = self._member.place, self.whole
        for layer, blocks in enumerate(self._stays):
            blocks.fill_(_value(place, layer, number))
        stale = self._right_sums()
        filling = whole.fill(self._member.kept, self.lent)
        assert filling is not None, "the former change has not been undone"
        fill = self._timed(partial(filling.finish, self._member.slots.copier), wait, clock)
        use = self._timed(whole.use_copies, wait, clock)
        wrong = self._wrong_weights() + len(self._weights) - self._right_sums()
        wrong += self._wrong_kv(self._whole_kv(), place, number)
        wait()
        wrong += self._wrong_kv(self.others, 1 - place, number)
        back = self._timed(whole.use_slots, wait, clock)
        wrong += self._wrong_kv(self._whole_kv(), place, number)
        wrong += sum(int(memory.any()) for memory in self.lent)
        stale += self._right_sums()
        wait()
        return Found(fill, use, back, wrong, stale)

    def _timed(
        self, action: Callable[[], object], wait: Callable[[], object], clock: Clock
    ) -> float:
        self._member.settle()
        wait()
        began = clock()
        action()
        self._member.settle()
        return clock() - began


def _sum(weight: torch.Tensor) -> torch.Tensor:
    """Return a sum of bytes, which does not depend on their order."""
    return weight.view(torch.uint8).sum(dtype=torch.int64)


def _value(place: int, layer: int, change: int) -> int:
    """Return what a member writes to a layer's blocks."""
    return (40 * place + 7 * layer + 11 * change) % 127 + 1


def summary(change: int, of_members: list[Found]) -> dict[str, Any]:
    """Return what is printed of a change."""
    worst = {key: max(getattr(found, key) for found in of_members) for key in Found._fields[:3]}
    times = {f"{key} ms": round(1e3 * value, 2) for key, value in worst.items()}
    counts = {key: sum(getattr(found, key) for found in of_members) for key in Found._fields[3:]}
    return {"change": change, **times, **counts}


# --- processes ------------------------------------------------------------------------------------


def _run_member(place: int, part: Part, directory: str, barrier: Any, out: Any) -> None:
    member = member_of_process(place, part, directory)
    member.fill()
    member.meet()
    mover = Mover(member, Path(directory))
    mover.meet()

    def wait() -> None:
        barrier.wait(WAIT_SECONDS)

    for number in range(CHANGES):
        out.put((number, mover.change(number, wait, time.perf_counter)))
    wait()


def run(part: Part) -> list[dict[str, Any]]:
    """Return all rows."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(SHARE), context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        members = [
            context.Process(target=_run_member, args=(place, part, directory, barrier, out))
            for place in range(SHARE)
        ]
        try:
            for member in members:
                member.start()
            found = gathered(CHANGES, SHARE, members, out)
            rows = [summary(number, of_members) for number, of_members in found]
            for member in members:
                member.join(WAIT_SECONDS)
            return rows
        finally:
            for member in members:
                member.kill()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Move memory between weights and KV.")
    shapes = ", ".join(built_in_shapes())
    parser.add_argument("--model-shape", default="qwen-2.5-32b", help=f"{shapes}, or a config.json")
    parser.add_argument("--layers", type=int, help="layers (default: all that the shape has)")
    args = parser.parse_args()
    config = read_shape(args.model_shape)
    part = Part(Sizes.of(config), args.layers or config["num_hidden_layers"], SHARE)
    gpus = torch.cuda.device_count()
    machine = {"device": torch.cuda.get_device_name() if gpus else "cpu", "gpus": gpus}
    machine |= {"torch": torch.__version__, "shape": args.model_shape, "layers": part.layers}
    print(json.dumps({**machine, "rows": run(part)}, indent=1))


if __name__ == "__main__":
    main()
