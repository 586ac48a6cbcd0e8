"""What each engine keeps of the weights: its own memory, and that of its peers, which it maps."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.runtime.clock import Clock
from shoal.runtime.engine.weights.sharing.descriptors import Descriptors
from shoal.runtime.engine.weights.sharing.shard_memory import ShardMemory

PEER_SECONDS = 1800.0
"""How long engines wait for each other's part of the weights: for the slowest disk."""
POLL_SECONDS = 0.05
"""Time between two looks for the part of a peer that is still loading."""


class KeptParts:
    """The memory of all engines that share weights, as one of them sees it.

    Args:
        engine: this engine.
        parts: how many engines share weights.
        directory: the node's private directory.
        memory: makes what the part is kept in, and maps that of others.
    """

    def __init__(self, engine: int, parts: int, directory: Path, memory: ShardMemory) -> None:
        self.place = engine % parts
        """This engine's, among those that share weights."""
        self.by_place: dict[int, torch.Tensor] = {}
        """What engines keep, uint8: this engine's first, then its peers'."""
        self.descriptors = Descriptors(directory, engine)
        self.is_found = False
        """Whether the runner before this one has filled this engine's memory."""
        self.file = -1
        self._engine, self._parts, self._memory = engine, parts, memory

    @property
    def own(self) -> torch.Tensor:
        """This engine's memory, which has been allocated."""
        return self.by_place[self.place]

    @property
    def peer_bytes(self) -> int:
        """Bytes of what peers keep, as far as it is mapped."""
        peers = (kept for place, kept in self.by_place.items() if place != self.place)
        return sum(int(kept.numel()) for kept in peers)

    def is_kept(self) -> bool:
        """Return whether a peer has kept the part that this engine's former process loaded."""
        file = self._ask(self._engine)
        if file is not None:
            os.close(file)
        return file is not None

    def allocate(self, size: int) -> bool:
        """Find or make this engine's memory; return whether there was none before this call."""
        if self.place in self.by_place:
            return False
        found = self._ask(self._engine)
        if found is None:
            self.file, memory = self._memory.create(size)
        else:
            # The runner before this one filled it, and peers have kept it.
            self.file, memory = found, self._memory.open(found, size)
            self.is_found = True
        self.by_place[self.place] = memory
        return True

    def hand_out(self) -> None:
        """Give this engine's part, which is complete, to its peers."""
        self._memory.seal(self.file)
        self.descriptors.hold(self._engine, self.file)

    def meet_peers(
        self, see: Callable[[torch.Tensor], None], clock: Clock = time.monotonic
    ) -> None:
        """Map what the peers keep; waits for those that are loading.

        Args:
            see: is given what each keeps.
            clock: seconds.

        Raises:
            TimeoutError: a peer did not come.
        """
        deadline = clock() + PEER_SECONDS
        first, size = self._engine - self.place, int(self.own.numel())
        for place in set(range(self._parts)) - {self.place}:
            while (file := self._ask(first + place)) is None:
                if clock() > deadline:
                    raise TimeoutError(f"nobody has the weights that engine {first + place} keeps")
                time.sleep(POLL_SECONDS)
            memory = self.by_place[place] = self._memory.open(file, size)
            self.descriptors.hold(first + place, file)
            see(memory)

    def _ask(self, engine: int) -> int | None:
        """Return a descriptor of what an engine keeps, from any other engine that has one."""
        first = self._engine - self.place
        others = set(range(first, first + self._parts)) - {self._engine}
        asked = (self.descriptors.ask(o, engine) for o in sorted(others, key=lambda o: o != engine))
        return next((file for file in asked if file is not None), None)
