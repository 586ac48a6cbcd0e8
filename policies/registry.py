"""Policies by the name that ``--policy`` takes."""

from policies.flying import FLYING
from policies.plan import Policy
from policies.shift import SHIFT
from policies.slo import SLO
from policies.static import MANUAL, STATIC_DP, STATIC_TP

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (MANUAL, STATIC_DP, STATIC_TP, SHIFT, FLYING, SLO)
}


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists those there are."""


def get_policy(name: str) -> Policy:
    """Return a policy.

    Raises:
        UnknownPolicyError: there is none of this name.
    """
    if name not in POLICIES:
        raise UnknownPolicyError(f"no policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
