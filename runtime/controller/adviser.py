"""How the controller asks the policy, which is code of others and may fail."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.policies.registry import get_policy
from shoal.policies.values.plan import Plan, PlanError, Policy, Verdict, check_plan
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.clock import Clock
from shoal.runtime.controller.books.statistics import Statistics
from shoal.runtime.controller.studies import Studies

log = logging.getLogger("shoal.controller")


class Adviser:
    """Asks the current policy.

    Attributes:
        policy: the policy.
        verdicts: what it thought of other layouts when it last judged them.

    Args:
        policy: name of the first policy.
        statistics: counts decisions.
        clock: monotonic seconds.
        studies: does what plans ask for beside the controller's work.
        followers: called with the policy, now and after every change.

    Raises:
        UnknownPolicyError: no policy has this name.
    """

    def __init__(
        self,
        policy: str,
        statistics: Statistics,
        clock: Clock,
        studies: Studies,
        followers: Sequence[Callable[[Policy], None]],
    ) -> None:
        self._statistics = statistics
        self._clock = clock
        self._studies = studies
        self._followers = followers
        self.policy: Policy
        self._take(policy)

    @property
    def is_studying(self) -> bool:
        """Whether work of the policy goes on beside the controller's, or has findings for it."""
        return self._studies.is_running

    def change(self, policy: str) -> None:
        """Ask another policy from now on.

        Raises:
            UnknownPolicyError: no policy has this name.
        """
        self._take(policy)
        log.info("the policy is now %s", self.policy.name)

    def _take(self, policy: str) -> None:
        self.policy = get_policy(policy)
        self._memory: object = None
        self._studies.forget()
        self.verdicts: tuple[Verdict, ...] = ()
        for follow in self._followers:
            follow(self.policy)

    def ask(self, snapshot: Snapshot) -> Plan:
        """Return the policy's plan, or a plan that changes nothing if the policy's is unusable."""
        began = self._clock()
        try:
            seen = self._with_own(snapshot)
            plan = self.policy.plan(seen)
            check_plan(plan, seen)
        except PlanError as error:
            log.error("policy %s: invalid plan: %s", self.policy.name, error)
        except Exception:
            # The node goes on without the plan.
            log.exception("policy %s failed", self.policy.name)
        else:
            self._memory = plan.memory
            self.verdicts = plan.verdicts or self.verdicts
            if plan.study is not None:
                self._studies.begin(plan.study)
            return plan
        finally:
            self._statistics.decisions.observe(self._clock() - began)
        self._statistics.policy_errors.add()
        return Plan()

    def _with_own(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with what is the policy's own."""
        can_study, findings = self._studies.can_study, self._studies.findings()
        return replace(snapshot, memory=self._memory, can_study=can_study, findings=findings)
