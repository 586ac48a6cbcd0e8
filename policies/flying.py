"""DP under load, TP when quiet, and a group for requests that need one (Flying Serving, 5 and 6).

The policy asks three questions in this order. Is the node so loaded that only DP keeps up, or so
quiet that every request can have many engines? Does an urgent request want a fast group? Does a
long request want a wide group? Load changes the layout of the whole node, and running requests are
carried to their new units. A group for an urgent or long request takes as few engines as possible,
and the other engines go on in DP. Other requests pause on the engines of an urgent one (hard
preempt).

It pays to notice load early, because a change of layout interrupts every request on the node. So
the policy reacts when the number of requests *grows*, long before it is large. The threshold for
the way back is higher, because under DP each request takes longer and the same load means more
requests. If the node knows its hardware, the policy also counts arriving prompt tokens: many long
prompts with short answers are a load that the number of requests does not show.

Where prompts are most of the work, groups that run long steps in SP can do nearly as much as DP,
and are much faster until they are full. Such a node keeps the widest layout until the arriving
requests, by their rate and lengths, would take nearly all of its time. Even then it changes to DP
only if DP is clearly faster; otherwise it would interrupt all running requests for little gain.
The same holds where engines share weights: DP, which reads the rest from others, must hide this.
"""

import math
from dataclasses import dataclass

from shoal.policies.static import (
    dispatch_least_loaded,
    layout_for_all,
    place_group,
    with_singles,
)
from shoal.policies.switch_costs import usual_prompt
from shoal.policies.values.batch import Batch, StepKind
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Plan, Policy, SwitchReason, TreatmentName
from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    PoolRequest,
    Snapshot,
    StepPredictor,
    UnitState,
    requests_lately,
)

PROMPT = Batch(prefill_tokens=2048, prefill_context=1024)
"""A step whose predicted time gives the cost of a prompt token."""
STEADY = 1.1
"""Load has stopped growing when requests are fewer than this factor times their smoothed number."""


@dataclass(frozen=True, slots=True)
class FlyingSettings:
    """The thresholds of the policy. Requests are counted per live engine of the node."""

    dp_above: float = 3.0
    """Above this number of requests the node goes to DP if they grow, so no burst has to queue."""
    growth: float = 2.0
    """Requests grow when their number is more than this factor times its smoothed value."""
    jam_above: float = 12.0
    """Above this number of requests the node goes to DP even if they do not grow."""
    tp_below: float = 7.0
    """Below this number of requests the node goes back to TP if they have stopped growing."""
    busy_above: float = 0.7
    """The node goes to DP if arriving prompts would take more than this share of the widest
    layout's time."""
    busy_below: float = 0.25
    """The node goes back only if that share is below this."""
    sp_gain: float = 1.3
    """With SP: the node goes to DP for load only if DP serves more requests in the same time than
    the widest layout by more than this factor, each in the batch that serves most."""
    sp_full_above: float = 0.85
    """With SP: the node goes to DP if arriving requests would take more than this share of the
    widest layout's time."""
    sp_filling_above: float = 0.7
    """That share while requests grow, because more will come."""
    sp_full_below: float = 0.7
    """With SP: the node goes back if the share is below this, or if DP is not clearly faster."""
    settle_seconds: float = 3.0
    """How long a layout is kept before quiet may change it."""
    linger_seconds: float = 3.0
    """How long a group for urgent requests waits for the next one."""
    urgent_share: int = 2
    """An urgent request gets one in every ``urgent_share`` engines."""


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
    return Plan(dispatches, target, _treatment(snapshot, target, reason), reason)


def _preference(request: PoolRequest) -> int:
    """Return -1 (widest unit) for urgent requests and 1 (narrowest unit) for all others."""
    return -1 if request.priority < NORMAL_PRIORITY else 1


def _treatment(snapshot: Snapshot, target: Partition, reason: SwitchReason) -> TreatmentName:
    """Return hard if the target only adds groups for urgent requests; else carry.

    In the first case the urgent requests have their group to themselves, and the requests that
    pause on its engines resume there when it is dissolved.
    """
    only_added = all(unit in target for unit in snapshot.partition if unit.is_group)
    few = sum(unit.size for unit in target if unit.is_group) < snapshot.engines
    return "hard" if reason == "urgent" and only_added and few else "carry"


# --- the layout ---


def _target(snapshot: Snapshot, settings: FlyingSettings) -> tuple[Partition, SwitchReason]:
    widest = with_singles(snapshot, units_of(snapshot.engines, snapshot.widest))
    if snapshot.partition == widest:
        stays = not _is_loaded(snapshot, settings)
    else:
        stays = _is_quiet(snapshot, settings)
    if stays:
        return widest, "quiet"
    urgent = _urgent_layout(snapshot, settings)
    long = layout_for_all(snapshot) or (snapshot.widest if snapshot.layouts else DP)
    wide = max(urgent, long)
    if wide == DP:
        return with_singles(snapshot, ()), "load"
    target = with_singles(snapshot, place_group(snapshot, wide))
    return target, "urgent" if urgent >= long else "long"


