"""The layout in which the requests that really come cost the least time.

Each layout for all engines is a candidate, and ten times a second the policy judges all of them:

1. Every candidate has a shadow (``hindsight.py``): a model of the node that gets the same requests.
   What it would have saved beside the present layout adds up in an account.
2. A candidate must save the price of the switch (``switch_price.py``), as in the ski rental
   problem. So the regret about a layout that was kept too long is about the price.
3. When a part of the price has been saved, the policy looks ahead (``foresight.py``): the latest
   requests come again, with and without the switch. What this saves pays the rest, and what would
   lose so is not done. In a sudden surge (``surges.py``) it looks ahead to narrower units at once.
4. The policy remembers for minutes by how much the node was slower than each layout would have
   been (``adaptive_memory.py``, ``excursions.py``). While one of them would have been better, every
   other one must save its distance to that one beside the price. So a layout that is better in
   quiet moments, and much worse in sudden bursts, is not taken up again after each of them. Once a
   crowd has gone for longer than most bursts pause, none of this counts any more.

Where promises are given, a broken one counts like the seconds that it allows to its request
(``jobs.py``). So the node keeps the layout that keeps most promises, and of several that keep the
same, the fastest. Urgent requests go first in every layout. While such come, they may have a group
to themselves (``lane.py``), if an operator says so. Then the candidates differ in the layout of the
rest. If this group is missing, or a request is too long for the present units, the node changes at
once. It takes the layout that a look ahead finds best among those with this group, or with room for
the request.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.policies.adaptive_memory import Memory
from shoal.policies.candidates import candidates_of, widest_size
from shoal.policies.first_layout import first_layout
from shoal.policies.flying import FLYING
from shoal.policies.foresight import Foresight
from shoal.policies.hindsight import Hindsight
from shoal.policies.jobs import BROKEN
from shoal.policies.lane import LINGER_SECONDS, lane_of
from shoal.policies.static import (
    Preference,
    dispatch_least_loaded,
    layout_for_all,
    with_singles,
)
from shoal.policies.surges import Lasting
from shoal.policies.switch_costs import SwitchCosts
from shoal.policies.switch_price import (
    FINE_SECONDS,
    MOST_AHEAD,
    Account,
    fine_of,
    most_surplus_of,
    noise_of,
    price_of,
)
from shoal.policies.values.layouts import DP, Unit
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Plan, Policy, SwitchReason, Verdict
from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    OUTPUTS_KEPT,
    PoolRequest,
    Snapshot,
    StepPredictor,
    requests_lately,
)

WATCH_SECONDS = 0.1
"""How often the layout is judged."""
MANY_REQUESTS = 512
"""With more requests on the node, the intervals grow with their number: judging takes longer, too,
and the controller has other work. Nor does it matter so soon, because so many take long."""
LEAST_SECONDS = 0.5
"""Least time between two switches, unless the present units are too small for a request."""
LOOK_SECONDS = 0.25
"""How often the policy looks ahead, which takes as long as many judgements."""
LOST_SECONDS = 10.0
"""After such a time without findings, a judgement that goes on in another thread has failed. With
many requests this, too, grows with their number."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model = snapshot.cost_model
    if model is None:
        return FLYING.plan(snapshot)
    # Requests that no unit holds are refused.
    needed = (layout_for_all(snapshot) or DP).world_size
    lane = _usable_lane(snapshot, needed)
    prefer = _preference(snapshot) if lane is None else None
    dispatches = dispatch_least_loaded(snapshot, prefer=prefer, lane=lane)
    return replace(_layout_plan(snapshot, model, needed, lane), dispatches=dispatches)


def _layout_plan(snapshot: Snapshot, model: StepPredictor, needed: int, lane: Unit | None) -> Plan:
    """Return the plan for the node's layout, without dispatches.

    Args:
        snapshot: the node.
        model: predicts the times of steps.
        needed: engines of the narrowest unit that holds every request.
        lane: the group that urgent requests have to themselves.
    """
    memory, here = snapshot.memory, snapshot.partition
    if not isinstance(memory, Memory):
        memory = Memory(snapshot.now - WATCH_SECONDS)
    memory = replace(memory, news=memory.news.and_of(snapshot))
    studied = _studied(snapshot, memory, needed, lane)
    if snapshot.switching:
        return studied or Plan(memory=replace(memory.undisturbed, judged_at=snapshot.now))
    lacks_lane = lane is not None and lane not in here
    in_pipelines = any(unit.layout.pp > 1 for unit in here)  # only operators choose these
    if widest_size(here) < needed or lacks_lane or in_pipelines:
        memory = memory.undisturbed.watched(snapshot, model, lane)
        return _forced(snapshot, memory, SwitchCosts(snapshot, model), needed, lane)
    if studied is not None:
        return studied
    memory = memory.undisturbed
    is_due = snapshot.now - memory.judged_at >= WATCH_SECONDS * _slowdown(snapshot)
    if not is_due and memory.hindsight is not None:
        return Plan(memory=memory)
    first = None if memory.age else _first_partition(snapshot, model)
    if first is not None:
        memory = replace(memory, judged_at=snapshot.now)
        return Plan(target=first, reason="start", memory=memory)

    def judge() -> Plan:
        watched = memory.watched(snapshot, model, lane)
        return _by_hindsight(snapshot, watched, SwitchCosts(snapshot, model), needed, lane)

    if snapshot.can_study:
        return Plan(memory=memory.judging(snapshot.now), study=judge)
    return judge()


