"""The benefit of the doubt for layouts that the node has not had for a while.

Only a layout that the node has is measured. What was learned of another one may be wrong, because
its few steps had to wait for something, or because the node is another one by now. Then its steps
would seem slow for ever, and the node would never have it again. So the longer a node has not had a
layout, the more its corrections are taken to be those of the present layout, if that makes it
faster. If this is wrong, the node tries the layout, measures it, and goes back. That costs more
where there are many requests, so it takes longer there. And it takes longer after each attempt that
was in vain.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.policies.terms import Terms
from shoal.policies.values.layouts import Layout
from shoal.policies.values.pace import Pace

REQUEST_SECONDS = 5.0
"""Time constant of the doubt, for each request on the node."""
LEAST_SECONDS = 15.0
"""It is at least so long."""
BACK_SECONDS = 15.0
"""A switch that is taken back within this time was in vain."""
VAIN = 2.0
"""By what the time constant is multiplied then."""
MOST_VAIN = 32.0
"""By what it is multiplied at most."""
VAIN_SECONDS = 300.0
"""Time constant with which this is forgotten."""
SHORT_STEP, STEP_WITH_PROMPTS = 1, 512
"""Tokens of the steps that say which of two corrections is the faster one."""


@dataclass(frozen=True, slots=True)
class Chances:
    """When the node last had each layout, and how patient it is."""

    had: tuple[tuple[Layout, float], ...] = ()
    """When each layout was last there, or first known, seconds."""
    patience: float = 1.0
    """Factor of the time constant."""

    def at(self, now: float, here: Iterable[Layout], every: Iterable[Layout]) -> "Chances":
        """Return them as they are now.

        Args:
            now: seconds.
            here: the layouts that the node has.
            every: those that it may have.
        """
        before, present = dict(self.had), set(here)
        since = {one: now if one in present else before.get(one, now) for one in every}
        passed = now - max(before.values(), default=now)
        patience = 1 + (self.patience - 1) * math.exp(-max(0.0, passed) / VAIN_SECONDS)
        return Chances(tuple(since.items()), patience)

    def after_switch(self, since_last: float, *, back: bool) -> "Chances":
        """Return them after a switch.

        Args:
            since_last: seconds since the switch before it.
            back: whether this switch goes the other way.
        """
        if not back or since_last > BACK_SECONDS:
            return self
        return replace(self, patience=min(MOST_VAIN, VAIN * self.patience))

    def terms(
        self, terms: Mapping[Layout, Terms], here: Layout, now: float, requests: float
    ) -> dict[Layout, Terms]:
        """Return what units can do, with the benefit of the doubt.

        Args:
            terms: the same as far as it was measured.
            here: a layout that the node has.
            now: seconds.
            requests: as many as are on the node.
        """
        last = dict(self.had)
        constant = self.patience * max(LEAST_SECONDS, REQUEST_SECONDS * requests)
        known, found = terms[here], {}
        for layout, one in terms.items():
            doubt = 1 - math.exp(-max(0.0, now - last.get(layout, now)) / constant)
            found[layout] = one._replace(
                decode=_hopeful(one.decode, known.decode, doubt, SHORT_STEP, SHORT_STEP),
                tp=_hopeful(one.tp, known.tp, doubt, STEP_WITH_PROMPTS, 0),
                sp=_hopeful(one.sp, known.sp, doubt, STEP_WITH_PROMPTS, 0),
            )
        return found


def _hopeful(pace: Pace, known: Pace, doubt: float, tokens: int, decodes: int) -> Pace:
    """Return a pace with a part of another one's correction, if it is the faster one then."""
    if not doubt:
        return pace
    slope = pace.slope + doubt * (known.slope - pace.slope)
    offset = pace.offset + doubt * (known.offset - pace.offset)
    hopeful = replace(pace, slope=slope, offset=offset)
    work = tokens, 0, 0, decodes
    return hopeful if hopeful.step(*work) < pace.step(*work) else pace