def _is_loaded(snapshot: Snapshot, settings: FlyingSettings) -> bool:
    requests = snapshot.requests / _alive(snapshot)
    full = any(not any(_has_room(u, r) for u in snapshot.units) for r in snapshot.pool[:1])
    rising = requests > settings.dp_above and _grows(snapshot, settings.growth)
    model = _compared_by(snapshot)
    if model is not None:
        above = settings.sp_filling_above if rising else settings.sp_full_above
        filled = full or _fullness(snapshot, model) > above
        return filled and _dp_is_better(snapshot, model, settings)
    busy = _busy(snapshot) > settings.busy_above
    return full or rising or busy or requests > settings.jam_above


def _is_quiet(snapshot: Snapshot, settings: FlyingSettings) -> bool:
    requests = requests_lately(snapshot) / _alive(snapshot)
    rising = requests > settings.dp_above and _grows(snapshot, STEADY)
    few = requests < settings.tp_below and not rising
    settled = snapshot.since_switch > settings.settle_seconds
    if not (few and settled):
        return False
    model = _compared_by(snapshot)
    if model is not None:
        idle = _fullness(snapshot, model) < settings.sp_full_below
        return idle or not _dp_is_better(snapshot, model, settings)
    return _busy(snapshot) < settings.busy_below


def _alive(snapshot: Snapshot) -> int:
    return max(1, snapshot.engines - len(snapshot.dead))


def _grows(snapshot: Snapshot, factor: float) -> bool:
    return snapshot.requests > factor * snapshot.smoothed_requests


def _busy(snapshot: Snapshot) -> float:
    """Return the share of its time that the widest layout would need for the arriving prompts."""
    model = snapshot.cost_model
    if model is None:
        return 0.0
    widest = snapshot.widest
    step = model.step_seconds(widest, PROMPT, snapshot.mode(widest, PROMPT))
    seconds = step / PROMPT.prefill_tokens
    return snapshot.prompt_rate * seconds


def _compared_by(snapshot: Snapshot) -> StepPredictor | None:
    """Return the cost model if DP must be compared with the widest layout, otherwise None."""
    model = snapshot.cost_model
    if snapshot.widest in dict(snapshot.sp_above):
        return model
    return model if model is not None and model.pace(DP, StepKind.DECODE).fetch else None


def _fullness(snapshot: Snapshot, model: StepPredictor) -> float:
    """Return the share of its time that the widest layout would need for all arriving requests."""
    each = _engine_seconds(snapshot, model, snapshot.widest)
    return snapshot.arrival_rate * each / _alive(snapshot)


def _dp_is_better(snapshot: Snapshot, model: StepPredictor, settings: FlyingSettings) -> bool:
    """Return whether DP would serve this load so much faster that it is worth a switch."""
    layouts = (DP, snapshot.widest)
    alone, together = (_engine_seconds(snapshot, model, layout) for layout in layouts)
    return together > settings.sp_gain * alone


def _engine_seconds(snapshot: Snapshot, model: StepPredictor, layout: Layout) -> float:
    """Return the engine seconds that the mean request takes in the batch that serves most.

    This is usually a full batch, even if no batch is full yet: the policy must act before the load
    is there, and the few requests at its beginning say little about which layout can carry it. But
    if a prompt makes a full batch run in SP, which is slower for short steps, the best batch may be
    the largest one that still runs in TP with a prompt.
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
    above = dict(snapshot.sp_above).get(layout, math.inf)
    in_tp = min(full, (above - prompt) / model.speculation.checked)
    return min(share(decodes) for decodes in {full, max(1, int(in_tp))})


def _seats(snapshot: Snapshot, layout: Layout, tokens: float) -> int:
    """Return how many requests of ``tokens`` tokens each fit a unit of this layout."""
    state = snapshot.layout(layout)
    if state is not None:
        return int(state.seats(tokens))
    return max(1, round(layout.world_size * snapshot.requests / _alive(snapshot)))


def _has_room(unit: UnitState, request: PoolRequest) -> bool:
    """Return whether the unit can start the request, or cannot be expected to."""
    fits = unit.free_slots > 0 and unit.blocks_for(request) <= unit.free_blocks
    return not unit.serving or fits or not unit.can_hold(request)


def _urgent_layout(snapshot: Snapshot, settings: FlyingSettings) -> Layout:
    """Return the layout that urgent requests want; DP if there were none lately."""
    if snapshot.since_urgent > settings.linger_seconds:
        return DP
    widest = max(1, min(snapshot.max_group, snapshot.engines // settings.urgent_share))
    return layouts_up_to(widest)[-1]


FLYING = flying_policy("flying", FlyingSettings())
"""See the module."""
