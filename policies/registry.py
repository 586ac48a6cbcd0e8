"""Policies by the name that ``--policy`` takes."""

from policies.plan import Policy
from policies.static import MANUAL, STATIC_DP, STATIC_TP

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (MANUAL, STATIC_DP, STATIC_TP)}


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
