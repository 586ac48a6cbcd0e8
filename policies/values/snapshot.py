"""What a policy sees: the node at one instant, as frozen values.

The simulator runs the real controller, so a policy cannot tell it from a real node.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.policies.values.batch import NO_PROMPTS, Batch, Mode, PromptWork, StepKind
from shoal.policies.values.kv_need import ONE_GROUP, blocks_for, tokens_in
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.level import Level
from shoal.policies.values.pace import Pace
from shoal.policies.values.partition import Partition
from shoal.policies.values.speculation import Speculation

NORMAL_PRIORITY = 0
"""The priority of requests that do not name one; lower numbers are urgent."""
SMOOTHING_SECONDS = 2.0
"""Time constant of the smoothed figures."""
USUAL_STEP_TOKENS = 8192
"""Most tokens of a step if nobody says how many: vLLM's usual bound."""
PROMPT_TOKENS, OUTPUT_TOKENS = 1000.0, 200.0
"""Assumed lengths of a request before any has ended."""
OUTPUTS_KEPT = 128
"""Latest outputs whose lengths are remembered one by one."""
ALIKE_KEPT = 64
"""The same of the prompts of one class, for as long as no others of the class come."""


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A request that waits in the task pool."""

    request_id: str
    prompt_tokens: int
    total_tokens: int
    """Tokens that it must be able to reach: its prompt and its bound on output. If that bound only
    comes from the model's length, it is the prompt and one token."""
    priority: int
    """Lower numbers are served earlier."""
    arrival: float
    """Seconds of the snapshot's clock."""
    cached: tuple[tuple[Unit, int], ...] = ()
    """Units that are believed to have the beginning of its prompt in their prefix caches, each with
    about how many tokens of it. It is only known of the first requests of the pool."""
    prefix: int = 0
    """Names the longest of these beginnings: requests of the same name have it in common."""
    output_limit: int | None = None
    """Most tokens of its output, if the client has said so."""

    def cached_in(self, unit: Unit) -> int:
        """Return about how many tokens of its prompt a unit has cached."""
        return next((tokens for known, tokens in self.cached if known == unit), 0)


@dataclass(frozen=True, slots=True)
class UnitState:
    """One unit of the partition."""

    unit: Unit
    serving: bool
    """False while its engines switch, do not answer or are dead. It then gets no requests."""
    requests: int
    """Requests that were dispatched to it and have not ended."""
    free_slots: int
    """Further requests that its batch can take, including those that it may get ahead."""
    free_blocks: int
    """KV blocks that a request could get now, in blocks of this unit's layout."""
    total_blocks: int
    """KV blocks that one request could ever get in this unit."""
    block_tokens: int
    """Tokens of a block."""
    max_model_len: int
    """Most tokens of a request, its prompt and its output together."""
    running: int = 0
    """Requests in its batch at the last report."""
    waiting: int = 0
    """Its requests that are in no batch yet, including those still on their way to it."""
    context_tokens: int = 0
    """Prompt tokens of its requests, including tokens that were generated before a move."""
    prefill_tokens: int = 0
    """Prompt tokens of its ``waiting`` requests."""
    by_priority: tuple[tuple[int, int], ...] = ()
    """The priorities of its requests, ascending, each with its number of requests."""
    longest_tokens: int = 0
    """Tokens that the longest of its requests must be able to reach."""
    paused: int = 0
    """Requests of other units on its engines. They wait until their unit is back, or until they are
    carried to another."""
    begun: PromptWork = NO_PROMPTS
    """What was left to compute of the prompts of its ``running`` requests, at the last report: a
    long prompt takes several steps."""
    prompts: tuple[int, ...] = ()
    """Prompt tokens of each of its ``waiting`` requests, in the order in which they were sent."""
    cached_tokens: int = 0
    """Prompt tokens that its prefix cache is believed to hold, also those of its requests."""
    portable_tokens: int = 0
    """As many of them a switch takes along, at most, besides those of its requests."""
    group_limits: tuple[int, ...] = ONE_GROUP
    """For each KV group of the model's layers the most blocks that a request takes of it; 0: as
    many as its tokens need (``kv_need.blocks_for``)."""

    def blocks_for(self, request: PoolRequest) -> int:
        """Return the KV blocks that a request needs to produce its first token here."""
        return blocks_for(request.prompt_tokens + 1, self.block_tokens, self.group_limits)

    def can_hold(self, request: PoolRequest) -> bool:
        """Return whether the request fits into this unit at all."""
        return (
            request.total_tokens <= self.max_model_len
            and self.blocks_for(request) <= self.total_blocks
        )


