"""A level of memory: what engines have of the weights that they share, and what is left for KV."""

from collections.abc import Iterable
from typing import NamedTuple

from shoal.policies.values.layouts import Layout


class Level(NamedTuple):
    """How many engines share weights, and what each has whole beside its part of them.

    A node that was started with ``--share-weights s`` has these levels: ``Level(s)`` is that of the
    start, ``Level(1)`` has whole weights, and with ``Level(s, p)`` each engine also has the layers
    whole that it computes in the pipeline of ``p`` stages of one engine each (``--max-pp``).
    """

    share: int
    """Engines that share weights; 1: each has all weights whole."""
    stages: int = 1
    """Stages of the pipeline of whose layers each engine has those of its own stage whole; 1: an
    engine has no layers whole that it shares."""

    @property
    def name(self) -> str:
        """For people: ``1``, ``2``, ``2 with whole stages of pp2``."""
        return str(self.share) + (f" with whole stages of pp{self.stages}" * (self.stages > 1))

    def whole_share(self, layout: Layout) -> float:
        """Return the share of a layout's layers that no member reads from others.

        In the pipeline of whose stages engines have the layers whole these are all layers, and in
        DP a part of so many. Members of other groups have other layers whole each. In every layer
        of TP, and in at least one stage of another pipeline, there may be a member that has none
        of them. So these groups count as if there were no whole layers.
        """
        if self.share == 1:
            return 1.0
        if self.stages == 1 or layout.tp > 1:
            return 0.0
        if layout.pp == self.stages:
            return 1.0
        return 1 / self.stages if layout.pp == 1 else 0.0


WHOLE = Level(1)
"""Each engine has whole weights."""


def levels_of(share: int, layouts: Iterable[Layout]) -> list[Level]:
    """Return the levels that a node may have, whole weights first.

    Args:
        share: how many engines share weights at the start.
        layouts: those that the node forms.
    """
    if share == 1:
        return [WHOLE]
    stages = [layout.pp for layout in layouts if layout.tp == 1 < layout.pp]
    return [WHOLE, Level(share), *(Level(share, pp) for pp in stages)]


def slowest(levels: Iterable[Level]) -> Level:
    """Return the level at which engines alone read most from others; there is one at least."""
    return max(levels, key=lambda level: (level.share, level.stages == 1, level.stages))
