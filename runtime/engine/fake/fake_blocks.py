"""The KV blocks of a fake core that no request holds, and the prefixes that they still cache.

A small version of vLLM's ``BlockPool``: a block is cached once it is full, by the hash of all
tokens up to its end, and stays so while it is free, until somebody else gets it. Blocks without a
hash are given out first, then the block that was free for longest.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class FakeBlocks:
    """Block ids, physical or virtual; gives out the lowest first, so that runs are reproducible."""

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._free = OrderedDict.fromkeys(sorted(blocks))
        """In the order in which they are given out: those that cache nothing come first."""
        self._plain = len(self._free)
        """How many of the free blocks cache nothing."""
        self._more: Counter[int] = Counter()
        """How many requests hold a block beside the first one."""
        self._hashes: dict[int, bytes] = {}
        self._cached: dict[bytes, dict[int, None]] = {}
        """Blocks by their hash: the same tokens may be in several."""

    def __len__(self) -> int:
        return len(self._free)

    @property
    def ids(self) -> list[int]:
        """The free ids, in the order in which they are given out."""
        return list(self._free)

    @property
    def cached(self) -> int:
        """How many blocks are cached, free or held."""
        return len(self._hashes)

    def uncached(self, enough: int) -> int:
        """Return how many free ids cache nothing, which is ``enough`` at most."""
        return min(enough, self._plain)

    def take(self, count: int) -> list[int]:
        """Take out and return up to ``count`` ids; they cache nothing any more."""
        taken = [self._free.popitem(last=False)[0] for _ in range(min(count, len(self._free)))]
        self._plain -= len(taken) - self._evict(taken)
        return taken

    def take_out(self, blocks: Iterable[int]) -> list[int]:
        """Take out and return those of these ids that are free; they cache nothing any more."""
        taken = [block for block in blocks if block in self._free]
        for block in taken:
            del self._free[block]
        self._plain -= len(taken) - self._evict(taken)
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Put ids back. Those that others hold, too, do not come free (vLLM ``free_blocks``)."""
        plain = []
        for block in blocks:
            if self._more[block]:
                self._more[block] -= 1
            elif block in self._hashes:
                self._free[block] = None
            else:
                plain.append(block)
        for block in reversed(plain):
            self._give_first(block)

    def replace(self, others: Mapping[int, int]) -> None:
        """Let blocks, which were taken out, stand for others, which are free from now on."""
        for block, other in others.items():
            self._more[other] = self._more.pop(block, 0)
            self._give_first(block)
            if (prefix := self._hashes.get(block)) is not None:
                self._evict([block])
                self.cache(other, prefix)

    # --- prefixes -----------------------------------------------------------------------------

    def cache(self, block: int, prefix: bytes) -> None:
        """Note that a held block is full, and the hash of all tokens up to its end."""
        if block not in self._hashes:
            self._hashes[block] = prefix
            self._cached.setdefault(prefix, {})[block] = None

    def find(self, prefixes: Iterable[bytes]) -> list[int]:
        """Return the blocks that cache the longest part of a chain of hashes."""
        found = []
        for prefix in prefixes:
            blocks = self._cached.get(prefix)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def unheld(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free."""
        return sum(block in self._free for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Note that one more request holds cached blocks (vLLM ``touch``)."""
        for block in blocks:
            if block in self._free:
                del self._free[block]
            else:
                self._more[block] += 1

    def forget(self) -> None:
        """Forget every cached prefix."""
        self._plain = len(self._free)
        self._hashes.clear()
        self._cached.clear()

    def _give_first(self, block: int) -> None:
        """Put a block back that caches nothing: it is the next one to be given out."""
        self._free[block] = None
        self._free.move_to_end(block, last=False)
        self._plain += 1

    def _evict(self, blocks: Iterable[int]) -> int:
        """Let blocks cache nothing any more; return how many did."""
        evicted = 0
        for block in blocks:
            prefix = self._hashes.pop(block, None)
            if prefix is not None:
                evicted += 1
                others = self._cached[prefix]
                del others[block]
                if not others:
                    del self._cached[prefix]
        return evicted

    def misheld(self, held: Iterable[int]) -> list[int]:
        """Return the blocks whose holders were miscounted.

        Args:
            held: the blocks of all requests, one after the other.
        """
        holders = Counter(held)
        known = {block: 1 + self._more[block] for block in holders}
        return [block for block in holders if known[block] != holders[block]]