@dataclass(frozen=True, slots=True)
class TierState:
    """Memory of the host in which the KV of requests of one engine waits, and nothing is computed.

    Running requests of the engine alone can go there (``Plan.moves``), and from there to any unit.
    """

    unit: Unit
    """It stands for the tier in moves."""
    tokens: tuple[int, ...]
    """Of each request that is there, oldest first, the tokens that have KV."""
    free_blocks: int
    """KV blocks that requests could still get."""
    total_blocks: int
    """KV blocks of the tier."""
    block_tokens: int
    """Tokens of a block, as of a unit of one engine."""


def requests_on(waiting: int, units: Iterable[UnitState]) -> int:
    """Return the number of requests on a node: those in the pool and those of its units."""
    return waiting + sum(unit.requests + unit.paused for unit in units)


@dataclass(frozen=True, slots=True)
class LayoutState:
    """What one unit in this layout can take while its engines are idle."""

    layout: Layout
    slots: int
    """Requests that it decodes at once."""
    total_blocks: int
    """KV blocks that one request could ever get."""
    block_tokens: int
    """Tokens of a block."""
    max_model_len: int
    """Most tokens of a request, its prompt and its output together."""
    group_limits: tuple[int, ...] = ONE_GROUP
    """For each KV group of the model's layers the most blocks that a request takes of it; 0: as
    many as its tokens need (``kv_need.blocks_for``)."""
    mixed_tokens: int = 0
    """Most prompt tokens of a step in which requests decode; 0: as many as of any step."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it holds."""
        return min(self.max_model_len, self._room)

    def can_hold(self, request: PoolRequest) -> bool:
        """Return whether a unit in this layout holds the request at all."""
        return (
            request.total_tokens <= self.max_model_len and request.prompt_tokens + 1 <= self._room
        )

    @property
    def _room(self) -> int:
        return tokens_in(self.total_blocks, self.block_tokens, self.group_limits)

    def seats(self, tokens: float) -> float:
        """Return how many requests of ``tokens`` tokens each it decodes at once, at least one."""
        rows = tokens / self.block_tokens
        share = sum(min(1.0, limit / rows) if limit else 1.0 for limit in self.group_limits)
        fit = self.total_blocks * self.block_tokens / tokens / share
        return max(1.0, min(self.slots, fit))


