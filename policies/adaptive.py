"""The layout in which the requests that really come cost the least time.

Every layout for all engines has a shadow (``hindsight.py``): a model of the node which gets the
same requests. The policy adds up what each would have saved beside the current one, and changes to
it when that has reached the price of the switch, as in the ski rental problem. So the regret about
a layout that was kept too long is about the price. When a part of it has been saved, the policy
looks ahead: the latest requests come again, with and without the switch (``hindsight.foreseen``).
What this saves pays the rest, and what would lose so is not done. If a busy node has a sudden
surge, the policy looks ahead to narrower units at once. It also remembers for minutes by how much
the node was slower than each layout would have been, the stops of its switches included. While one
layout would have been better, every other one must save its distance to that one besides the price.
So a layout that is better in quiet moments, and much worse in sudden bursts, is not taken up again
after each of them. Once a crowd has gone for longer than most bursts pause, none of this counts any
more (``Memory.without_gone_crowd``).

Where promises are given, a broken one counts like the seconds that it allows to its request
(``jobs.py``). So the node keeps the layout that keeps most promises, and of several that keep the
same, the fastest. Urgent requests go first in every layout. While such come, they may have a group
to themselves (``lane.py``), if an operator says so. Then the candidates differ in the layout of the
rest. If this group is missing, or a request is too long for the present units, the node changes at
once. It takes the layout that a look ahead finds best among those with this group, or with room for
the request.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.policies.adaptive_memory import Memory
from shoal.policies.candidates import candidates_of, widest
from shoal.policies.first_layout import first_layout
from shoal.policies.flying import FLYING
from shoal.policies.hindsight import (
    Hindsight,
    Lasting,
    News,
    Staying,
    begin,
    follow,
    foreseen,
    levelled,
    moved,
    raised,
    renewed,
    saved,
)
from shoal.policies.jobs import BROKEN
from shoal.policies.lane import LINGER_SECONDS, lane_of
from shoal.policies.static import Preference, dispatch_least_loaded, with_singles
from shoal.policies.switch_costs import SwitchCosts
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
from shoal.policies.terms import TermsOf, terms_of
from shoal.policies.values.layouts import Unit, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Dispatch, Plan, Policy, SwitchReason, Verdict
from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    OUTPUTS_KEPT,
    PoolRequest,
    Snapshot,
    StepPredictor,
)

WATCH_SECONDS = 0.1
"""How often the layout is judged."""
MANY = 512
"""With more requests on the node, the intervals grow with their number: judging takes longer, too,
and the controller has other work. Nor does it matter so soon, because so many take long."""
LEAST_SECONDS = 0.5
"""Least time between two switches, unless the current units are too small for a request."""
LOOK_SECONDS = 0.25
"""How often it is foreseen what a switch would bring, which takes as long as many judgements."""
TERMS_SECONDS = 0.5
"""How long the cost model's numbers are used."""
USUAL_SECONDS = 60.0
"""Time constant of the usual number of requests: longer than the pauses between most bursts."""
REGRET_SECONDS = 120.0
"""Time constant with which it is forgotten by how much the node was slower than a layout."""


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
        memory = Memory(snapshot.now - WATCH_SECONDS)
    memory = replace(
        memory,
        arrived=memory.arrived + snapshot.arrived,
        placed=memory.placed + snapshot.placed,
        ended=memory.ended + snapshot.ended,
    )
    if snapshot.switching:
        return Plan(dispatches, memory=replace(memory, at=snapshot.now))
    here = snapshot.partition
    lacks_lane = lane is not None and lane not in here
    if widest(here) < needed or lacks_lane or any(unit.layout.pp > 1 for unit in here):
        return _forced(snapshot, model, memory, dispatches, needed, lane)
    if snapshot.now - memory.at < WATCH_SECONDS * _crowd(snapshot) and memory.shadows is not None:
        return Plan(dispatches, memory=memory)
    return _by_hindsight(snapshot, model, memory, dispatches, needed, lane)


def _forced(
    snapshot: Snapshot,
    model: StepPredictor,
    memory: Memory,
    dispatches: tuple[Dispatch, ...],
    needed: int,
    lane: Unit | None,
) -> Plan:
    """Return the plan for a node whose units are too small for a request, or lack the lane.

    Nor does it stay in pipelines, which only operators choose.

    The arguments are those of ``_by_hindsight``.
    """
    memory = _watched(snapshot, model, memory, lane)
    able = candidates_of(snapshot, needed, lane)
    ahead = _foreseen_of(able, memory, SwitchCosts(snapshot, model))
    target = max(ahead, key=ahead.__getitem__, default=snapshot.partition)
    if target == snapshot.partition:
        return Plan(dispatches, memory=memory)
    is_long = widest(snapshot.partition) < needed
    reason = "long" if is_long else _reason(snapshot, target, lane)
    return Plan(dispatches, target, "carry", reason, replace(memory, agreed=None))


