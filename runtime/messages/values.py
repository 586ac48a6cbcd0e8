"""What messages of both directions are made of."""

import enum

import msgspec

from policies.cost_model import Batch


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
    """Its engine died."""
    EXPIRED = "expired"
    """It still waited in the task pool at its deadline."""
    POOL_FULL = "pool_full"
    """As many requests, or prompt tokens, waited as may."""
    CALLER_FULL = "caller_full"
    """Its caller had as many requests waiting as it may."""


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
