"""Messages about requests that go from one unit to another with their KV.

``engine.py`` has the unions that they belong to.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages.values import Fallback, Message


class CarriedRequest(msgspec.Struct, frozen=True):
    """A request that leaves its unit with its KV: what the next unit has to know of it."""

    request_id: str
    tokens: list[int]
    """All its output tokens so far."""
    computed: int
    """How many of its tokens, first those of the prompt, have their KV in ``blocks``."""
    blocks: dict[int, list[list[int]]]
    """The blocks that hold this KV: each member's own block ids, for each KV group of the model."""
    length: int
    """How many tokens it has, prompt and output: the next unit needs blocks for all of them."""
    cached: int = 0
    """How many tokens of its prompt its unit found in its prefix cache, if it has no output yet."""
    block_tokens: int = 0
    """Tokens of each of ``blocks``; 0: that is not said."""
    is_prefix: bool = False
    """Whether it has ended: nobody goes on with it, and ``blocks`` are what is cached of it."""
    is_rest: bool = False
    """Whether it was announced (``Leaving``) and is as it was foretold: then ``tokens`` are those
    since, and ``blocks`` is empty."""

    def as_prefix(self, name: str) -> "CarriedRequest":
        """Return the description of what is cached of a request that has ended, by a new id."""
        return msgspec.structs.replace(self, request_id=name, length=self.computed, is_prefix=True)

    def rest(self, tokens: Sequence[int], computed: int, length: int) -> "CarriedRequest | None":
        """Return what is new of a request that was announced as this; None: it is otherwise.

        Args:
            tokens: all its output tokens now.
            computed: how many of its tokens have their KV now.
            length: how many tokens it has now.
        """
        if (self.computed, self.length) != (computed, length):
            return None
        cached, new = 0 if tokens else self.cached, list(tokens[len(self.tokens) :])
        return msgspec.structs.replace(self, tokens=new, blocks={}, cached=cached, is_rest=True)

    def after(self, announced: "CarriedRequest") -> "CarriedRequest":
        """Return the whole description of an announced request, of which this is the rest."""
        tokens = announced.tokens + self.tokens
        return msgspec.structs.replace(announced, tokens=tokens, cached=self.cached)

    def whole(self, announced: "Mapping[str, CarriedRequest]") -> "CarriedRequest":
        """Return the whole description of a request, if this may be the rest of an announced one.

        Args:
            announced: what was announced, by request id.
        """
        return self.after(announced[self.request_id]) if self.is_rest else self


class AheadRequest(msgspec.Struct, frozen=True):
    """What is copied ahead of one request, while its unit goes on computing it.

    The tokens from ``begin`` to ``end`` fill whole blocks of the destination.
    """

    request_id: str
    begin: int
    """The first token that is copied: those before it are in the destination's prefix cache."""
    end: int
    source: dict[int, list[list[int]]]
    """The blocks that have the KV: each member's own ids, for each KV group. The first of
    each list holds token 0."""
    target: dict[int, list[list[int]]]
    """The blocks of the destination's members that are to have it, in the same form."""


# --- controller -> engine ---------------------------------------------------------------------


class Expect(Message, frozen=True):
    """To the leader of the unit that requests are carried to: prepare all that needs no KV.

    ``frames`` are the raw frames of each request, by request id. ``Import`` follows.
    """

    carry: int
    unit: Unit
    frames: dict[str, list[bytes]]
    prefixes: dict[str, list[bytes]]
    """The same of requests that have ended, by new ids: only what is cached of them comes, with a
    pre-copy."""


class Pin(Message, frozen=True):
    """To the leader of the unit that requests are carried from; answer ``Pinned``.

    The unit goes on computing the requests. But until ``Unpin`` nothing else is written to the
    blocks that it describes, even if a request ends or is preempted.
    """

    carry: int
    unit: Unit
    request_ids: list[str]
    prefixes: dict[str, str]
    """The ids of requests that have ended, by their ids in ``Expect.prefixes``."""
    room: int
    """How many of its free blocks the unit may hold for these. The controller knows their prompts,
    but not how long their answers were."""


class Reserve(Message, frozen=True):
    """To the leader of the unit that requests are carried to; answer ``Reserved``.

    The unit, which need not be bound, takes free blocks for the whole blocks that these requests
    have filled, as far as there are any. ``Expect`` has come before. ``Settle`` follows.
    """

    carry: int
    unit: Unit
    source: Unit
    requests: list[CarriedRequest]