def _by_hindsight(
    snapshot: Snapshot,
    model: StepPredictor,
    memory: Memory,
    dispatches: tuple[Dispatch, ...],
    needed: int,
    lane: Unit | None,
) -> Plan:
    """Return the plan for a node whose units hold every request.

    Args:
        snapshot: the node.
        model: predicts the times of steps.
        memory: what the policy remembers.
        dispatches: the requests that start now.
        needed: see ``candidates_of``.
        lane: the group that urgent requests have to themselves.
    """
    first = None if memory.age else _first(snapshot, model)
    if first is not None:
        return Plan(dispatches, first, "carry", "start", replace(memory, at=snapshot.now))
    costs = SwitchCosts(snapshot, model)
    books = _balanced(snapshot, costs, _watched(snapshot, model, memory, lane))
    near = [c for c in books.near(snapshot) if widest(c) >= needed]
    if not near:
        return Plan(dispatches, memory=books.memory, verdicts=books.verdicts)
    best, books = _looked_ahead(snapshot, costs, books, near)
    if best is None:
        return Plan(dispatches, memory=books.memory, verdicts=books.verdicts)
    memory = _leaving(snapshot, books, best, costs.loss(best, _requests_lately(snapshot)))
    reason = _reason(snapshot, best, lane)
    return Plan(dispatches, best, "carry", reason, memory, verdicts=books.verdicts)


def _crowd(snapshot: Snapshot) -> float:
    """Return how many times as long as usual all intervals are."""
    return max(1.0, snapshot.requests / MANY)


def _requests_lately(snapshot: Snapshot) -> float:
    """Return as many requests as were there lately, or are there."""
    return max(snapshot.requests, snapshot.smoothed_requests)


@dataclass(frozen=True, slots=True)
class _Books:
    """What each candidate has saved and must save at one moment."""

    memory: Memory
    accounts: Mapping[Partition, Account]
    regrets: Mapping[Partition, float]
    """By how much the node was slower than each partition would have been."""
    surge: Collection[Partition]
    """The candidates for which a surge suffices as a reason to look ahead."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The accounts for people."""
        return verdicts_of(self.accounts, self.memory.foreseen)

    def near(self, snapshot: Snapshot) -> list[Partition]:
        """Return the candidates for which it is time to look ahead."""
        in_surge = bool(self.memory.surges.lasting(snapshot.now))
        pause = self.memory.surges.pause(snapshot.now) if in_surge else LOOK_SECONDS
        pause *= _crowd(snapshot)
        if snapshot.since_switch < LEAST_SECONDS or snapshot.now - self.memory.looked < pause:
            return []
        near = [c for c, one in self.accounts.items() if one.is_near or self._may_leave_for(c)]
        if not snapshot.requests:  # a group that nobody is in can be left when a crowd is there
            near = [c for c in near if len(c) < len(snapshot.partition)]
        return near

    def _may_leave_for(self, candidate: Partition) -> bool:
        """Return whether a surge suffices for this one."""
        return candidate in self.surge and self.accounts[candidate].has_room


def _balanced(snapshot: Snapshot, costs: SwitchCosts, memory: Memory) -> _Books:
    """Return what the candidates have saved and must save now."""
    seen, terms = memory.shadows, memory.terms
    assert seen is not None
    assert terms is not None
    gains, here, now = saved(seen, terms), snapshot.partition, _requests_lately(snapshot)
    stake = 1 + BROKEN if snapshot.targets else 1.0
    noise = stake * noise_of(memory.usual, now)
    prices = {c: price_of(noise, costs.loss(c, now)) for c in gains}
    behind = dict(memory.behind)
    regrets = {c: behind.get(c, 0.0) + gains.get(c, 0.0) for c in (*gains, here)}
    low = {c: -price - gains[c] for c, price in prices.items() if gains[c] < -price}
    if low:
        seen, changed = _begun_again(seen, terms, low, behind, regrets)
        memory = replace(memory, shadows=seen, behind=tuple((behind | changed).items()))
    # What was lost before a surge says nothing of it.
    known = memory.surges.follows_traffic and len(snapshot.outputs) >= OUTPUTS_KEPT
    lasting = memory.surges.lasting(snapshot.now)
    surge = for_surge(here, gains, prices, known) if lasting else set[Partition]()
    gains |= {c: max(0.0, gains[c]) for c in surge}
    vain = min(memory.excursions.cost(here, regrets[here]), stake * FINE_SECONDS * memory.usual)
    fines = {c: fine_of(regrets, c, stake * now) + (0.0 if c in surge else vain) for c in gains}
    past = stake * past_of(memory.usual, now)
    accounts = {
        c: Account(saving, prices[c], fines[c], costs.has_room(c), past)
        for c, saving in gains.items()
    }
    return _Books(memory, accounts, regrets, surge)


