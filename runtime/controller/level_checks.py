"""Which levels of memory a node can have, and which it can have now."""

from collections.abc import Iterable

from shoal.policies.values.level import Level, levels_of
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity


class LevelChecks:
    """Says which levels a node can have, and why it cannot have others.

    Args:
        config: the node.
        books: engines, units and requests.
        capacity: what units hold.
    """

    def __init__(self, config: NodeConfig, books: Books, capacity: Capacity) -> None:
        self._config, self._books, self._capacity = config, books, capacity
        self._engines = books.engines
        self.start = Level(config.share_weights)
        """The level at the start."""
        self.all = levels_of(config.share_weights, config.layouts)

    def blocks(self, level: Level, engines: Iterable[int] | None = None) -> int:
        """Return the least KV blocks that one of the engines has at a level that all can have."""
        numbers = range(len(self._engines)) if engines is None else engines
        return min(self._engines[number].shares.blocks[level] for number in numbers)

    def refusal(self, level: Level, present: Level) -> tuple[int, str]:
        """Return the HTTP status and the reason why a level cannot be had; 200: it can.

        Args:
            level: the one that is wanted.
            present: the node's.
        """
        if level not in self.all:
            return 400, f"{_named(level)}: {self._why_never(level)}"
        if level == present:
            return 200, ""
        for engine in self._engines:
            if level not in engine.shares.blocks:
                return 409, f"{_named(level)}: engine {engine.number}: {engine.shares.fixed}"
        return (200, "") if level == self.start else self._too_small(level)

    def _why_never(self, level: Level) -> str:
        share = self.start.share
        if share == 1:
            return (
                "this node was started without --share-weights, so its engines always have whole "
                "weights"
            )
        if level.share not in (1, share):
            return f"this node can change between 1 and {share} only (--share-weights {share})"
        if level.share == 1:
            return f"with 1, engines have all layers whole; stages go with share_weights {share}"
        return (
            f"this node has no pipeline of {level.stages} stages of one engine each "
            f"(--max-pp {self._config.max_pp})"
        )

    def _too_small(self, level: Level) -> tuple[int, str]:
        """Refuse whole weights if they leave too little KV for what the node has promised."""
        blocks, named = self.blocks(level), _named(level)
        held, longest = self._capacity.longest_with(blocks), self._capacity.longest
        if held < longest:
            return 409, (
                f"{named} leaves {blocks} KV blocks on each engine, which hold requests of "
                f"{held} tokens, and requests may have {longest}"
            )
        for core in self._books.requests.cores.values():
            for request in core.requests.values():
                if not self._capacity.can_hold_with(blocks, core.unit, request.seen):
                    return 409, (
                        f"{named} leaves {blocks} KV blocks on each engine, too few for a "
                        f"request that runs on unit {list(core.unit.engines)}"
                    )
        return 200, ""


def _named(level: Level) -> str:
    """Return a level as operators ask for it."""
    return f"share_weights {level.share}" + f", stages {level.stages}" * (level.stages > 1)
