"""What a policy sees: the node at one instant, frozen.

The controller and the simulator build the same types, so a policy cannot tell them apart.
"""

from dataclasses import dataclass

from policies.partition import Group, Partition


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A request that waits in the task pool."""

    request_id: str
    prompt_tokens: int
    total_tokens: int
    """Tokens it must be able to reach: prompt and output bound, or, when the bound is no more than
    what the model's length leaves, the prompt and one token."""
    priority: int
    """Lower is earlier."""
    arrival: float
    """Seconds of the snapshot's clock."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """One unit of the partition."""

    group: Group
    serving: bool
    """False while its engines switch, do not answer or are dead: nothing can be dispatched."""
    requests: int
    """Requests dispatched to it and not ended."""
    free_slots: int
    """Further requests that its batch can take."""
    free_blocks: int
    """KV blocks that a request could get now, in blocks of this unit's layout."""
    total_blocks: int
    """KV blocks that one request could ever get in this unit."""
    block_tokens: int
    max_model_len: int

    def blocks_for(self, request: PoolRequest) -> int:
        """Return the KV blocks a request needs to produce its first token here."""
        return -(-(request.prompt_tokens + 1) // self.block_tokens)

    def can_hold(self, request: PoolRequest) -> bool:
        """Return whether the request fits into this unit at all."""
        return (
            request.total_tokens <= self.max_model_len
            and self.blocks_for(request) <= self.total_blocks
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The node at one instant."""

    now: float
    """Monotonic seconds."""
    engines: int
    max_group: int
    dead: frozenset[int]
    """Engines that no group can be formed with."""
    partition: Partition
    switching: bool
    """A switch is running: a target in the plan would not be taken."""
    units: tuple[UnitState, ...]
    """One per group of ``partition``, in its order."""
    pool: tuple[PoolRequest, ...]
    """The head of the task pool, by priority, then arrival."""
