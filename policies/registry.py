"""All policies, by the names that ``--policy`` accepts."""

from shoal.policies.adaptive import ADAPTIVE
from shoal.policies.batch_policy import BATCH
from shoal.policies.flying import FLYING
from shoal.policies.forecast import uniform
from shoal.policies.share_level import with_share_level
from shoal.policies.shift import SHIFT
from shoal.policies.static import MANUAL, STATIC_DP, STATIC_TP
from shoal.policies.values.plan import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        with_share_level(ADAPTIVE, uniform),
        with_share_level(FLYING, uniform),
        with_share_level(SHIFT),
        with_share_level(STATIC_DP),
        with_share_level(STATIC_TP),
        BATCH,
        MANUAL,
    )
}
"""The built-in policies, and those of others that ``installed_policies`` has added."""

REFERENCES: dict[str, str] = {}
"""Names of the policies that were added as ``module:NAME``."""


class PolicyError(ValueError):
    """There is no such policy, or none that can be used; the message is one line."""


class UnknownPolicyError(PolicyError):
    """No policy has this name; the message lists the existing ones."""


def get_policy(name: str) -> Policy:
    """Return the policy of this name, or of this reference if it was added by that.

    Raises:
        UnknownPolicyError: no policy has this name.
    """
    known = POLICIES.get(REFERENCES.get(name, name))
    if known is None:
        raise UnknownPolicyError(f"no policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return known
