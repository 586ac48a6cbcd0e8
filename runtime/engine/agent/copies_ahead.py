"""What a core does for pre-copies: blocks are copied while their requests still run elsewhere."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest


class Prefixes(NamedTuple):
    """Requests that have ended, of which a core is to hold what is cached."""

    ids: Mapping[str, str]
    """Their ids, by the names of what is cached of them."""
    room: int
    """How many free blocks may be held for these and all earlier ones of the same carry."""


NO_PREFIXES = Prefixes(MappingProxyType({}), 0)


class CopiesAhead(Protocol):
    """A part of ``interface.Core``."""

    def pin(
        self, carry: int, request_ids: Sequence[str], prefixes: Prefixes = NO_PREFIXES
    ) -> list[CarriedRequest]:
        """Hold the blocks that requests have filled, and describe them; computing goes on.

        Until ``unpin`` nobody else gets these blocks, even if a request ends or is preempted. A
        description has only whole blocks that no step in flight still writes to. Requests without
        such blocks, and unknown ids, are left out; so are all if the core caches no prefixes.

        Args:
            carry: the carry.
            request_ids: requests of the core.
            prefixes: requests that have ended. Those that find no room are left out.
        """

    def unpin(self, carry: int) -> bool:
        """Let go of some of what ``pin`` holds for a carry; return whether that was all."""

    def reserve(
        self, carry: int, source: Unit, requests: Sequence[CarriedRequest]
    ) -> list[AheadRequest]:
        """Take free blocks for what requests, which are expected, have filled elsewhere.

        The core need not serve. What is not a whole block of this core is left out, and what its
        prefix cache has already; so are requests for which there are not enough free blocks.
        """

    def promise(self, carry: int, request_id: str) -> None:
        """Give a request whose first blocks are reserved the next ones, too, if there is room.

        ``allot`` and ``adopt`` then have little to do. Unknown carries and requests are ignored.
        """

    def settle(self, carry: int, *, copied: bool) -> bool:
        """Take note that nobody writes to some reserved blocks any more; return whether to all.

        An unknown carry has none.

        Args:
            carry: the carry.
            copied: whether they hold the KV. Then they are in the prefix cache from now on, and
                ``adopt`` finds them there. Each request's are held until it is adopted or aborted.
        """

    def copy_ahead(
        self, carry: int, source: Unit, target: Unit, requests: Sequence[AheadRequest]
    ) -> None:
        """Tell the runners of this unit that belong to ``target`` to read reserved blocks."""

    def copied_ahead(self) -> list[tuple[int, Copied]]:
        """Return the copies of ``copy_ahead`` that have ended since the last call, by carry."""
