"""Requests that have ended, and whose prompts are still cached: a switch takes these along."""

from collections import defaultdict

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.prefix_book import PrefixBook
from shoal.runtime.controller.books.request import Request
from shoal.runtime.latest import Latest

MOST_BYTES = 16
"""Bytes of a request that is remembered, for each token of its prompt, which itself has 3 to 5."""
SPARE_BYTES = 4096
"""So many more may a request have: a usual schema of its answer."""


class EndedRequests:
    """The latest requests that have ended, by their last unit.

    Args:
        prefixes: what units are believed to have cached.
    """

    def __init__(self, prefixes: PrefixBook) -> None:
        self._prefixes = prefixes
        self._units: defaultdict[Unit, Latest[Request]] = defaultdict(Latest)
        self._ends: dict[tuple[Unit, int], str] = {}
        """The requests by the hash of their whole prompts."""

    def put(self, request: Request, unit: Unit) -> None:
        """Note that a request has ended on a unit, which has its prompt in its cache.

        An earlier request whose whole prompt this one begins with is forgotten: the last turn of a
        chat has all of the turns before. One that brings images or a large grammar is not
        remembered, because they take much memory, and only tokens are counted.
        """
        prompt = request.prompt
        is_large = request.size > SPARE_BYTES + MOST_BYTES * request.seen.prompt_tokens
        if not prompt.hashes or not prompt.reads_cache or len(request.frames) > 1 or is_large:
            return
        known = self._units[unit]
        for stretch in prompt.hashes:
            known.drop(self._ends.pop((unit, stretch), ""))
        self._ends[unit, prompt.hashes[-1]] = request.id
        for forgotten in known.put(request.id, request, request.seen.prompt_tokens):
            self._ends.pop((unit, forgotten.prompt.hashes[-1]), None)

    def choose(self, unit: Unit, tokens: int) -> list[Request]:
        """Return the latest whose prompts a unit still has, of at most ``tokens`` tokens together.

        What several prompts begin with counts once. All other requests are forgotten.
        """
        known, kept = self._units.pop(unit, Latest[Request]()), list[Request]()
        left, seen = tokens, set[int]()
        for request in known:
            if not self._prefixes.has(request.prompt, unit):
                continue
            left -= request.prompt.tokens_beside(seen)
            if left < 0:
                break
            seen.update(request.prompt.hashes)
            kept.append(request)
        self._ends = {key: of for key, of in self._ends.items() if key[0] != unit}
        for request in reversed(kept):
            self.put(request, unit)
        return kept

    def copied(self, request: Request, unit: Unit) -> None:
        """Note that a unit has the prompt of a request, which has ended on another one."""
        self._prefixes.use(request.prompt, unit)
        self.put(request, unit)
