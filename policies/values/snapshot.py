"""What a policy sees: the node at one instant, frozen.

The controller and the simulator build the same types, so a policy cannot tell them apart.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.partition import Partition

NORMAL_PRIORITY = 0
"""The priority of requests that ask for none; lower ones are urgent."""
SMOOTHING_SECONDS = 2.0
"""Time constant of the smoothed figures."""
PROMPT_TOKENS, OUTPUT_TOKENS = 1000.0, 200.0
"""Of a request, before any has ended."""


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

    unit: Unit
    serving: bool
    """False while its engines switch, do not answer or are dead: nothing can be dispatched."""
    requests: int
    """Requests dispatched to it and not ended."""
    free_slots: int
    """Further requests that its batch can take, and the one that it may be given ahead."""
    free_blocks: int
    """KV blocks that a request could get now, in blocks of this unit's layout."""
    total_blocks: int
    """KV blocks that one request could ever get in this unit."""
    block_tokens: int
    max_model_len: int
    running: int = 0
    """Requests in its batch at the last report."""
    waiting: int = 0
    """Requests it was given that are in no batch yet, those on their way included."""
    context_tokens: int = 0
    """Prompt tokens of its requests, those generated before a move included."""
    prefill_tokens: int = 0
    """Prompt tokens of its ``waiting`` requests."""
    by_priority: tuple[tuple[int, int], ...] = ()
    """Priorities of its requests, ascending, and how many have each."""
    longest_tokens: int = 0
    """Tokens that the longest of its requests must be able to reach."""
    paused: int = 0
    """Requests on its engines that are not its own: they wait until these are grouped otherwise
    again, or, interleaved, go on in turn with its own."""

    def blocks_for(self, request: PoolRequest) -> int:
        """Return the KV blocks a request needs to produce its first token here."""
        return -(-(request.prompt_tokens + 1) // self.block_tokens)

    def can_hold(self, request: PoolRequest) -> bool:
        """Return whether the request fits into this unit at all."""
        return (
            request.total_tokens <= self.max_model_len
            and self.blocks_for(request) <= self.total_blocks
        )


def requests_on(waiting: int, units: Iterable[UnitState]) -> int:
    """Return the requests on a node where so many wait in the pool."""
    return waiting + sum(unit.requests + unit.paused for unit in units)


@dataclass(frozen=True, slots=True)
class LayoutState:
    """What one unit of idle engines can take in this layout."""

    layout: Layout
    slots: int
    total_blocks: int
    block_tokens: int
    max_model_len: int

    def can_hold(self, request: PoolRequest) -> bool:
        """Return whether a group of this size holds the request at all."""
        return (
            request.total_tokens <= self.max_model_len
            and request.prompt_tokens + 1 <= self.total_blocks * self.block_tokens
        )

    def seats(self, tokens: float) -> float:
        """Return how many requests of so many tokens each it decodes at once, at least one."""
        return max(1.0, min(self.slots, self.total_blocks * self.block_tokens / tokens))


class StepPredictor(Protocol):
    """Says how long steps take (``policies.cost``)."""

    def step_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the predicted time of a step of a unit in this layout."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a priority class was promised."""

    priority: int
    """Requests of this priority or a more urgent one, down to the next target's."""
    ttft_seconds: float
    tpot_seconds: float


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
    """One per unit of ``partition``, in its order."""
    pool: tuple[PoolRequest, ...]
    """The head of the task pool, in the order of service: by priority, aged, then arrival."""
    broken: frozenset[Unit] = frozenset()
    """Units of live engines that cannot be formed: one of them was restarted since they were."""
    pending: Partition | None = None
    """Partition that a running switch leads to."""
    waiting: int = 0
    """Requests in the whole pool."""
    waiting_tokens: int = 0
    """Prompt tokens of the whole pool."""
    arrival_rate: float = 0.0
    """Requests per second: an average of steady arrivals, of a burst what the last seconds say."""
    prompt_tokens: float = PROMPT_TOKENS
    """Prompt tokens that are computed for a request, on average over the latest ones."""
    output_tokens: float = OUTPUT_TOKENS
    """Tokens that a request is given, on average over the latest ones."""
    prompt_rate: float = 0.0
    """Prompt tokens per second that arrive, smoothed over ``SMOOTHING_SECONDS``."""
    smoothed_requests: float = 0.0
    """Requests on the node, waiting or not, smoothed over ``SMOOTHING_SECONDS``."""
    since_switch: float = math.inf
    """Seconds since the last switch ended."""
    since_urgent: float = math.inf
    """Seconds since a request more urgent than ``NORMAL_PRIORITY`` was last on the node."""
    layouts: tuple[LayoutState, ...] = ()
    """Every layout that the node forms, narrowest first."""
    cost_model: StepPredictor | None = None
    """Predicts step times; None when the node was given no shape of its model."""
    targets: tuple[Target, ...] = ()
    """Most urgent class first."""
    sp_above: tuple[tuple[Layout, int], ...] = ()
    """Layouts that run steps in SP, ascending, and the tokens that such a step exceeds."""

    def can_form(self, unit: Unit) -> bool:
        """Return whether the engines of a unit can work as one."""
        return unit not in self.broken and not self.dead.intersection(unit.engines)

    @property
    def requests(self) -> int:
        """Requests on the node: waiting, running and paused."""
        return requests_on(self.waiting, self.units)

    @property
    def widest(self) -> Layout:
        """The layout of the most engines that the node forms."""
        return layouts_up_to(self.max_group)[-1]

    def layout(self, layout: Layout) -> LayoutState | None:
        """Return what a unit of this layout can take; None if nothing is known of it."""
        return next((state for state in self.layouts if state.layout == layout), None)

    def mode(self, layout: Layout, batch: Batch) -> Mode:
        """Return how a unit of this layout runs such a step."""
        above = dict(self.sp_above).get(layout)
        return Mode.TP if above is None or batch.tokens <= above else Mode.SP
