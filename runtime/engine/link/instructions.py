"""What an engine's scheduler process tells its runners, and what they answer.

Messages are pickled and sent over private Unix sockets. A runner reads its own queue. Between
``Attach`` and ``Detach`` it reads its group's queue, or both in turn while it interleaves
(``step_queues.py``). All queues are first in, first out, so a step that was queued before a switch
always runs before it.
"""

import pickle
from dataclasses import dataclass, field
from typing import Any

from shoal.policies.values.layouts import Layout
from shoal.runtime.protocol.messages import Mode

STARTUP_PHASES = "startup_phases"
"""``Call`` method that the runner answers itself: seconds that each phase of loading took."""
STARTUP_BYTES = "startup_bytes"
"""The same for the bytes of the device that each phase took, also each core's start."""
STARTUP_EPOCH = 0
"""Epoch of the phase in which each layout's core starts: no bind uses it."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run a worker method on every member of the unit; each answers."""

    seq: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """Run one model step; the layout's answering member answers.

    ``sample`` is False when the grammar of a request needs a token still in flight: ``Sample``
    follows, and the answer comes after it.
    """

    seq: int
    scheduler_output: Any
    grammar_output: Any
    sample: bool
    mode: Mode = Mode.TP
    """How every member of the group executes it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Finish a step that was sent with ``sample=False``."""

    seq: int
    grammar_output: Any


@dataclass(frozen=True, slots=True)
class Attach:
    """On a runner's own queue: read the queue of its group in this layout from now on.

    With ``interleaves``, the runner reads its own queue in turn with it, until ``AwaitDetach``.
    """

    layout: Layout
    epoch: int
    interleaves: bool = False


@dataclass(frozen=True, slots=True)
class AwaitDetach:
    """On a runner's own queue: what follows comes after the group's ``Detach``.

    What follows may be ``Attach``, or use blocks that queued steps of the group still write to.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Bind:
    """First message of a bound phase: open the lease and reseed every member alike."""

    epoch: int
    virtual: list[int]
    physical: dict[int, list[int]]
    seed: int


@dataclass(frozen=True, slots=True)
class Extend:
    """More blocks for the lease: ``physical[member][k]`` backs ``virtual[k]`` on that member."""

    virtual: list[int]
    physical: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Form:
    """On a runner's own queue: make a layout's worker anew; answered with the error, or "".

    From then on the runner's queue for this layout is the empty one of this ``generation``.
    """

    seq: int
    layout: Layout
    generation: int


@dataclass(frozen=True, slots=True)
class Rest:
    """On a group's queue: it has no step now, so members that interleave do not wait for one."""


@dataclass(frozen=True, slots=True)
class Detach:
    """On a group's queue: read the runner's own queue again."""

    epoch: int


Instruction = Call | Step | Sample | Attach | AwaitDetach | Bind | Extend | Form | Rest | Detach
"""What a runner reads from a queue."""
OrderOfQueues = Attach | AwaitDetach | Rest
"""Instructions that only change which queue is read next."""


@dataclass(frozen=True, slots=True)
class Result:
    """One runner's answer to ``Call``, ``Step`` or ``Form``."""

    layout: str
    """Name of the layout that the answer is from: an engine leads no more than one unit of each.
    A name is quicker to send than a ``Unit``, and every step has an answer."""
    seq: int
    engine: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A runner cannot go on; ``error`` is one line."""

    engine: int
    error: str


def core_phase(layout: Layout) -> str:
    """Return what the start of a layout's core is called among the phases of an engine's start."""
    return f"{layout.name} core"


def dumps(message: Instruction | Result | Failure) -> bytes:
    """Serialise a message between the processes of one node."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Any:
    """Read a message that a process of this node wrote."""
    return pickle.loads(data)
