"""Values that messages of both directions contain."""

import enum

import msgspec

from shoal.policies.values.batch import Batch, Mode

__all__ = [
    "NOTHING_DONE",
    "RETRY_SECONDS",
    "SHUTTING_DOWN",
    "UNAVAILABLE_RETRY_SECONDS",
    "Fallback",
    "Message",
    "Mode",
    "ModeWork",
    "Outcome",
    "Treatment",
    "Work",
]


SHUTTING_DOWN = "the server is shutting down"
"""Tells callers why a node that has been told to end takes no requests."""
RETRY_SECONDS = 1
"""When callers may retry handed-back requests: elsewhere at once, or here after a restart."""
UNAVAILABLE_RETRY_SECONDS = 10
"""When callers may retry requests that the node cannot serve now; it needs time to recover."""


class Treatment(enum.StrEnum):
    """What happens to the requests that run on a unit when its engines are regrouped."""

    SEQUENTIAL = "sequential"
    """Wait until they are done (Flying Serving, 5: sequential)."""
    CARRY = "carry"
    """Stop them at the next safe point, and let them go on in the new layout with their KV."""
    SOFT = "soft"
    """Take them out at the next safe point and recompute them on another unit, with their tokens so
    far (Flying Serving, 5: soft preempt)."""
    HARD = "hard"
    """Pause them at the next safe point. Their KV stays, and they resume when their unit is back
    (Flying Serving, 5: hard preempt)."""


AHEAD = 0
"""The epoch of blocks that are lent to a group before it is bound; no bind has it."""
PORTION = 1024
"""Most blocks that a lease grows or shrinks by at once, and about as many are copied ahead by one
instruction. For more of them the host takes milliseconds, for which steps would have to wait."""
AHEAD_TOKENS = 32
"""For how many more tokens a request that is copied ahead gets blocks then. It makes about so many
until it comes: a copy takes a tenth of a second, and a step mostly more than 4 ms."""


class Fallback(enum.StrEnum):
    """Why a unit has taken a request without its KV, and computes it again."""

    NO_ROOM = "no_room"
    """The unit had no blocks for it."""
    NOT_SHARED = "not_shared"
    """The members cannot read the memory of the engines that have the KV."""
    UNREADABLE = "unreadable"
    """The KV cannot be taken as it is, for instance because prompt logprobs were not all sent."""


class Outcome(enum.StrEnum):
    """How a request left the node."""

    FINISHED = "finished"
    """Its engine ended it: it was done, or the engine refused it with an error."""
    ABORTED = "aborted"
    """Its client aborted it."""
    TOO_LONG = "too_long"
    """No group that this node can form holds it."""
    LOST = "lost"
    """Its engine died, and it could not go on elsewhere."""
    POISONED = "poisoned"
    """It killed engines."""
    EXPIRED = "expired"
    """It still waited in the task pool at its deadline."""
    POOL_FULL = "pool_full"
    """The task pool had reached its limit of waiting requests or prompt tokens."""
    CALLER_FULL = "caller_full"
    """Its caller had reached its limit of waiting requests."""
    HANDED_BACK = "handed_back"
    """The node was about to end, and had no time left for it."""
    UNAVAILABLE = "unavailable"
    """No engine served, or the controller did not answer, for too long."""
    GARBLED = "garbled"
    """Its front end could not read one of its outputs, or failed at it."""


class DeathCause(enum.StrEnum):
    """How the node found out that an engine counts as dead."""

    ENDED = "ended"
    """One of its processes ended: it crashed or was killed."""
    FAILED = "failed"
    """It reported an error after which it cannot go on."""
    HUNG = "hung"
    """One of its steps took too long."""
    STOPPED = "stopped"
    """A signal stopped one of its processes, which did not continue."""
    SILENT = "silent"
    """It did not answer for too long."""
    GROUP = "group"
    """It was in a group that broke: no member can leave a collective after another has died."""


class SpExchange(enum.StrEnum):
    """How the members of a group exchange in SP."""

    PEER = "peer"
    """They read and write each other's memory."""
    COLLECTIVE = "collective"
    """By collectives: NCCL's on GPUs, gloo's on CPUs."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of every message; the class name is the tag."""


class Work(msgspec.Struct, frozen=True):
    """Sums over the finished steps of a unit: what they computed, and how long they took."""

    steps: int = 0
    seconds: float = 0.0
    decodes: int = 0
    """Requests that got one more token, or several if they checked drafts."""
    context_tokens: int = 0
    """Tokens whose KV these decodes read."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed; a token that is computed again counts again."""
    prefill_pairs: int = 0
    """For each computed prompt token the number of tokens that it attends to, summed up."""
    drafts: int = 0
    """Proposed tokens that these decodes checked beside their own."""
    accepted: int = 0
    """Those of them that were accepted, so that the decodes got so many tokens more."""

    @property
    def mean(self) -> Batch:
        """The work of the mean step; there must be at least one step."""
        return Batch(
            decodes=round(self.decodes / self.steps),
            context_tokens=self.context_tokens // self.steps,
            prefill_tokens=self.prefill_tokens // self.steps,
            prefill_context=self.prefill_pairs // max(1, self.prefill_tokens),
        )

    def __add__(self, other: "Work") -> "Work":
        return self._each(other, 1)

    def __sub__(self, other: "Work") -> "Work":
        return self._each(other, -1)

    def _each(self, other: "Work", sign: int) -> "Work":
        ours, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Work(*(a + sign * b for a, b in zip(ours, theirs, strict=True)))


class ModeWork(msgspec.Struct, frozen=True):
    """What the steps of one mode computed."""

    decoding: Work = Work()
    """Steps that computed no prompt token."""
    prefilling: Work = Work()
    """Steps that computed prompt tokens."""
    total: Work = Work()
    """All steps. It includes steps of unknown time, which the other two leave out."""


NOTHING_DONE = ModeWork()
"""The work before the first step."""
