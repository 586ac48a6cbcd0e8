"""Messages of a change of memory between weights and KV: engines share weights, or have them whole.

To have whole weights, or the layers of a stage whole, an engine gives KV blocks up
(``CloseBlocks``), copies what its peers keep of them while its steps go on (``FillWeights``), and
uses the copies from a safe point on (``UseWeights``). To share all weights again, it stops using
the copies, and has all KV blocks again (``OpenBlocks``).
All messages carry the epoch of the change; every engine concerned gets each of them.
"""

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.protocol.messages.values import Message


class Shares(msgspec.Struct, frozen=True):
    """What an engine says of the levels that it can have (``NodeConfig.share_weights``)."""

    blocks: dict[Level, int] = {}
    """The KV blocks that it has at each level, that of its start included."""
    fixed: str = ""
    """Why it cannot have the levels that are not among these, in one line."""


# --- controller -> engine ---------------------------------------------------------------------


class CloseBlocks(Message, frozen=True):
    """Let no request hold the engine's KV blocks whose ids are above ``blocks``.

    What they cache is forgotten, and requests that hold some are computed again. The answer is
    ``BlocksClosed``. It waits for the blocks that the engine has lent: leaders that get this
    message return them.
    """

    epoch: int
    blocks: int


class FillWeights(Message, frozen=True):
    """Give up the closed blocks' memory, and copy what peers keep; answer ``WeightsFilled``.

    The leader of ``unit``, which the engine is in, has all members do it; the others answer at
    once. Steps go on meanwhile. What is copied is what the engine has whole at ``level``.
    """

    epoch: int
    unit: Unit
    blocks: int
    level: Level = WHOLE


class UseWeights(Message, frozen=True):
    """From the next step on, be at another level of memory.

    See ``FillWeights`` for who does it; the answer is ``WeightsUsed``. At the level of the start
    copies are given back, and KV has all its memory again. At others the copies are used.
    """

    epoch: int
    unit: Unit
    level: Level


class OpenBlocks(Message, frozen=True):
    """Let requests hold all KV blocks again; answer ``BlocksOpened``."""

    epoch: int


# --- engine -> controller ---------------------------------------------------------------------


class BlocksClosed(Message, frozen=True):
    """Answer to ``CloseBlocks``; ``preempted`` requests of this engine's cores lost their KV."""

    epoch: int
    engine: int
    preempted: int


class WeightsFilled(Message, frozen=True):
    """Answer to ``FillWeights``; ``error`` is one line, empty if the copies are right."""

    epoch: int
    engine: int
    error: str = ""


class WeightsUsed(Message, frozen=True):
    """Answer to ``UseWeights``: the bytes of weights in the memory of each engine that did it."""

    epoch: int
    engine: int
    weight_bytes: dict[int, int]


class BlocksOpened(Message, frozen=True):
    """Answer to ``OpenBlocks``."""

    epoch: int
    engine: int


ToMemory = CloseBlocks | FillWeights | UseWeights | OpenBlocks
"""What an engine is told for a change of memory."""

MemoryAnswer = BlocksClosed | WeightsFilled | WeightsUsed | BlocksOpened
"""The answers of engines to a change of memory."""
