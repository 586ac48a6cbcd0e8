"""Two engines per request while few are here."""

from shoal.policies.static import dispatch_least_loaded, with_singles
from shoal.policies.values.layouts import Layout
from shoal.policies.values.partition import singles, units_of
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import Snapshot


def _plan(snapshot: Snapshot, /) -> Plan:
    dispatches = dispatch_least_loaded(snapshot)
    if snapshot.switching or snapshot.since_switch < 5.0:
        return Plan(dispatches)
    pairs = units_of(snapshot.engines, Layout(tp=min(2, snapshot.max_group)))
    if max(snapshot.requests, snapshot.smoothed_requests) < 2 * snapshot.engines:
        target = with_singles(snapshot, pairs)
    elif snapshot.requests > 4 * snapshot.engines:
        target = singles(snapshot.engines)
    else:
        return Plan(dispatches)
    if target == snapshot.partition:
        return Plan(dispatches)
    return Plan(dispatches, target, "soft")


PAIRS = Policy("pairs", _plan, decides_layout=True, interface=1)
