"""DP under load, TP when quiet, and a group for those who need one (Flying Serving, 5 and 6).

Three questions, in this order: is the node so loaded that only DP keeps up, or so quiet that every
request can have many engines; does an urgent request want a fast group; does a long one want a wide
group. Load moves the whole node, and what runs is recomputed on its new unit (soft preempt). A need
takes no more engines than it must, whose requests pause (hard preempt); the rest goes on in DP.

Load is seen early or it costs much: every request that is there when the layout changes is computed
again. So what counts is that requests *grow*, long before they are many. And as the same load means
more requests under DP, where each takes longer, the way back has the higher threshold. Where the
node knows its hardware, the prompts that arrive count as well: many long ones with short
answers are a load that the number of requests does not show.

Groups that run long steps in SP can do nearly what DP can where prompts are most of the work, and
are much faster until they are full. So there the node keeps the widest layout until the requests
that come would take nearly all of its time, by their rate and lengths. It leaves it only if DP
serves them faster by a good part: else all that runs would be computed again for little.
"""

from dataclasses import dataclass

from shoal.policies.forecast import usual_prompt
from shoal.policies.static import dispatch_least_loaded, place_group, with_singles
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Plan, Policy, SwitchReason, TreatmentName
from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    PoolRequest,
    Snapshot,
    StepPredictor,
    UnitState,
)

PROMPT = Batch(prefill_tokens=2048, prefill_context=1024)
"""Work whose time says what a prompt token costs."""
STEADY = 1.1
"""Requests that are less than so many times their smoothed number have stopped growing."""


@dataclass(frozen=True, slots=True)
class FlyingSettings:
    """Where the policy changes its mind. Requests are counted per engine of the node."""

    dp_above: float = 3.0
    """Requests from which on the node goes to DP if they grow: a burst must not queue."""
    growth: float = 2.0
    """They grow when they are so many times their smoothed number."""
    jam_above: float = 12.0
    """Requests from which on it goes to DP in any case."""
    tp_below: float = 7.0
    """Requests under which it goes back to TP if they do not grow any more."""
    busy_above: float = 0.7
    """Part of the widest layout's time that the prompts which arrive may take before DP."""
    busy_below: float = 0.25
    """The same on the way back."""
    sp_gain: float = 1.3
    """Where steps are run in SP: requests of DP to one of the widest layout, in the same time and
    each in the batch that serves most, that make it worth while to go to DP for load."""
    sp_full_above: float = 0.85
    """There: part of the widest layout's time that the requests which come may take before DP."""
    sp_filling_above: float = 0.7
    """The same while requests grow: more are to come."""
    sp_full_below: float = 0.7
    """The same on the way back."""
    settle_seconds: float = 3.0
    """How long a layout is kept before quiet may change it."""
    linger_seconds: float = 3.0
    """How long a group for urgent requests waits for the next one."""
    urgent_share: int = 2
    """An urgent request gets one in so many engines."""


def flying_policy(name: str, settings: FlyingSettings) -> Policy:
    """Return the policy with these settings."""

    def plan(snapshot: Snapshot, /) -> Plan:
        return _plan(snapshot, settings)

    return Policy(name, plan, decides_layout=True)


def _plan(snapshot: Snapshot, settings: FlyingSettings) -> Plan:
    target = snapshot.pending or snapshot.partition
    reason: SwitchReason = ""
    if not snapshot.switching:
        target, reason = _target(snapshot, settings)
    urgent = _urgent_layout(snapshot, settings)
    widest = max(unit.size for unit in target)

    def hold(request: PoolRequest) -> bool:
        """Leave an urgent request in the pool for the group that is formed for it."""
        forming = target != snapshot.partition
        return forming and request.priority < NORMAL_PRIORITY and widest >= urgent.world_size > 1

    dispatches = dispatch_least_loaded(snapshot, prefer=_preference, hold=hold)
    if snapshot.switching or target == snapshot.partition:
        return Plan(dispatches)
    return Plan(dispatches, target, _treatment(snapshot, target), reason)


def _preference(request: PoolRequest) -> int:
    """Urgent requests go to the widest unit, all others leave it to them."""
    return -1 if request.priority < NORMAL_PRIORITY else 1


def _treatment(snapshot: Snapshot, target: Partition) -> TreatmentName:
    """Return hard when groups are only added, for a need: its engines' requests can come back."""
    only_added = all(unit in target for unit in snapshot.partition if unit.is_group)
    few = sum(unit.size for unit in target if unit.is_group) < snapshot.engines
    return "hard" if only_added and few else "soft"


# --- the layout ---


def _target(snapshot: Snapshot, settings: FlyingSettings) -> tuple[Partition, SwitchReason]:
    widest = with_singles(snapshot, units_of(snapshot.engines, snapshot.widest))
    if snapshot.partition == widest:
        stays = not _is_loaded(snapshot, settings)
    else:
        stays = _is_quiet(snapshot, settings)
    if stays:
        return widest, "quiet"
    urgent, long = _urgent_layout(snapshot, settings), _long_layout(snapshot)
    wide = max(urgent, long)
    if wide == DP:
        return with_singles(snapshot, ()), "load"
    target = with_singles(snapshot, place_group(snapshot, wide))
    return target, "urgent" if urgent >= long else "long"


