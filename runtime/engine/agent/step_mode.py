"""Which mode each step of a group takes: the leader's choice, told to the members with the step."""

from typing import Any

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.agent.full_graph_steps import has_full_graph
from shoal.runtime.protocol.messages import Mode


class Shift:
    """Chooses the mode of a unit's steps (Shift Parallelism, Algorithm 3).

    A step of many tokens runs by sequence, because it communicates less so. A step of few tokens
    does not, because every member would read all the weights for a few tokens each.

    Args:
        floor: a step in SP batches more tokens than this: the size of vLLM's largest CUDA graph, 0
            where there are none. None: the unit cannot run SP at all.
        threshold: see ``threshold``.
        full_graph_tokens: the same for full graphs of steps with prompts, which not all steps can
            replay (``full_graph_steps``); 0: there are none.
    """

    def __init__(
        self, floor: int | None, threshold: int | None = None, full_graph_tokens: int = 0
    ) -> None:
        self.full_graph_tokens = full_graph_tokens
        self._floor = floor
        self.threshold = threshold
        """Steps that batch more tokens than this run in SP; None: none does. It may be set at any
        time and counts from the next step on."""

    @property
    def floor(self) -> int | None:
        """Most steps in SP batch more tokens than this; None: there is no SP."""
        return None if self._floor is None else max(self._floor, self.full_graph_tokens)

    def mode(self, num_tokens: int, scheduler_output: Any = None) -> Mode:
        """Return the mode of a step.

        Args:
            num_tokens: tokens that it batches, those of drafts that it checks included.
            scheduler_output: vLLM's, if there is one.
        """
        if self._floor is None or self.threshold is None:
            return Mode.TP
        if num_tokens <= max(self._floor, self.threshold):
            return Mode.TP
        known = scheduler_output is not None
        replays = known and has_full_graph(scheduler_output, self.full_graph_tokens)
        return Mode.TP if replays else Mode.SP


def sp_floor(layout: Layout, max_sp: int, captured: int) -> int | None:
    """Return the floor (see ``Shift``) of the units of a layout. Those with stages run no SP.

    Args:
        layout: the layout.
        max_sp: see ``NodeConfig.max_sp``.
        captured: tokens of the largest captured CUDA graph; 0: there are none.
    """
    return captured if layout.pp == 1 and min(layout.tp, max_sp) > 1 else None