def _studied(snapshot: Snapshot, memory: Memory, needed: int, lane: Unit | None) -> Plan | None:
    """Return the plan while a judgement goes on in another thread, or when it has ended.

    None is returned if no judgement goes on, if it has failed, or if what it has found cannot be
    done. Moves of running requests, during which no switch can start (``Snapshot.switching``), do
    not end a judgement: they may begin twice a second, and a longer judgement would never end.

    Args:
        snapshot: the node as it is now.
        memory: what the policy remembers.
        needed: see ``_layout_plan``.
        lane: see ``_layout_plan``.
    """
    if memory.judged is None:
        return None
    found = _found(snapshot, memory)
    if found is None:
        is_lost = snapshot.now - memory.judged_at >= LOST_SECONDS * _slowdown(snapshot)
        return None if is_lost else Plan(memory=memory)
    return found if _is_possible(found, snapshot, needed, lane) else None


def _found(snapshot: Snapshot, memory: Memory) -> Plan | None:
    """Return the plan of the judgement that went on in another thread; None if it is not done."""
    found = snapshot.findings
    if not isinstance(found, Plan) or not isinstance(found.memory, Memory):
        return None
    if found.memory.judged_at != memory.judged_at:
        return None
    return replace(found, memory=replace(found.memory, news=memory.news))


def _is_possible(found: Plan, snapshot: Snapshot, needed: int, lane: Unit | None) -> bool:
    """Return whether what a judgement has found can still be done.

    Args:
        found: its plan.
        snapshot: the node as it is now.
        needed: see ``_layout_plan``.
        lane: see ``_layout_plan``.
    """
    if found.target is None or snapshot.switching:
        return found.target is None
    assert isinstance(found.memory, Memory)
    is_here = _hindsight_of(found.memory).here == snapshot.partition
    return is_here and found.target in candidates_of(snapshot, needed, lane)


def _forced(
    snapshot: Snapshot, memory: Memory, costs: SwitchCosts, needed: int, lane: Unit | None
) -> Plan:
    """Return the plan for a node that cannot stay as it is: it takes the best able layout at once.

    The arguments are those of ``_by_hindsight``.
    """
    able = candidates_of(snapshot, needed, lane)
    gains = _look(able, memory, costs)
    target = max(gains, key=gains.__getitem__, default=snapshot.partition)
    if target == snapshot.partition:
        return Plan(memory=memory)
    is_long = widest_size(snapshot.partition) < needed
    reason = "long" if is_long else _reason(snapshot, target, lane)
    return Plan(target=target, reason=reason, memory=replace(memory, agreed=None))


def _by_hindsight(
    snapshot: Snapshot, memory: Memory, costs: SwitchCosts, needed: int, lane: Unit | None
) -> Plan:
    """Return the plan for a node that changes its layout only if that pays.

    Args:
        snapshot: the node.
        memory: what the policy remembers, with the shadows as they are now.
        costs: what switches cost.
        needed: see ``_layout_plan``.
        lane: see ``_layout_plan``.
    """
    books, best = _balanced(snapshot, costs, memory), None
    near = [c for c in books.near(snapshot) if widest_size(c) >= needed]
    if near:
        sure = {c for c in near if books.accounts[c].unpaid <= 0.0}
        gains = _look(near, memory, costs, memory.surges.lasting(snapshot.now), sure)
        best, books = books.after(gains, snapshot.now)
    if best is None:
        return Plan(memory=books.memory, verdicts=books.verdicts)
    loss = costs.loss(best, requests_lately(snapshot))
    return Plan(
        target=best,
        reason=_reason(snapshot, best, lane),
        memory=books.memory.leaving(snapshot, best, books.regrets, loss),
        verdicts=books.verdicts,
    )