class StepPredictor(Protocol):
    """What policies may ask of the cost model (``policies.cost``); it may have further methods."""

    @property
    def speculation(self) -> Speculation:
        """What decodes check and accept, where the node speculates."""

    def step_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the predicted seconds of a step of a unit, for each token that its decodes get."""

    def pace(self, layout: Layout, kind: StepKind, mode: Mode = Mode.TP) -> Pace:
        """Return the predicted times of all steps of one layout, kind and mode."""

    def carry_seconds(self, tokens: float, links: int) -> float:
        """Return the predicted seconds in which the KV of ``tokens`` is read from other engines.

        Args:
            tokens: tokens of all requests that are carried.
            links: pairs of engines that read at the same time.
        """


@dataclass(frozen=True, slots=True)
class ShareLevel:
    """What a node would be like at another level of memory."""

    share: int
    """How many engines share weights; 1: each has whole weights."""
    layouts: tuple[LayoutState, ...]
    """See ``Snapshot.layouts``."""
    cost_model: StepPredictor
    """Knows what steps read from other engines at this level."""
    sp_above: tuple[tuple[Layout, int], ...] = ()
    """See ``Snapshot.sp_above``."""
    stages: int = 1
    """Stages of the pipeline whose layers engines have whole (``Level.stages``); 1: of none."""

    @property
    def level(self) -> Level:
        """Both numbers."""
        return Level(self.share, self.stages)


@dataclass(frozen=True, slots=True)
class Move:
    """Running requests of one unit go on in another one, with their KV."""

    source: Unit
    destination: Unit
    requests: int


@dataclass(frozen=True, slots=True)
class Target:
    """The promise to a priority class."""

    priority: int
    """The class has requests of this priority, and more urgent ones that no earlier target covers.
    That of the last target also has all that are less urgent."""
    ttft_seconds: float
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The node at one instant.

    Background requests (priority 100 and above, such as those of batches) are in ``pool``,
    ``units``, ``waiting`` and ``waiting_tokens`` only if the policy has ``Policy.serves_batches``.
    Other policies see the node without them: their seats and blocks count as free. But one that has
    waited for very long, or that needs a wider unit than there is, is shown to every policy.
    """

    now: float
    """Monotonic seconds."""
    engines: int
    """Engines of the node, dead ones included."""
    max_group: int
    """Engines of the largest group that it forms."""
    dead: frozenset[int]
    """Engines with which no group can be formed."""
    partition: Partition
    switching: bool
    """Whether no switch can start now, so that the controller ignores the plan's target."""
    units: tuple[UnitState, ...]
    """One per unit of ``partition``, in its order."""
    pool: tuple[PoolRequest, ...]
    """The head of the task pool, in the order of service: by priority, aged, then arrival."""
    broken: frozenset[Unit] = frozenset()
    """Groups that must be formed again first, because one of their engines was restarted."""
    pending: Partition | None = None
    """Target of the running switch."""
    waiting: int = 0
    """Requests in the whole pool."""
    waiting_tokens: int = 0
    """Prompt tokens of the whole pool."""
    arrival_rate: float = 0.0
    """Requests per second: with steady arrivals a long average, in a burst the latest rate. No rate
    counts background requests."""
    recent_rate: float = 0.0
    """Requests per second, over about ten seconds."""
    usual_rate: float = 0.0
    """Requests per second, over a time that is longer than most bursts."""
    prompt_tokens: float = PROMPT_TOKENS
    """Prompt tokens that are computed per request, on average over the latest requests."""
    output_tokens: float = OUTPUT_TOKENS
    """Output tokens per request, on average over the latest requests."""
    outputs: tuple[int, ...] = ()
    """Tokens of the latest outputs that have ended, ascending; at most ``OUTPUTS_KEPT``."""
    outputs_by_prompt: tuple[tuple[int, ...], ...] = ()
    """The same by the bits of the prompts' numbers of tokens: those of prompts of 1,024 to 2,047
    tokens are at 11. ``ALIKE_KEPT`` are remembered of each class, also if no other has come for
    long."""
    limit_share: float = 0.0
    """Share of the latest outputs with a limit that were as long as it (``output_limit``)."""
    arrived: tuple[PoolRequest, ...] = ()
    """Requests that have come since the policy was last asked, without background requests."""
    placed: tuple[tuple[str, int], ...] = ()
    """Requests that were sent to units since then, each with about how many tokens of its prompt
    its unit has in the prefix cache."""
    ended: tuple[tuple[str, int], ...] = ()
    """Requests that have left the node since then, each with the tokens that it got; 0: unknown."""
    prompt_rate: float = 0.0
    """Prompt tokens per second that arrive, smoothed over ``SMOOTHING_SECONDS``, without those of
    background requests."""
    hit_share: float = 0.0
    """Share of the latest requests' prompt tokens that were expected in prefix caches."""
    lost_tokens: float = math.inf
    """Prompt tokens that requests would compute again if all prefix caches were lost now. It
    follows from how soon requests use again what is cached. Infinite: nobody knows."""
    late_share: float = 0.0
    """Share of the latest requests' prompt tokens that was cached, and last used between a quarter
    and half of ``watched_tokens`` ago."""
    watched_tokens: float = math.inf
    """Prompt tokens of all requests since the node began."""
    smoothed_requests: float = 0.0
    """Requests on the node, waiting or not, smoothed over ``SMOOTHING_SECONDS``, without background
    requests."""
    since_switch: float = math.inf
    """Seconds since the last switch ended."""
    since_urgent: float = math.inf
    """Seconds since a request more urgent than ``NORMAL_PRIORITY`` was last on the node."""
    layouts: tuple[LayoutState, ...] = ()
    """Every layout that the node forms, narrowest first."""
    cost_model: StepPredictor | None = None
    """Predicts step times; None if the node does not know the shape of its model."""
    targets: tuple[Target, ...] = ()
    """The targets, the most urgent class first."""
    short_first: bool = True
    """Whether long prompts let shorter ones pass (``Dispatch.patience``)."""
    schedules_ahead: bool = False
    """Whether a unit's next step is scheduled while one is computed. Both end before a switch."""
    copies_ahead: bool = False
    """Whether a switch copies most KV while the requests still run, before it stops them."""
    sp_above: tuple[tuple[Layout, int], ...] = ()
    """Layouts that run steps in SP, ascending, each with the tokens above which a step does."""
    urgent_engines: int = 0
    """Engines of the group that urgent requests have to themselves while such come; 0: none."""
    share_weights: int = 1
    """How many engines share weights now."""
    share_stages: int = 1
    """Stages of the pipeline whose layers engines have whole now (``Level.stages``); 1: of none."""
    share_levels: tuple[ShareLevel, ...] = ()
    """The levels to which the policy may change now. From each it may change to each other."""
    moves: tuple[Move, ...] = ()
    """Moves of ``Plan.moves`` that are under way. No switch can start before they have ended."""
    tiers: tuple[TierState, ...] = ()
    """The tiers of the engines that serve; none without ``--kv-tier-gib``."""
    step_tokens: int = 0
    """Most tokens of a step; 0: unknown."""
    memory: object = None
    """What the policy's last plan noted (``Plan.memory``); None before its first plan."""
    can_study: bool = False
    """Whether the controller does what a plan asks for beside its own work (``Plan.study``)."""
    findings: object = None
    """What the latest study has found; None: it goes on, or it failed, or there was none."""

    @property
    def level(self) -> Level:
        """The level of memory that the node has now."""
        return Level(self.share_weights, self.share_stages)

    def can_form(self, unit: Unit) -> bool:
        """Return whether the engines of a unit can work as one."""
        return unit not in self.broken and not self.dead.intersection(unit.engines)

    @property
    def requests(self) -> int:
        """Requests on the node: waiting, running, paused, and those in the host's memory."""
        return requests_on(self.waiting, self.units) + self.parked

    @property
    def parked(self) -> int:
        """Requests whose KV waits in the host's memory."""
        return sum(len(tier.tokens) for tier in self.tiers)

    @property
    def widest(self) -> Layout:
        """The layout with the most engines that the node forms."""
        return layouts_up_to(self.max_group)[-1]

    def layout(self, layout: Layout) -> LayoutState | None:
        """Return what a unit of this layout can take; None if the layout is unknown."""
        return next((state for state in self.layouts if state.layout == layout), None)

    def chunk(self, layout: Layout) -> int:
        """Return the most prompt tokens of a unit's step in which requests decode."""
        most, state = self.step_tokens or USUAL_STEP_TOKENS, self.layout(layout)
        return min(most, state.mixed_tokens or most) if state is not None else most

    def mode(self, layout: Layout, batch: Batch) -> Mode:
        """Return the mode in which a unit of this layout runs a step.

        All its tokens count, those too that decodes check as far as the cost model knows of them.
        """
        above = dict(self.sp_above).get(layout)
        drafts = 0.0 if self.cost_model is None else self.cost_model.speculation.drafts
        tokens = batch.tokens + drafts * batch.decodes
        return Mode.TP if above is None or tokens <= above else Mode.SP


def requests_lately(snapshot: Snapshot) -> float:
    """Return as many requests as were on the node in the last seconds, or are now."""
    return max(snapshot.requests, snapshot.smoothed_requests)