class CopyAhead(Message, frozen=True):
    """To the leader of a unit with members of the destination; answer ``CopiedAhead``.

    These members read their part of the KV from the members of ``source``, beside the steps that
    come later. Of one carry there are several, each with other requests, and each is answered.
    """

    carry: int
    unit: Unit
    """The unit that is told: its steps in flight may still write to the reserved blocks."""
    source: Unit
    destination: Unit
    requests: list[AheadRequest]


class Settle(Message, frozen=True):
    """To the leader of the unit that requests are carried to: nobody writes to the blocks any more.

    If they were copied, they are in the unit's prefix cache from now on, and the unit holds them
    until ``Import`` brings the request or leaves it out. Otherwise they are free, and so are those
    of requests that have ended.
    """

    carry: int
    unit: Unit
    copied: bool


class Unpin(Message, frozen=True):
    """To the leader of the unit that requests are carried from: the pinned blocks were read."""

    carry: int
    unit: Unit


class Export(Message, frozen=True):
    """To the leader of the unit that requests are carried from; answer ``Exported``.

    The unit begins no other step. While steps are in flight, it may say what the requests will be
    after these (``Leaving``). Once none is in flight, it stops computing the requests, and keeps
    their KV until ``Drop`` or ``Keep``.
    """

    carry: int
    unit: Unit
    request_ids: list[str]
    only_decoding: bool = False
    """Whether those without an output stay: their prompts are not computed yet."""


class Allot(Message, frozen=True):
    """To the leader of the unit that requests are carried to: give them their blocks now.

    ``Import`` follows, once their last steps have ended. What finds no room is left for that.
    """

    carry: int
    unit: Unit
    source: Unit
    requests: list[CarriedRequest]


class Import(Message, frozen=True):
    """To the leader of the unit that requests are carried to: go on with them; answer ``Imported``.

    Every member reads its part of the KV from the members of ``source``. What was expected for this
    carry and is not among ``requests`` is forgotten. A rest completes what ``Allot`` said.
    """

    carry: int
    unit: Unit
    source: Unit
    requests: list[CarriedRequest]
    more: bool = False
    """Whether the next ``Import`` of this unit shares the room with this one, because the room does
    not suffice for both: their requests take turns."""


class Drop(Message, frozen=True):
    """To the leader of the unit that requests were carried from: forget them and their KV."""

    unit: Unit
    request_ids: list[str]


class Keep(Message, frozen=True):
    """To the leader of the unit that requests were to be carried from: go on with them."""

    unit: Unit
    request_ids: list[str]


# --- engine -> controller ---------------------------------------------------------------------


class Pinned(Message, frozen=True):
    """Answer to ``Pin``: requests that have whole blocks, with those blocks alone.

    Of requests that have ended they are those that are still cached.
    """

    carry: int
    engine: int
    unit: Unit
    requests: list[CarriedRequest]


class Reserved(Message, frozen=True):
    """Answer to ``Reserve``: what is to be copied. Requests that found no room are left out."""

    carry: int
    engine: int
    unit: Unit
    requests: list[AheadRequest]


class CopiedAhead(Message, frozen=True):
    """Answer to ``CopyAhead``, once all that the unit's members were to read has been read."""

    carry: int
    engine: int
    unit: Unit
    bytes: int = 0
    problem: str = ""
    """Why the KV could not be read, in one line."""
    host_bytes: int = 0
    """How many of the bytes have come through memory of the host."""


class Leaving(Message, frozen=True):
    """Comes before ``Exported`` while steps are in flight: what the requests will be after these.

    It leaves out requests whose state after these steps is not known. Some requests may end with
    these steps.
    """

    carry: int
    engine: int
    unit: Unit
    requests: list[CarriedRequest]


class Exported(Message, frozen=True):
    """Answer to ``Export``. Requests that had ended before are not in the answer."""

    carry: int
    engine: int
    unit: Unit
    requests: list[CarriedRequest]


class Imported(Message, frozen=True):
    """Answer to ``Import``, sent for each portion of the requests that found room together."""

    carry: int
    engine: int
    unit: Unit
    carried: list[str]
    """Requests that go on with their KV, which every member has read."""
    recomputed: dict[str, Fallback]
    """Requests that the unit has taken without their KV, and why."""
    left: int
    """Requests of this carry that still wait for room; 0: this is the last answer."""
    bytes: int = 0
    """Bytes of KV that all members together have read."""
    seconds: float = 0.0
    """What the copy took the slowest member."""
    host_bytes: int = 0
    """How many of the bytes have come through memory of the host."""
    failed: bool = False
    """Whether the KV could not be read. Then no request goes on, and this is the last answer."""
