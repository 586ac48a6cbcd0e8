"""The book of prefixes: what the prefix cache of each unit is believed to hold.

Nothing is asked of the engines. The controller notes which prompts it sent where, and forgets the
ones that were used least lately when a unit's blocks cannot hold more. So what it believes is not
exact: the lengths are estimates, blocks of outputs are not counted, and an engine may have evicted
something else. A wrong guess costs time, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.prompt_hashes import PromptHashes

SHARE_KEPT = 1 - 1 / 300
"""How much a request leaves of the weight of those before it, in the share of cached tokens."""
USED_SHARE = 0.01
"""Caches are of no use if requests find less than this share of their prompt tokens there."""
WATCHED_TOKENS = 200_000
"""Prompt tokens after which it is known whether caches are of use: of fewer, chats may have had
their first turns only."""
LATE_POWER = 2
"""What was found when n tokens had been watched counts as much as this power of n."""


class UnitPrefixes:
    """The stretches of prompts that one unit has cached, the least lately used first."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all stretches."""
        self._stretches: OrderedDict[int, int] = OrderedDict()
        """The tokens of each."""
        self._used: dict[int, int] = {}
        """When each was last used."""

    def __len__(self) -> int:
        return len(self._stretches)

    def find(self, prompt: PromptHashes) -> int:
        """Return how many stretches of a prompt's beginning are cached."""
        found = 0
        for stretch in prompt.hashes:
            if stretch not in self._stretches:
                break
            found += 1
        return found

    def ages(self, prompt: PromptHashes, stretches: int, now: int) -> list[tuple[int, int]]:
        """Return for how long each of a prompt's first stretches was not used, and its tokens."""
        known = prompt.hashes[:stretches]
        return [(now - self._used[one], self._stretches[one]) for one in known]

    def put(self, prompt: PromptHashes, now: int = 0) -> None:
        """Note that a prompt is computed, or was used until now.

        Of one prompt the end goes first, as in vLLM: without what comes before it, it is useless.
        """
        self._used.update(dict.fromkeys(prompt.hashes, now))
        for index in reversed(range(len(prompt.hashes))):
            stretch = prompt.hashes[index]
            if stretch in self._stretches:
                self._stretches.move_to_end(stretch)
                continue
            tokens = prompt.tokens(index + 1) - prompt.tokens(index)
            self._stretches[stretch] = tokens
            self.tokens += tokens

    def fit(self, tokens: int) -> None:
        """Forget what does not fit into a cache of ``tokens`` tokens."""
        while self.tokens > tokens:
            stretch, gone = self._stretches.popitem(last=False)
            del self._used[stretch]
            self.tokens -= gone


class Hits(NamedTuple):
    """What requests find in the cache of their unit."""

    hit_share: float
    """Share of their prompt tokens."""
    lost_tokens: float
    """Tokens that requests would not find if all caches were lost now.

    If what requests find was last used n tokens of prompts ago, then this is what the next n tokens
    of prompts would have found: after them, all that is found has been used since then.
    """
    late_share: float
    """Share of their prompt tokens that was last used between a quarter and half of
    ``watched_tokens`` ago: what is used again even later can only be guessed from that."""
    watched_tokens: float
    """Prompt tokens of all requests so far."""

    @property
    def are_used(self) -> bool:
        """Whether requests find enough that a cache is worth a copy, or may yet do so."""
        found = max(self.hit_share, self.late_share)
        return found >= USED_SHARE or self.watched_tokens < WATCHED_TOKENS


class PrefixBook:
    """What every unit is believed to have cached.

    Args:
        capacity: returns how many tokens the blocks hold that a unit has now, or that it gets
            before it evicts anything; 0 if it is gone. Blocks that an engine lends, or that a group
            returns, cache nothing any more.
    """

    def __init__(self, capacity: Callable[[Unit], int]) -> None:
        self._capacity = capacity
        self._units: dict[Unit, UnitPrefixes] = {}
        self._asked = self._found = self._idle = self._late = 0.0
        self._now = 0
        """Prompt tokens of all requests so far: the clock by which it is told what is used again,
        and how soon."""

    @property
    def hits(self) -> Hits:
        """What the latest requests were expected to find."""
        if not self._asked:
            return Hits(0.0, 0.0, 0.0, 0.0)
        shares = (self._found / self._asked, self._idle / self._asked)
        return Hits(*shares, self._late, self._now)

    def tokens(self, unit: Unit) -> int:
        """Return how many tokens of prompts a unit has cached."""
        known = self._units.get(unit)
        return known.tokens if known is not None else 0

    def where(self, prompt: PromptHashes, units: Iterable[Unit]) -> dict[Unit, int]:
        """Return those of the units that have cached the beginning of a prompt.

        Returns:
            How many of its stretches each has cached.
        """
        if not (prompt.hashes and prompt.reads_cache):
            return {}
        found = {u: self._units[u].find(prompt) for u in units if u in self._units}
        return {unit: stretches for unit, stretches in found.items() if stretches}

    def has(self, prompt: PromptHashes, unit: Unit) -> bool:
        """Return whether a unit has cached all of a prompt that has hashes."""
        known = self._units.get(unit)
        return known is not None and known.find(prompt) == len(prompt.hashes)

    def place(self, prompt: PromptHashes, tokens: int, unit: Unit) -> int:
        """Note that a unit computes a prompt from now on.

        Args:
            prompt: the prompt.
            tokens: how many tokens the unit has to compute if nothing is cached.
            unit: the unit.

        Returns:
            How many of the tokens are expected in the unit's cache.
        """
        stretches = self.where(prompt, (unit,)).get(unit, 0)
        found = prompt.common_tokens(stretches)
        ages = self._units[unit].ages(prompt, stretches, self._now) if stretches else []
        late = sum(n for age, n in ages if self._now / 4 <= age < self._now / 2)
        self._asked = SHARE_KEPT * self._asked + tokens
        self._found = SHARE_KEPT * self._found + found
        self._idle = SHARE_KEPT * self._idle + sum(age * n for age, n in ages)
        self.use(prompt, unit)
        # What was watched first is soon of no account: a quarter of it was then a moment.
        kept = (self._now / (self._now + tokens)) ** LATE_POWER if tokens else 1.0
        self._late = kept * self._late + (1 - kept) * late / max(1, tokens)
        self._now += tokens
        return found

    def use(self, prompt: PromptHashes, unit: Unit) -> None:
        """Note that a unit has a prompt in its blocks, or had it until now."""
        if prompt.hashes:
            self._units.setdefault(unit, UnitPrefixes()).put(prompt, self._now)

    def fit(self) -> None:
        """Forget what units cannot have kept."""
        for unit, known in self._units.items():
            if known.tokens:
                known.fit(self._capacity(unit))

    def clear(self) -> None:
        """Forget all: the caches were reset."""
        self._units.clear()
