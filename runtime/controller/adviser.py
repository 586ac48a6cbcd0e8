"""The policy, as the controller asks it: code of others, whose advice may be none."""

import logging
from collections.abc import Callable, Sequence

from shoal.policies.registry import get_policy
from shoal.policies.values.plan import Plan, PlanError, Policy, check_plan
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.clock import Clock
from shoal.runtime.controller.books.statistics import Statistics

log = logging.getLogger("shoal.controller")


class Adviser:
    """Asks the policy that there is now.

    Args:
        policy: name of the first one.
        statistics: counts decisions.
        clock: monotonic seconds.
        followers: are told of the policy, now and whenever there is another.

    Raises:
        UnknownPolicyError: there is no such policy.
    """

    def __init__(
        self,
        policy: str,
        statistics: Statistics,
        clock: Clock,
        followers: Sequence[Callable[[Policy], None]],
    ) -> None:
        self._statistics = statistics
        self._clock = clock
        self._followers = followers
        self.policy: Policy
        self._take(policy)

    def change(self, policy: str) -> None:
        """Ask another policy from now on.

        Raises:
            UnknownPolicyError: there is no such policy.
        """
        self._take(policy)
        log.info("the policy is now %s", self.policy.name)

    def _take(self, policy: str) -> None:
        self.policy = get_policy(policy)
        for follow in self._followers:
            follow(self.policy)

    def ask(self, snapshot: Snapshot) -> Plan:
        """Return the policy's plan, or the one that keeps everything if it has none to go by."""
        began = self._clock()
        try:
            plan = self.policy.plan(snapshot)
            check_plan(plan, snapshot)
        except PlanError as error:
            log.error("policy %s: invalid plan: %s", self.policy.name, error)
        except Exception:
            # The node goes on without it.
            log.exception("policy %s failed", self.policy.name)
        else:
            return plan
        finally:
            self._statistics.decisions.observe(self._clock() - began)
        self._statistics.policy_errors.add()
        return Plan()
