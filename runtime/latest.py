"""The latest requests of a unit, also those that have ended.

What a prefix cache has of a request that has ended is found by the hashes of its blocks, and these
follow from its tokens.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

MOST_TOKENS = 1 << 21
"""Tokens of the prompts that are remembered. Each takes 3 to 5 bytes of the controller's memory,
and some 50 bytes of an engine's, where vLLM has it in two lists."""

Asked = TypeVar("Asked")


class Latest(Generic[Asked]):
    """Requests by id, of which the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Asked, int]] = OrderedDict()
        self._tokens = 0

    def put(self, request_id: str, request: Asked, tokens: int) -> list[Asked]:
        """Remember a request as the latest; its prompt has so many tokens.

        Returns:
            The requests that are forgotten for it.
        """
        self.drop(request_id)
        self._known[request_id] = request, tokens
        self._tokens += tokens
        forgotten = list[Asked]()
        while self._tokens > MOST_TOKENS:
            oldest, (gone, _) = next(iter(self._known.items()))
            forgotten.append(gone)
            self.drop(oldest)
        return forgotten

    def get(self, request_id: str) -> Asked | None:
        """Return a request; None: it is not remembered."""
        return self._known.get(request_id, (None, 0))[0]

    def drop(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        _, tokens = self._known.pop(request_id, (None, 0))
        self._tokens -= tokens

    def __iter__(self) -> Iterator[Asked]:
        """Yield the requests, the latest first."""
        for request, _ in reversed(list(self._known.values())):
            yield request
