"""What an engine's scheduler process tells its runners, and what they answer.

Messages are pickled and sent over private Unix sockets. A runner reads its own queue. Between
``Attach`` and ``Detach`` it reads its group's queue (``step_queues.py``). All queues are first in,
first out, so a step that was queued before a switch always runs before it.
"""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.level import Level
from shoal.runtime.protocol.messages import Mode

STARTUP_PHASES = "startup_phases"
"""``Call`` method that the runner answers itself: seconds that each phase of loading took."""
STARTUP_BYTES = "startup_bytes"
"""The same for the bytes of the device that each phase took, also each core's start."""
SP_EXCHANGES = "sp_exchanges"
"""The same for how members exchange in SP, by the name of the layout."""
WEIGHT_BYTES = "weight_bytes"
"""The same for the bytes of weights in the engine's own memory."""
SHARES = "shares"
"""The same for the levels of memory that the engine can have (``messages.Shares``)."""
SHARES_KV = "shares_kv"
"""The same for why this runner cannot read the KV of the node's other engines; "" if it can. If it
cannot, requests that come from other engines have to be computed again."""
TIER_BLOCKS = "tier_blocks"
"""The same for the blocks of the engine's tier; 0 if this runner cannot read all tiers."""
STARTUP_EPOCH = 0
"""Epoch of the phase in which each layout's core starts: no bind uses it."""
LARGEST_FULL_GRAPH = "largest_full_graph"
"""``Call`` method that a layout's worker answers itself: up to how many tokens it has full graphs
of steps with prompts; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run a worker method on every member of the unit; each answers."""

    seq: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Introduce:
    """A request is to come; a later ``Step`` begins with it, or forgets it. For V2 model runners.

    It may be sent before the unit is bound.
    """

    request: Any
    """vLLM's ``NewRequestData``, without blocks."""


class Rest(msgspec.Struct, frozen=True):
    """What is new of a request that was introduced."""

    request_id: str
    tokens: "array[int]"
    """Those that have come since."""
    computed: int
    blocks: tuple[list[int], ...]
    """For each KV group."""


class Seated(msgspec.Struct):
    """What is new of requests that begin in their rows: each list has an item for each of them.

    Lists take a third of the time of as many ``Rest``s to write and to read, and all these requests
    stand still meanwhile. Their blocks are in the step, like those of requests that run.
    """

    request_ids: list[str] = []
    counts: list[int] = []
    """How many tokens have come since."""
    computed: list[int] = []
    tokens: "array[int]" = msgspec.field(default_factory=partial(array, "i"))
    """The tokens of the first request, then those of the second, and so on."""

    def add(self, request_id: str, tokens: Sequence[int], computed: int) -> None:
        """Add a request."""
        self.request_ids.append(request_id)
        self.counts.append(len(tokens))
        self.computed.append(computed)
        self.tokens.extend(tokens)


@dataclass(frozen=True, slots=True)
class Seat:
    """Give requests rows, because they have blocks; the next step with tokens begins with them.

    It may be sent before the unit is bound. What it says of tokens and computed ones may change.
    """

    requests: list[Rest]
    is_last: bool = True
    """Whether no others get rows with these."""


class Begun(msgspec.Struct):
    """What a step says of requests that were introduced."""

    requests: list[Rest] = []
    """Those that begin with the step, but for ``seated``; those that have rows get others."""
    seated: Seated | None = None
    """Those that begin with it in their rows; None: none do."""
    unseated: list[str] = []
    """Those that are to lose their rows, because they do not begin now."""
    forgotten: list[str] = []
    """Those that do not come."""


@dataclass(frozen=True, slots=True)
class Step:
    """Run one model step; the layout's answering member answers.

    ``sample`` is False when the grammar of a request needs a token still in flight: ``Sample``
    follows, and the answer comes after it.
    """

    seq: int
    scheduler_output: Any
    """vLLM's ``SchedulerOutput``, without the requests in ``begun``."""
    grammar_output: Any
    sample: bool
    mode: Mode = Mode.TP
    """How every member of the group executes it."""
    begun: Begun = field(default_factory=Begun)


@dataclass(frozen=True, slots=True)
class Sample:
    """Finish a step that was sent with ``sample=False``."""

    seq: int
    grammar_output: Any


@dataclass(frozen=True, slots=True)
class Attach:
    """On a runner's own queue: read the queue of its group in this layout until ``Detach``.

    The runner takes it up by itself (``step_queues.py``), as it only changes what is read next.
    """

    layout: Layout


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