def _foreseen_of(
    candidates: Iterable[Partition], memory: Memory, costs: SwitchCosts, lasting: Lasting = ()
) -> dict[Partition, float]:
    """Return what a switch to each of some candidates will bring (``hindsight.foreseen``)."""
    seen, terms = memory.shadows, memory.terms
    assert seen is not None
    assert terms is not None
    stays, caches = Staying(), costs.empty_caches()
    return {
        candidate: foreseen(
            seen, candidate, costs.whole_stop(candidate), terms, lasting, stays, caches
        )
        for candidate in candidates
    }


def _looked_ahead(
    snapshot: Snapshot, costs: SwitchCosts, books: _Books, near: Iterable[Partition]
) -> tuple[Partition | None, _Books]:
    """Return to which of some candidates a switch pays, if to any, and the books after that."""
    memory = books.memory
    ahead = _foreseen_of(near, memory, costs, memory.surges.lasting(snapshot.now))
    worth = {c: seconds - books.accounts[c].unpaid for c, seconds in ahead.items()}
    best = max(worth, key=worth.__getitem__)
    pays = worth[best] > 0.0
    sure = len(best) >= len(snapshot.partition) or memory.agreed == best
    memory = replace(memory, looked=snapshot.now, foreseen=tuple(ahead.items()))
    memory = replace(memory, agreed=best if pays else None)
    return (best if pays and sure else None), replace(books, memory=memory)


def _leaving(snapshot: Snapshot, books: _Books, best: Partition, loss: float) -> Memory:
    """Return the memory when the node changes to a candidate.

    Args:
        snapshot: the node.
        books: what the candidates have saved.
        best: the candidate.
        loss: what the switch costs.
    """
    here, memory = snapshot.partition, books.memory
    wider = len(best) < len(here)
    back = memory.wider is not None and memory.wider != wider
    return replace(
        memory,
        behind=tuple((c, regret + loss) for c, regret in books.regrets.items()),
        excursions=memory.excursions.leaving(here, books.regrets[here]),
        chances=memory.chances.after_switch(snapshot.since_switch, back=back),
        wider=wider,
        agreed=None,
    )


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


def _watched(snapshot: Snapshot, model: StepPredictor, memory: Memory, lane: Unit | None) -> Memory:
    """Return the memory with the shadows as they are now."""
    here, terms = snapshot.partition, memory.terms
    candidates = [c for c in candidates_of(snapshot, 1, lane) if c != here]
    if terms is None or snapshot.now - memory.terms_at > TERMS_SECONDS:
        present = [unit.layout for unit in here]  # pipelines are not chosen, but may be there
        every = tuple(dict.fromkeys((*layouts_up_to(snapshot.max_group), *present)))
        chances = memory.chances.at(snapshot.now, present, every)
        requests = max(snapshot.requests, snapshot.smoothed_requests)
        measured = terms_of(snapshot, model, every)
        terms = chances.terms(measured, present[0], snapshot.now, requests)
        memory = replace(memory, chances=chances, terms=terms, terms_at=snapshot.now)
    seen, brings = memory.shadows, 0.0
    if seen is not None:
        seen, brings = _followed(seen, snapshot, memory, terms)
    if seen is None or not seen.is_of(here, candidates, lane):
        seen = begin(snapshot, candidates, terms, lane)
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
    stayed = seen.current.final_cost(terms) - seen.current.cost_so_far(seen.at)
    brings = stayed - now.current.final_cost(terms)
    return levelled(follow(now, snapshot, news, terms), terms), brings


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
    if lane is None or not any(candidates_of(snapshot, needed, lane)):
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
