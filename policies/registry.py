"""All policies, by the names that ``--policy`` accepts."""

from shoal.policies.adaptive import ADAPTIVE
from shoal.policies.flying import FLYING
from shoal.policies.shift import SHIFT
from shoal.policies.static import MANUAL, STATIC_DP, STATIC_TP
from shoal.policies.values.plan import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (ADAPTIVE, FLYING, SHIFT, STATIC_DP, STATIC_TP, MANUAL)
}


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists the existing ones."""


def get_policy(name: str) -> Policy:
    """Return the policy of this name.

    Raises:
        UnknownPolicyError: no policy has this name.
    """
    if name not in POLICIES:
        raise UnknownPolicyError(f"no policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
