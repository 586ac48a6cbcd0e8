"""Which mode each step of a group takes: the leader's choice, told to the members with the step."""

from shoal.policies.values.layouts import Layout
from shoal.runtime.protocol.messages import Mode


class Shift:
    """Chooses the mode of a unit's steps (Shift Parallelism, Algorithm 3).

    A step of many tokens runs by sequence, because it communicates less so. A step of few tokens
    does not, because every member would read all the weights for a few tokens each.

    Args:
        floor: a step in SP batches more tokens than this: the size of the largest captured CUDA
            graph, 0 where there are none. None: the unit cannot run SP at all.
        threshold: see ``threshold``.
    """

    def __init__(self, floor: int | None, threshold: int | None = None) -> None:
        self.floor = floor
        self.threshold = threshold
        """Steps that batch more tokens than this run in SP; None: none does. It may be set at any
        time and counts from the next step on."""

    def mode(self, num_tokens: int) -> Mode:
        """Return the mode of a step that batches ``num_tokens`` tokens."""
        if self.floor is None or self.threshold is None:
            return Mode.TP
        return Mode.SP if num_tokens > max(self.floor, self.threshold) else Mode.TP


def sp_floor(layout: Layout, max_sp: int, captured: int) -> int | None:
    """Return the floor (see ``Shift``) of the units of a layout. Those with stages run no SP.

    Args:
        layout: the layout.
        max_sp: see ``NodeConfig.max_sp``.
        captured: tokens of the largest captured CUDA graph; 0: there are none.
    """
    return captured if layout.pp == 1 and min(layout.tp, max_sp) > 1 else None
