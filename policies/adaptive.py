"""The layout in which the requests that really come cost the least time.

While nothing is promised, every layout for all engines has a shadow (``hindsight.py``): a model of
the node which gets the same requests. The policy adds up what each would have saved beside the
current one, and changes to it when that has reached the price of the switch, as in the ski rental
problem. So the regret about a layout that was kept too long is about the price. When a part of it
has been saved, the policy looks ahead: the latest requests come again, with and without the switch
(``hindsight.foreseen``). What this saves pays the rest, and what would lose so is not done. If a
busy node has a sudden surge, the policy looks ahead to narrower units at once. It also remembers
for minutes by how much the node was slower than each layout would have been, the stops of its
switches included. While one layout would have been better, every other one must save its distance
to that one besides the price. So a layout that is better in quiet moments, and much worse in sudden
bursts, is not taken up again after each of them. Once a crowd has gone for longer than most bursts
pause, none of this counts any more (``Memory.without_gone_crowd``).

Urgent requests go first in every layout. While such come, they may have a group to themselves
(``lane.py``), if an operator says so. With such a group or with promises, and for a request that is
too long for the present units, ``forecast.py`` predicts for every candidate how long requests will
take, or how many promises will be broken; then one group beside narrower units may be a candidate,
too. The price is that of the stop, and doubles whenever a switch goes the other way than the last
one, because a switch that is soon taken back has brought nothing. It returns to its true value
within seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from shoal.policies.adaptive_memory import Memory
from shoal.policies.candidates import candidates_of, widest, with_lane
from shoal.policies.first_layout import first_layout
from shoal.policies.flow import NEAR_SECONDS
from shoal.policies.flying import FLYING
from shoal.policies.forecast import Forecast
from shoal.policies.hindsight import (
    Hindsight,
    News,
    Staying,
    TermsOf,
    begin,
    follow,
    foreseen,
    levelled,
    moved,
    raised,
    renewed,
    saved,
    terms_of,
)
from shoal.policies.lane import LINGER_SECONDS, lane_of
from shoal.policies.static import Preference, dispatch_least_loaded, with_singles
from shoal.policies.switch_price import (
    FINE_SECONDS,
    Account,
    fine_of,
    for_surge,
    noise_of,
    past_of,
    price_of,
    verdicts_of,
)
from shoal.policies.values.layouts import Unit, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Dispatch, Plan, Policy, SwitchReason
from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    OUTPUTS_KEPT,
    PoolRequest,
    Snapshot,
    StepPredictor,
)

REVIEW_SECONDS = 0.05
"""How often the layout is judged by a forecast."""
WATCH_SECONDS = 0.1
"""How often it is judged by the shadows."""
LONGEST_REVIEW_SECONDS = 1.0
"""A judgement counts for at most this time, if the policy was not asked for longer."""
LEAST_SECONDS = 0.5
"""Least time between two switches, unless the current units are too small for a request."""
LOOK_SECONDS = 0.25
"""How often it is foreseen what a switch would bring, which takes as long as many judgements."""
FORGET_SECONDS = 10.0
"""Time constant with which it is forgotten what a candidate would have saved."""
ASIDE_SECONDS = 30.0
"""How long requests are kept for the shadows while a forecast decides."""
TERMS_SECONDS = 0.5
"""How long the cost model's numbers are used."""
USUAL_SECONDS = 60.0
"""Time constant of the usual number of requests: longer than the pauses between most bursts."""
REGRET_SECONDS = 120.0
"""Time constant with which it is forgotten by how much the node was slower than a layout."""
LEAST_PROMISES = 0.1
"""Broken promises that a switch must save beyond its price, if there are targets. What is predicted
to be broken while all promises are safe is noise."""
DOUBT = 2.0
"""Factor by which a switch that goes the other way than the last one makes the next one dearer."""
MOST_DOUBT = 16.0
DOUBT_SECONDS = 10.0
"""Time constant with which the price returns to its true value."""
SHARE_SECONDS = 10.0
"""Time constant of the smoothed share of urgent requests."""
LEAST_SHARE = 0.02
"""Least share of urgent requests that is assumed while there are any."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model = snapshot.cost_model
    if model is None:
        return FLYING.plan(snapshot)
    needed = _size_for_all(snapshot)
    lane = _lane(snapshot, needed)
    prefer = _preference(snapshot) if lane is None else None
    dispatches = dispatch_least_loaded(snapshot, prefer=prefer, lane=lane)
    memory = snapshot.memory
    if not isinstance(memory, Memory):
        memory = Memory(snapshot.now - REVIEW_SECONDS)
    memory = replace(
        memory,
        arrived=memory.arrived + snapshot.arrived,
        placed=memory.placed + snapshot.placed,
        ended=memory.ended + snapshot.ended,
    )
    if snapshot.switching:
        return Plan(dispatches, memory=replace(_aged(memory, snapshot), at=snapshot.now, saved=()))
    stuck = widest(snapshot.partition) < needed
    stuck |= lane is not None and lane not in snapshot.partition
    if snapshot.now - memory.at < REVIEW_SECONDS and not stuck:
        return Plan(dispatches, memory=memory)
    if not snapshot.targets and not stuck and lane is None:
        if snapshot.now - memory.at < WATCH_SECONDS and memory.shadows is not None:
            return Plan(dispatches, memory=memory)
        return _by_hindsight(snapshot, model, memory, dispatches, needed)
    memory = _aged(_set_aside(memory, snapshot.now), snapshot)
    among = candidates_of(snapshot, needed) if lane is None else with_lane(snapshot, needed, lane)
    candidates = [c for c in among if c != snapshot.partition]
    forecast = Forecast(snapshot, model, memory.urgent, lane)
    if stuck:
        target = min(candidates, key=forecast.cost, default=snapshot.partition)
    else:
        target, memory = _judged(snapshot, forecast, candidates, memory)
    if target == snapshot.partition:
        return Plan(dispatches, memory=memory)
    reason = "long" if stuck and lane is None else _reason(snapshot, target, lane)
    wider = len(target) < len(snapshot.partition)
    turned = memory.wider is not None and memory.wider != wider
    doubt = min(MOST_DOUBT, DOUBT * memory.doubt) if turned else memory.doubt
    memory = replace(memory, at=snapshot.now, saved=(), doubt=doubt, wider=wider)
    return Plan(dispatches, target, "carry", reason, memory)


def _set_aside(memory: Memory, now: float) -> Memory:
    """Return the memory while a forecast decides: shadows get what has come when they decide again.

    After long they begin anew, because it would take long to give them everything at once.
    """
    if memory.shadows is not None and now - memory.shadows.at < ASIDE_SECONDS:
        return memory
    return replace(memory, shadows=None, arrived=(), placed=(), ended=())


def _by_hindsight(
    snapshot: Snapshot,
    model: StepPredictor,
    memory: Memory,
    dispatches: tuple[Dispatch, ...],
    needed: int,
) -> Plan:
    """Return the plan for a node without promises and without a group for urgent requests.

    Args:
        snapshot: the node.
        model: predicts the times of steps.
        memory: what the policy remembers.
        dispatches: the requests that start now.
        needed: see ``candidates_of``.
    """
    first = None if memory.age else _first(snapshot, model)
    if first is not None:
        return Plan(dispatches, first, "carry", "start", replace(memory, at=snapshot.now))
    memory = _watched(snapshot, model, _aged(memory, snapshot))
    seen, terms = memory.shadows, memory.terms
    assert seen is not None
    assert terms is not None
    gains, here = saved(seen, terms), snapshot.partition
    now = max(snapshot.requests, snapshot.smoothed_requests)
    noise, forecast = noise_of(memory.usual, now), Forecast(snapshot, model)
    prices = {c: price_of(noise, forecast.loss(c, now)) for c in gains}
    behind = dict(memory.behind)
    regrets = {c: behind.get(c, 0.0) + gains.get(c, 0.0) for c in (*gains, here)}
    low = {c: -price - gains[c] for c, price in prices.items() if gains[c] < -price}
    if low:
        seen, changed = _begun_again(seen, terms, low, behind, regrets)
        memory = replace(memory, shadows=seen, behind=tuple((behind | changed).items()))
    # What was lost before a surge says nothing of it.
    lasting = memory.surges.lasting(snapshot.now)
    known = memory.surges.follows_traffic and len(snapshot.outputs) >= OUTPUTS_KEPT
    surge = for_surge(here, gains, prices, known) if lasting else set[Partition]()
    gains |= {c: max(0.0, gains[c]) for c in surge}
    vain = min(memory.excursions.cost(here, regrets[here]), FINE_SECONDS * memory.usual)
    fines = {c: fine_of(regrets, c, now) + (0.0 if c in surge else vain) for c in gains}
    past = past_of(memory.usual, now)
    accounts = {
        c: Account(saving, prices[c], fines[c], forecast.has_room(c), past)
        for c, saving in gains.items()
    }
    near = [c for c, one in accounts.items() if one.is_near or (one.has_room and c in surge)]
    near = [c for c in near if widest(c) >= needed]
    pause = memory.surges.pause(snapshot.now) if lasting else LOOK_SECONDS
    early = snapshot.since_switch < LEAST_SECONDS or snapshot.now - memory.looked < pause
    if not snapshot.requests:  # a group that nobody is in can be left when a crowd is there
        near = [c for c in near if len(c) < len(here)]
    if not near or early:
        return Plan(dispatches, memory=memory, verdicts=verdicts_of(accounts, memory.foreseen))
    stops = {c: forecast.whole_stop(c) for c in near}
    stays, caches = Staying(), forecast.empty_caches()
    ahead = {c: foreseen(seen, c, stop, terms, lasting, stays, caches) for c, stop in stops.items()}
    memory = replace(memory, looked=snapshot.now, foreseen=tuple(ahead.items()))
    worth = {c: brings - accounts[c].unpaid for c, brings in ahead.items()}
    best = max(worth, key=worth.__getitem__)
    pays, wider = worth[best] > 0.0, len(best) < len(here)
    sure = not wider or memory.agreed == best
    verdicts = verdicts_of(accounts, memory.foreseen)
    memory = replace(memory, agreed=best if pays else None)
    if not (pays and sure):
        return Plan(dispatches, memory=memory, verdicts=verdicts)
    loss = forecast.loss(best, now)
    back = memory.wider is not None and memory.wider != wider
    chances = memory.chances.after_switch(snapshot.since_switch, back=back)
    lost = tuple((c, regret + loss) for c, regret in regrets.items())
    excursions = memory.excursions.leaving(here, regrets[here])
    memory = replace(memory, behind=lost, excursions=excursions)
    memory = replace(memory, wider=wider, agreed=None, chances=chances)
    return Plan(dispatches, best, "carry", _reason(snapshot, best), memory, verdicts=verdicts)


def _begun_again(
    seen: Hindsight,
    terms: TermsOf,
    low: Mapping[Partition, float],
    behind: Mapping[Partition, float],
    regrets: Mapping[Partition, float],
) -> tuple[Hindsight, dict[Partition, float]]:
    """Return the shadows when the accounts of some candidates begin again, and what these change.

    Args:
        seen: the shadows.
        terms: what units can do.
        low: by how much the candidates have lost more than their price.
        behind: see ``Memory``. What it is for these candidates then is the second value.
        regrets: by how much the node was slower than each partition would have been, until now.
    """
    if any(queue.waiting for queue in seen.current.queues):
        return raised(seen, low), {c: behind.get(c, 0.0) - more for c, more in low.items()}
    return renewed(seen, low, terms), {c: regrets[c] for c in low}


def _first(snapshot: Snapshot, model: StepPredictor) -> Partition | None:
    """Return the partition with which an idle node begins; None: the present one.

    A node that a crowd has left begins again.
    """
    if snapshot.requests or not snapshot.sp_above:
        return None
    layout = first_layout(snapshot, model)
    target = with_singles(snapshot, units_of(snapshot.engines, layout))
    return target if target != snapshot.partition else None


def _watched(snapshot: Snapshot, model: StepPredictor, memory: Memory) -> Memory:
    """Return the memory with the shadows as they are now."""
    here, terms = snapshot.partition, memory.terms
    candidates = [c for c in candidates_of(snapshot, 1) if c != here]
    if terms is None or snapshot.now - memory.terms_at > TERMS_SECONDS:
        every, present = layouts_up_to(snapshot.max_group), [unit.layout for unit in here]
        chances = memory.chances.at(snapshot.now, present, every)
        requests = max(snapshot.requests, snapshot.smoothed_requests)
        measured = terms_of(snapshot, model, every)
        terms = chances.terms(measured, present[0], snapshot.now, requests)
        memory = replace(memory, chances=chances, terms=terms, terms_at=snapshot.now)
    seen, brings = memory.shadows, 0.0
    if seen is not None:
        seen, brings = _followed(seen, snapshot, memory, terms)
    if seen is None or seen.here != here or dict(seen.trials).keys() != set(candidates):
        seen = begin(snapshot, candidates, terms)
    elapsed = max(0.0, snapshot.now - memory.at)
    age = memory.age + elapsed
    kept = math.exp(-elapsed / min(USUAL_SECONDS, age)) if age else 1.0
    regretted = math.exp(-elapsed / REGRET_SECONDS)
    memory = replace(
        memory,
        at=snapshot.now,
        age=age,
        shadows=seen,
        surges=memory.surges.at(seen, len(memory.arrived)),
        arrived=(),
        placed=(),
        ended=(),
        requests=kept * memory.requests + (1 - kept) * snapshot.requests,
        squares=kept * memory.squares + (1 - kept) * snapshot.requests**2,
        behind=tuple((p, regretted * (seconds - brings)) for p, seconds in memory.behind),
        excursions=memory.excursions.aged(regretted),
    )
    return memory.without_gone_crowd(snapshot.requests, terms)


def _followed(
    seen: Hindsight, snapshot: Snapshot, memory: Memory, terms: TermsOf
) -> tuple[Hindsight, float]:
    """Return the shadows as they are now, and what a switch brings the requests that it moved."""
    here, news = snapshot.partition, News(memory.arrived, memory.placed, memory.ended)
    if here not in dict(seen.trials):
        return follow(seen, snapshot, news, terms), 0.0
    now = moved(seen, here, terms)
    stayed = seen.current.all_in_all(terms) - seen.current.spent(seen.at)
    brings = stayed - now.current.all_in_all(terms)
    return levelled(follow(now, snapshot, news, terms), terms), brings


def _judged(
    snapshot: Snapshot, forecast: Forecast, candidates: list[Partition], memory: Memory
) -> tuple[Partition, Memory]:
    """Return the partition to have, and the memory with what candidates have saved by now."""
    here, before = snapshot.partition, dict(memory.saved)
    now = forecast.cost(here)
    costs = {candidate: forecast.cost(candidate) for candidate in candidates}
    elapsed = min(LONGEST_REVIEW_SECONDS, snapshot.now - memory.at)
    kept = math.exp(-elapsed / FORGET_SECONDS)
    saved = {
        candidate: max(
            0.0, kept * before.get(candidate, 0.0) + elapsed * (now - cost) / NEAR_SECONDS
        )
        for candidate, cost in costs.items()
    }
    memory = replace(memory, at=snapshot.now, saved=tuple(saved.items()))
    if snapshot.since_switch < LEAST_SECONDS:
        return here, memory

    def pays(candidate: Partition) -> bool:
        if not saved[candidate] or costs[candidate] >= now or not forecast.has_room(candidate):
            return False
        stall = forecast.stall(candidate)
        stop = forecast.cost(candidate, stall) - costs[candidate]
        price = memory.doubt * (stop + (LEAST_PROMISES if snapshot.targets else 0.0))
        return saved[candidate] > price and now - costs[candidate] > price

    best = sorted(candidates, key=costs.__getitem__)
    return next(filter(pays, best), here), memory


def _aged(memory: Memory, snapshot: Snapshot) -> Memory:
    """Return the memory as it is now: less doubt, and the latest share of urgent requests."""
    elapsed = snapshot.now - memory.at
    doubt = 1 + (memory.doubt - 1) * math.exp(-elapsed / DOUBT_SECONDS)
    if snapshot.since_urgent > LINGER_SECONDS:
        return replace(memory, doubt=doubt, urgent=0.0)
    urgent = sum(request.priority < NORMAL_PRIORITY for request in snapshot.pool)
    for unit in snapshot.units:
        urgent += sum(n for priority, n in unit.by_priority if priority < NORMAL_PRIORITY)
    share = urgent / max(1, snapshot.requests)
    kept = math.exp(-elapsed / SHARE_SECONDS) if memory.urgent else 0.0
    share = max(LEAST_SHARE, min(1 - LEAST_SHARE, kept * memory.urgent + (1 - kept) * share))
    return replace(memory, doubt=doubt, urgent=share)


def _preference(snapshot: Snapshot) -> Preference:
    """Send the most urgent class to the widest units and all others elsewhere, if units differ."""
    if snapshot.targets:
        bound = snapshot.targets[0].priority if len(snapshot.targets) > 1 else None
    else:
        bound = NORMAL_PRIORITY - 1 if snapshot.since_urgent <= LINGER_SECONDS else None

    def prefer(request: PoolRequest) -> int:
        if bound is None:
            return 0
        return -1 if request.priority <= bound else 1

    return prefer


def _lane(snapshot: Snapshot, needed: int) -> Unit | None:
    """Return the group that urgent requests have to themselves, if every request can be held."""
    lane = lane_of(snapshot)
    if lane is None or not any(with_lane(snapshot, needed, lane)):
        return None
    return lane


def _reason(snapshot: Snapshot, target: Partition, lane: Unit | None = None) -> SwitchReason:
    if len({unit.size for unit in target}) > 1 or lane in target:
        return "urgent"
    if snapshot.targets:
        return "slo"
    return "load" if len(target) > len(snapshot.partition) else "quiet"


def _size_for_all(snapshot: Snapshot) -> int:
    """Return the size of the smallest unit that holds every request; 1 if none does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for state in snapshot.layouts:
        if running <= state.longest and all(map(state.can_hold, snapshot.pool)):
            return state.layout.world_size
    return 1


ADAPTIVE = Policy("adaptive", _plan, decides_layout=True)
"""See the module."""
