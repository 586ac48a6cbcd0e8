"""What the policy is told of levels of memory: which there are, and what would follow."""

from shoal.policies.values.level import Level
from shoal.policies.values.snapshot import ShareLevel
from shoal.runtime.clock import Clock
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.memory_changes import MemoryChanges
from shoal.runtime.controller.switching.shift_threshold import Shifting

LOOK_SECONDS = 0.5
"""How often it is looked up. It takes a look at every request, and policies ask every few steps."""


class ShareLevels:
    """Looks up the levels to which a policy may change.

    Args:
        clock: monotonic seconds.
        capacity: what units hold, and how long steps take.
        shifting: which steps run in SP.
        memory: changes the level.
    """

    def __init__(
        self, clock: Clock, capacity: Capacity, shifting: Shifting, memory: MemoryChanges
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._shifting = shifting
        self._memory = memory
        self._found: tuple[ShareLevel, ...] = ()
        self._looked_at: float | None = None

    def offered(self) -> tuple[ShareLevel, ...]:
        """Return the levels to which a policy may change now."""
        now, memory = self._clock(), self._memory
        if not memory.is_free:
            return ()
        if self._looked_at is None or now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            found = (self._level(level, blocks) for level, blocks in memory.offers().items())
            self._found = tuple(level for level in found if level is not None)
        return tuple(level for level in self._found if level.level != memory.level)

    def _level(self, level: Level, blocks: int) -> ShareLevel | None:
        model = self._capacity.costs.model
        if model is None:
            return None
        layouts = self._capacity.layouts_with(blocks)
        above = self._shifting.sp_above_with(level)
        return ShareLevel(level.share, layouts, model.at(level), above, level.stages)