class Arrival(msgspec.Struct, frozen=True):
    """A request that comes to a unit with what other units have computed of it.

    One message brings many, and pickle takes a third of the time for these that it takes for a
    dataclass with slots.
    """

    request_id: str
    prompt: list[int]
    """Its prompt's token ids; empty for V2 model runners, which learn all tokens from a step."""
    tokens: list[int]
    """All its output tokens so far; empty for V2 model runners."""
    computed: int
    """How many of these tokens have their KV in this unit's blocks once it is read."""
    sampling: Any
    """vLLM's ``SamplingParams`` of the request."""
    begin: int = 0
    """The first token whose KV is to be read: those before it were in the unit's prefix cache."""
    source: dict[int, list[list[int]]] = {}
    """The physical blocks that have the KV: by member of ``Carry.source``, for each KV group."""
    target: dict[int, list[list[int]]] = {}
    """The physical blocks that are to have it: by member of the unit, for each KV group."""
    adapter: Any = None
    """vLLM's ``LoRARequest``, if it names one."""
    features: list[Any] = []
    """vLLM's ``MultiModalFeatureSpec`` of its images; those whose KV is there have no tensors that
    only the encoder reads. Empty for V2 model runners."""
    since: int = 0
    """The token that the first block of each list begins with, at most ``begin``: blocks of which
    nothing is read need not be named."""


@dataclass(frozen=True, slots=True)
class Foresee:
    """Find out by now what is to be read of requests that are to come. For V2 model runners.

    Nothing is read before a ``Carry`` says so. It may be sent before the unit is bound. Another one
    with the same source takes its place.
    """

    number: int
    source: Unit
    requests: list[Arrival]


@dataclass(frozen=True, slots=True)
class Carry:
    """Know these requests, and read their KV from the members of another unit.

    Every member answers with a ``Copied`` once its device has read all of it. Steps that come later
    in the queue may use this KV.
    """

    seq: int
    source: Unit
    requests: list[Arrival]
    foreseen: int = 0
    """The number of the ``Foresee`` that has the requests, the last one with this source; 0: they
    are here."""


@dataclass(frozen=True, slots=True)
class CopyAhead:
    """Read KV of requests that still run in another unit, beside the steps that come later.

    Every member of the unit answers with a ``Copied`` once its device has read all of it. Members
    that do not belong to ``target`` have nothing to read. Steps before it in the queue may still
    write to the blocks, so reading begins after them.
    """

    seq: int
    source: Unit
    target: Unit
    """The unit that is to have the KV; it may not be bound yet."""
    requests: list[Arrival]
    """Only ``begin``, ``computed`` and the blocks of each are used."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy KV from blocks of the unit to other blocks of it.

    Every member answers with a ``Copied`` once its device has copied all of it. Steps that come
    later in the queue find the KV in the other blocks, unless it is copied beside them.
    """

    seq: int
    requests: list[Arrival]
    """Only ``computed`` and the blocks of each are used."""
    beside: bool = False
    """Whether steps that come later go on meanwhile. Steps before it in the queue may still write
    to the blocks, so copying begins after them."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One member's answer to ``Carry``, ``CopyAhead`` or ``Move``."""

    bytes: int
    """Bytes of KV that the member has read, also from its own memory."""
    seconds: float
    problem: str = ""
    """Why it has read nothing, in one line: an engine of the source has ended. The requests' KV in
    this unit is damaged, and so are all tokens that steps make of it."""
    host_bytes: int = 0
    """How many of the bytes have come through memory of the host."""


@dataclass(frozen=True, slots=True)
class Form:
    """On a runner's own queue: make a layout's worker anew; answered with the error, or "".

    From then on the runner's queue for this layout is the empty one of this ``generation``. The
    runner goes on with what its own queue says, in interludes (``runner/interludes.py``).
    """

    seq: int
    layout: Layout
    generation: int


@dataclass(frozen=True, slots=True)
class Start:
    """On a runner's own queue: start a layout's core, as the queue of its group says.

    Answered when ``Detach`` on that queue has ended it. The runner goes on with what its own queue
    says, in interludes.
    """

    seq: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class FillWeights:
    """Give up the memory of KV blocks above an id, and copy peers' weights beside later steps.

    Every member answers with "", or why its copies cannot be used, once it has copied all.
    """

    seq: int
    blocks: int
    level: Level
    """What an engine has whole at this level is copied."""


@dataclass(frozen=True, slots=True)
class UseWeights:
    """Go on at a level of memory: use the copies that ``FillWeights`` has made for it.

    At the level of the start, give copies back, and let KV have all its memory. Every member
    answers with the bytes of weights that it has then in its own memory.
    """

    seq: int
    level: Level


@dataclass(frozen=True, slots=True)
class Detach:
    """On a group's queue: read the runner's own queue again."""

    epoch: int


Instruction = (
    Call
    | Introduce
    | Seat
    | Foresee
    | Step
    | Sample
    | Attach
    | Bind
    | Extend
    | Carry
    | CopyAhead
    | Move
    | Form
    | Start
    | FillWeights
    | UseWeights
    | Detach
)
"""What a runner reads from a queue."""


@dataclass(frozen=True, slots=True)
class Result:
    """One runner's answer to an instruction that has a ``seq``."""

    layout: str
    """Name of the layout that the answer is from: an engine leads no more than one unit of each.
    A name is quicker to send than a ``Unit``, and every step has an answer."""
    seq: int
    engine: int
    value: Any


@dataclass(frozen=True, slots=True)
class Drafted:
    """The answer to a ``Step`` of a unit that speculates."""

    output: Any
    """vLLM's ``ModelRunnerOutput``."""
    drafts: Any
    """vLLM's ``DraftTokenIds``: what the next step is to check; None: nothing is proposed."""


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
