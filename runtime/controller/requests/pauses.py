"""Requests that a switch has paused, and whose unit does not come back: none waits for ever.

A paused request resumes with its KV in place when its unit is back. Until then no engine computes
it, and the operator or policy that could bring the unit back may never do so. So after a while the
request is carried to a unit that is there. If none can take it, it waits in the pool for one.
"""

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import PAUSE
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.protocol import messages as m

PAUSE_SECONDS = 5.0
"""How long a request waits for its unit, under a policy that decides the layout."""
MANUAL_PAUSE_SECONDS = 30.0
"""The same wait where an operator decides the layout, who needs longer to bring a unit back."""


class Pauses:
    """Lets long-paused requests go on elsewhere.

    Args:
        env: the transport to engines, and the time.
        books: units and their requests.
        carries: lets requests go on in other units.
    """

    def __init__(self, env: Environment, books: Books, carries: Carries) -> None:
        self._transport = env.transport
        self._clock = env.clock
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._carries = carries
        self._since: dict[Unit, float] = {}
        """When each core was paused, or when its requests were last sent on their way."""
        self._limit = MANUAL_PAUSE_SECONDS
        self._looked_at = env.clock()

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes."""
        times = (since + self._limit_of(unit) for unit, since in self._since.items())
        return min((at for at in times if at > self._looked_at), default=None)

    def end_long_ones(self, *, manual: bool, parks: bool, may_begin: bool) -> None:
        """Let go on elsewhere what has been paused for too long, so that no policy has to.

        Args:
            manual: whether an operator decides the layout, and not the policy.
            parks: whether the policy decides about what is in tiers. It cannot move anything while
                an engine is drained.
            may_begin: whether no operation is running; a switch may bring units back.
        """
        now = self._looked_at = self._clock()
        self._limit = MANUAL_PAUSE_SECONDS if manual else PAUSE_SECONDS
        long: list[CoreBook] = []
        for core in self._requests.cores.values():
            is_left = core.unit.tier and parks and not self._engines.drained
            if not core.requests or core.unit in self._units.partition or is_left:
                self._since.pop(core.unit, None)
                continue
            since = self._since.setdefault(core.unit, now)
            serves = self._engines.serves(alone(core.unit.leader))
            if may_begin and serves and since + self._limit_of(core.unit) <= now:
                self._since[core.unit] = now
                long.append(core)
        if long:
            self._go_on(long)

    def _limit_of(self, unit: Unit) -> float:
        """Return how long requests of a unit wait: nobody brings a tier back."""
        return PAUSE_SECONDS if unit.tier else self._limit

    def _go_on(self, cores: list[CoreBook]) -> None:
        left = {r.id for r in self._carries.begin(cores, self._units.partition, PAUSE)}
        for core in cores:
            moved = [request_id for request_id in core.requests if request_id in left]
            if moved:
                self._transport.to_engine(core.unit.leader, m.MoveOut(core.unit, moved))
