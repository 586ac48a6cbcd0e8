"""Processes of a node that serve no request themselves: the node goes on when one of them dies."""

import math
from collections.abc import Callable, Mapping, Sequence

from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.node.child_process import Child, Target
from shoal.runtime.node.restarts import Restarts

BACKOFF_SECONDS = 1.0
"""Pause before a helper is started again; each further pause is twice as long."""

Start = Callable[[str, Target], Child]
"""Starts a child by its name."""


class Helpers:
    """The helpers of a node. Each is started again when it has died, as often as it dies.

    Args:
        targets: what each of them runs, by name.
        clock: monotonic seconds.
    """

    def __init__(self, targets: Mapping[str, Target], clock: Clock = monotonic) -> None:
        self._targets = list(targets.items())
        self._clock = clock
        self._restarts = Restarts(limit=1 << 62, backoff_seconds=BACKOFF_SECONDS)
        self._children: dict[int, Child] = {}

    @property
    def children(self) -> Sequence[Child]:
        """The helpers that run."""
        return list(self._children.values())

    def start(self, start: Start) -> None:
        """Start all of them."""
        for number, (name, target) in enumerate(self._targets):
            self._children[number] = start(name, target)

    def ended(self, child: Child) -> float | None:
        """Take note that a child has ended.

        Returns:
            After how many seconds it is started again; None: it is no helper.
        """
        for number, helper in self._children.items():
            if helper is child:
                del self._children[number]
                restart = self._restarts.plan(number, self._clock())
                return math.inf if restart is None else restart.at - self._clock()
        return None

    def restart(self, start: Start) -> list[Child]:
        """Start those whose time has come, and return them."""
        due = self._restarts.due(self._clock())
        for restart in due:
            self._restarts.begun(restart)
            self._children[restart.engine] = start(*self._targets[restart.engine])
        return [self._children[restart.engine] for restart in due]