def _slowdown(snapshot: Snapshot) -> float:
    """Return how many times as long as usual all intervals are, because there are many requests."""
    return max(1.0, snapshot.requests / MANY_REQUESTS)


@dataclass(frozen=True, slots=True)
class _Books:
    """What each candidate has saved and must save at one moment."""

    memory: Memory
    accounts: Mapping[Partition, Account]
    regrets: dict[Partition, float]
    """By how many seconds of requests the node was slower than each partition would have been."""
    surge: Collection[Partition]
    """The candidates for which a surge suffices as a reason to look ahead."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The accounts for people, with what the latest look ahead said."""
        foreseen = dict(self.memory.foreseen)
        return tuple(
            Verdict(
                candidate, one.saved, one.price, one.fine, foreseen.get(candidate), one.has_room
            )
            for candidate, one in self.accounts.items()
        )

    def near(self, snapshot: Snapshot) -> list[Partition]:
        """Return the candidates for which it is time to look ahead."""
        surges, now = self.memory.surges, snapshot.now
        pause = surges.pause(now) if surges.lasting(now) else LOOK_SECONDS
        has_paused = now - self.memory.looked_at >= pause * _slowdown(snapshot)
        if snapshot.since_switch < LEAST_SECONDS or not has_paused:
            return []
        near = [c for c, one in self.accounts.items() if one.is_near or self._may_leave_for(c)]
        if not snapshot.requests:  # a group that nobody is in can be left when a crowd is there
            near = [c for c in near if len(c) < len(snapshot.partition)]
        return near

    def after(
        self, gains: Mapping[Partition, float], now: float
    ) -> tuple[Partition | None, "_Books"]:
        """Return to which candidate a switch pays, if to any, and the books after a look ahead.

        Args:
            gains: the seconds of requests that a switch to each of some partitions will save.
            now: when the policy looked ahead, seconds.
        """
        worth = {c: seconds - self.accounts[c].unpaid for c, seconds in gains.items()}
        best = max(worth, key=worth.__getitem__)
        agreed = best if worth[best] > 0.0 else None
        memory = replace(self.memory, looked_at=now, foreseen=tuple(gains.items()), agreed=agreed)
        is_urgent = agreed is not None and len(agreed) >= len(_hindsight_of(self.memory).here)
        is_sure = is_urgent or self.memory.agreed == agreed
        return (agreed if is_sure else None), replace(self, memory=memory)

    def _may_leave_for(self, candidate: Partition) -> bool:
        """Return whether a surge suffices as a reason to look ahead to this one."""
        return candidate in self.surge and self.accounts[candidate].has_room


def _balanced(snapshot: Snapshot, costs: SwitchCosts, memory: Memory) -> _Books:
    """Return what the candidates have saved and must save now."""
    here, lately, usual = snapshot.partition, requests_lately(snapshot), memory.usual_requests
    # Where promises may be broken, what a request costs varies so many times as much.
    stake = 1 + BROKEN if snapshot.targets else 1.0
    savings = _hindsight_of(memory).savings()
    noise = stake * noise_of(usual, lately)
    prices = {c: price_of(noise, costs.loss(c, lately)) for c in savings}
    past = dict(memory.past_regrets)
    regrets = {c: past.get(c, 0.0) + savings.get(c, 0.0) for c in (*savings, here)}
    memory = _with_losers_restarted(memory, savings, prices, regrets)
    surge = _surge_candidates(snapshot, memory, savings, prices)
    # What was lost before a surge says nothing of it.
    savings |= {c: max(0.0, savings[c]) for c in surge}
    excursions = min(memory.excursions.cost(here, regrets[here]), stake * FINE_SECONDS * usual)
    surplus = stake * most_surplus_of(usual, lately)
    accounts = {}
    for candidate, saved in savings.items():
        fine = fine_of(regrets, candidate, stake * lately)
        fine += 0.0 if candidate in surge else excursions
        has_room = costs.has_room(candidate)
        accounts[candidate] = Account(saved, prices[candidate], fine, has_room, surplus)
    return _Books(memory, accounts, regrets, surge)


