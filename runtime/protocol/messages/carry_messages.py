"""Messages about requests that go from one unit to another with their KV.

``engine.py`` has the unions that they belong to.
"""

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


class Expect(Message, frozen=True):
    """To the leader of the unit that requests are carried to: prepare all that needs no KV.

    ``frames`` are the raw frames of each request, by request id. ``Import`` follows.
    """

    carry: int
    unit: Unit
    frames: dict[str, list[bytes]]


class Export(Message, frozen=True):
    """To the leader of the unit that requests are carried from; answer ``Exported``.

    At the next safe point without steps in flight, the unit stops computing these requests, and
    keeps their KV until ``Drop`` or ``Keep``.
    """

    carry: int
    unit: Unit
    request_ids: list[str]


class Import(Message, frozen=True):
    """To the leader of the unit that requests are carried to: go on with them; answer ``Imported``.

    Every member reads its part of the KV from the members of ``source``. What was expected for this
    carry and is not among ``requests`` is forgotten.
    """

    carry: int
    unit: Unit
    source: Unit
    requests: list[CarriedRequest]


class Drop(Message, frozen=True):
    """To the leader of the unit that requests were carried from: forget them and their KV."""

    unit: Unit
    request_ids: list[str]


class Keep(Message, frozen=True):
    """To the leader of the unit that requests were to be carried from: go on with them."""

    unit: Unit
    request_ids: list[str]


# --- engine -> controller ---------------------------------------------------------------------


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