def _is_loaded(snapshot: Snapshot, settings: FlyingSettings) -> bool:
    requests = snapshot.requests / _alive(snapshot)
    full = any(not any(_has_room(u, r) for u in snapshot.units) for r in snapshot.pool[:1])
    rising = requests > settings.dp_above and _grows(snapshot, settings.growth)
    model = _sp_model(snapshot)
    if model is not None:
        above = settings.sp_filling_above if rising else settings.sp_full_above
        filled = full or _fullness(snapshot, model) > above
        return filled and _dp_is_better(snapshot, model, settings)
    busy = _busy(snapshot) > settings.busy_above
    return full or rising or busy or requests > settings.jam_above


def _is_quiet(snapshot: Snapshot, settings: FlyingSettings) -> bool:
    requests = max(snapshot.requests, snapshot.smoothed_requests) / _alive(snapshot)
    rising = requests > settings.dp_above and _grows(snapshot, STEADY)
    few = requests < settings.tp_below and not rising
    settled = snapshot.since_switch > settings.settle_seconds
    if not (few and settled):
        return False
    model = _sp_model(snapshot)
    if model is not None:
        idle = _fullness(snapshot, model) < settings.sp_full_below
        return idle or not _dp_is_better(snapshot, model, settings)
    return _busy(snapshot) < settings.busy_below


def _alive(snapshot: Snapshot) -> int:
    return max(1, snapshot.engines - len(snapshot.dead))


def _grows(snapshot: Snapshot, factor: float) -> bool:
    return snapshot.requests > factor * snapshot.smoothed_requests


def _busy(snapshot: Snapshot) -> float:
    """Return the part of its time that the widest layout would need for the arriving prompts."""
    model = snapshot.cost_model
    if model is None:
        return 0.0
    widest = snapshot.widest
    step = model.step_seconds(widest, PROMPT, snapshot.mode(widest, PROMPT))
    seconds = step / PROMPT.prefill_tokens
    return snapshot.prompt_rate * seconds


def _sp_model(snapshot: Snapshot) -> StepPredictor | None:
    """Return what predicts step times, if the widest layout runs steps in SP; else None."""
    return snapshot.cost_model if snapshot.widest in dict(snapshot.sp_above) else None


def _fullness(snapshot: Snapshot, model: StepPredictor) -> float:
    """Return the part of its time that the widest layout would need for all that arrives."""
    each = _engine_seconds(snapshot, model, snapshot.widest)
    return snapshot.arrival_rate * each / _alive(snapshot)


def _dp_is_better(snapshot: Snapshot, model: StepPredictor, settings: FlyingSettings) -> bool:
    """Return whether DP would serve this load so much faster that it is worth a switch."""
    layouts = (DP, snapshot.widest)
    alone, together = (_engine_seconds(snapshot, model, layout) for layout in layouts)
    return together > settings.sp_gain * alone


def _engine_seconds(snapshot: Snapshot, model: StepPredictor, layout: Layout) -> float:
    """Return the time that the mean request takes of one engine in the batch that serves most.

    That is a full one, though none is yet: a load is to be met before it is there, and as few
    requests as there are when it begins to rise say next to nothing of which layout will carry it.
    But where a prompt would have it run in SP, which is slower for short steps, it may be the
    largest batch that a prompt leaves in TP.
    """

    def seconds(batch: Batch) -> float:
        return model.step_seconds(layout, batch, snapshot.mode(layout, batch))

    def share(decodes: int) -> float:
        context = decodes * round(prompt + output / 2)
        step = seconds(Batch(decodes, context))
        longer = seconds(Batch(decodes, context, prompt, prompt // 2)) - step
        return layout.world_size * (longer + output * step / decodes)

    prompt, output = round(usual_prompt(snapshot)), snapshot.output_tokens
    full = _seats(snapshot, layout, prompt + output)
    in_tp = dict(snapshot.sp_above).get(layout, full + prompt) - prompt
    return min(share(decodes) for decodes in {full, max(1, min(full, in_tp))})


def _seats(snapshot: Snapshot, layout: Layout, tokens: float) -> int:
    """Return how many requests of so many tokens each a unit of this layout has room for."""
    state = snapshot.layout(layout)
    if state is not None:
        return int(state.seats(tokens))
    return max(1, round(layout.world_size * snapshot.requests / _alive(snapshot)))


def _has_room(unit: UnitState, request: PoolRequest) -> bool:
    """Return whether the unit is no reason to call the node full."""
    fits = unit.free_slots > 0 and unit.blocks_for(request) <= unit.free_blocks
    return not unit.serving or fits or not unit.can_hold(request)


def _urgent_layout(snapshot: Snapshot, settings: FlyingSettings) -> Layout:
    """Return the layout that urgent requests want, DP when there are none."""
    if snapshot.since_urgent > settings.linger_seconds:
        return DP
    widest = max(1, min(snapshot.max_group, snapshot.engines // settings.urgent_share))
    return layouts_up_to(widest)[-1]


def _long_layout(snapshot: Snapshot) -> Layout:
    """Return the narrowest layout that holds every request there is, DP if nothing is known."""
    tokens = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for state in snapshot.layouts:
        running = tokens <= min(state.max_model_len, state.total_blocks * state.block_tokens)
        if running and all(state.can_hold(request) for request in snapshot.pool):
            return state.layout
    return snapshot.widest if snapshot.layouts else DP


FLYING = flying_policy("flying", FlyingSettings())
"""See the module."""
