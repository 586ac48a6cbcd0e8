"""What messages of both directions are made of."""

import enum

import msgspec

from shoal.policies.values.batch import Batch, Mode

__all__ = [
    "NOTHING_DONE",
    "RETRY_SECONDS",
    "SHUTTING_DOWN",
    "UNAVAILABLE_RETRY_SECONDS",
    "Message",
    "Mode",
    "ModeWork",
    "Outcome",
    "Treatment",
    "Work",
]


SHUTTING_DOWN = "the server is shutting down"
"""Why a node that is to end takes no requests, for the caller to read."""
RETRY_SECONDS = 1
"""When to try again what it hands back: elsewhere at once, or here when it is back."""
UNAVAILABLE_RETRY_SECONDS = 10
"""When to try again what a node cannot serve for the time being: it does not recover at once."""


class Treatment(enum.StrEnum):
    """What happens to the requests that run on a unit when its engines are regrouped."""

    SEQUENTIAL = "sequential"
    """Wait until they are done (Flying Serving, 5: sequential)."""
    SOFT = "soft"
    """Take them out at the next safe point and recompute them on another unit, their tokens so far
    included (Flying Serving, 5: soft preempt); wait for those that cannot go on elsewhere."""
    HARD = "hard"
    """Pause them at the next safe point; their KV stays; they resume when their unit is back
    (Flying Serving, 5: hard preempt)."""
    INTERLEAVE = "interleave"
    """Let them go on where they are, each member's own steps in turn with those of the new group.
    Those of a group that is dissolved are waited for."""


class Outcome(enum.StrEnum):
    """How a request left the node."""

    FINISHED = "finished"
    """By its engine: done, or refused there with an error."""
    ABORTED = "aborted"
    """By its client."""
    TOO_LONG = "too_long"
    """No group that this node can form holds it."""
    LOST = "lost"
    """Its engine died, and it could not go on elsewhere."""
    POISONED = "poisoned"
    """Engines died of it."""
    EXPIRED = "expired"
    """It still waited in the task pool at its deadline."""
    POOL_FULL = "pool_full"
    """As many requests, or prompt tokens, waited as may."""
    CALLER_FULL = "caller_full"
    """Its caller had as many requests waiting as it may."""
    HANDED_BACK = "handed_back"
    """The node was to end, and had no time left for it."""
    UNAVAILABLE = "unavailable"
    """No engine served, or the controller did not answer, for too long."""


class DeathCause(enum.StrEnum):
    """How it was found out that an engine is to be counted as dead."""

    ENDED = "ended"
    """A process of it ended: it crashed or was killed."""
    FAILED = "failed"
    """It reported an error that it cannot go on from."""
    HUNG = "hung"
    """A step of it took too long."""
    STOPPED = "stopped"
    """A process of it was stopped by a signal, and stayed so."""
    SILENT = "silent"
    """It did not answer, for too long."""
    GROUP = "group"
    """It was in a group that broke: a collective of which a member is gone cannot be left."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of every message; the class name is the tag."""


class Work(msgspec.Struct, frozen=True):
    """What the ended steps of a unit computed and how long they took, summed over them."""

    steps: int = 0
    seconds: float = 0.0
    decodes: int = 0
    """Requests that got one more token."""
    context_tokens: int = 0
    """Tokens whose KV these read."""
    prefill_tokens: int = 0
    """Prompt tokens computed, those computed again included."""
    prefill_pairs: int = 0
    """Tokens that these attend to, summed over them."""

    @property
    def mean(self) -> Batch:
        """The work of the mean step; there must be one."""
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
    """All others."""
    total: Work = Work()
    """Every step, those of unknown time, in neither of the above, included."""


NOTHING_DONE = ModeWork()
"""Before the first step."""