def _surge_candidates(
    snapshot: Snapshot,
    memory: Memory,
    savings: Mapping[Partition, float],
    prices: Mapping[Partition, float],
) -> Collection[Partition]:
    """Return the narrower candidates for which a surge suffices as a reason to look ahead.

    While few outputs have ended, how long those of the surge will be is a guess. After near silence
    it is most often a clump of requests. In both cases what a switch would bring is not known, and
    a candidate must have saved a part of its price, as without a surge.

    The last two arguments are those of ``_with_losers_restarted``.
    """
    if not memory.surges.lasting(snapshot.now):
        return ()
    has_outputs = len(snapshot.outputs) >= OUTPUTS_KEPT
    is_known = has_outputs and memory.surges.follows_traffic
    narrower = (c for c in savings if len(c) > len(snapshot.partition))
    return {c for c in narrower if is_known or savings[c] >= (1 - MOST_AHEAD) * prices[c]}


def _with_losers_restarted(
    memory: Memory,
    savings: Mapping[Partition, float],
    prices: Mapping[Partition, float],
    regrets: Mapping[Partition, float],
) -> Memory:
    """Return the memory when the accounts begin again that have lost more than their price.

    So the policy notices a change of the load. While prompts wait, the shadow keeps its requests,
    and its account begins again at a loss of the price. Otherwise it begins again from the node.

    Args:
        memory: what the policy remembers.
        savings: what each candidate has saved, in seconds of requests.
        prices: what each must save.
        regrets: by how many seconds of requests the node was slower than each would have been.
    """
    excess = {c: -price - savings[c] for c, price in prices.items() if savings[c] < -price}
    if not excess:
        return memory
    hindsight, past = _hindsight_of(memory), dict(memory.past_regrets)
    if any(queue.waiting for queue in hindsight.current.queues):
        hindsight = hindsight.credited(excess)
        past |= {c: past.get(c, 0.0) - more for c, more in excess.items()}
    else:
        hindsight = hindsight.restarted(excess)
        past |= {c: regrets[c] for c in excess}
    return replace(memory, hindsight=hindsight, past_regrets=tuple(past.items()))


def _look(
    candidates: Iterable[Partition],
    memory: Memory,
    costs: SwitchCosts,
    lasting: Lasting = (),
    sure: Collection[Partition] = (),
) -> dict[Partition, float]:
    """Return the seconds of requests that a switch to each of some candidates will save.

    Those that are ``sure`` have saved all that they must. With targets no look is far. Of the loads
    with targets far looks changed only one, and made it worse (docs/benchmarks/policies.md).
    """
    hindsight, far = _hindsight_of(memory), not costs.snapshot.targets
    foresight = Foresight(hindsight, lasting, costs.empty_caches(), far=far)

    def gain(candidate: Partition) -> float:
        seen = hindsight.age(candidate) if far and candidate in sure else 0.0
        return foresight.gain(candidate, costs.stop_seconds(candidate), seen)

    return {candidate: gain(candidate) for candidate in candidates}


def _hindsight_of(memory: Memory) -> Hindsight:
    """Return the shadows of a memory that has watched the node."""
    assert memory.hindsight is not None
    return memory.hindsight


def _first_partition(snapshot: Snapshot, model: StepPredictor) -> Partition | None:
    """Return the partition with which an idle node begins; None: the present one.

    A node that a crowd has left begins again.
    """
    if snapshot.requests or not snapshot.sp_above:
        return None
    layout = first_layout(snapshot, model)
    target = with_singles(snapshot, units_of(snapshot.engines, layout))
    return target if target != snapshot.partition else None


def _preference(snapshot: Snapshot) -> Preference:
    """Return which units requests prefer: the most urgent class the widest, all others the others.

    With targets, that class has the first one's requests, if there are several; without targets it
    has the urgent requests, while such come.
    """
    bound = None
    if snapshot.targets:
        if len(snapshot.targets) > 1:
            bound = snapshot.targets[0].priority
    elif snapshot.since_urgent <= LINGER_SECONDS:
        bound = NORMAL_PRIORITY - 1

    def prefer(request: PoolRequest) -> int:
        if bound is None:
            return 0
        return -1 if request.priority <= bound else 1

    return prefer


def _usable_lane(snapshot: Snapshot, needed: int) -> Unit | None:
    """Return the group that urgent requests have to themselves, if every request can be held."""
    lane = lane_of(snapshot)
    if lane is None or not any(candidates_of(snapshot, needed, lane)):
        return None
    return lane


def _reason(snapshot: Snapshot, target: Partition, lane: Unit | None) -> SwitchReason:
    """Return why the node changes to a partition, for people."""
    if len({unit.size for unit in target}) > 1 or lane in target:
        return "urgent"
    if snapshot.targets:
        return "slo"
    return "load" if len(target) > len(snapshot.partition) else "quiet"


ADAPTIVE = Policy("adaptive", _plan, decides_layout=True)
"""See the module."""
