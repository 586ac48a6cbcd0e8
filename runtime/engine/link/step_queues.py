"""What a runner does next: its own steps, its group's, or both in turn.

Between binds a runner reads its own queue; in a group it reads the group's. If the two interleave,
each member decides by itself in which order it takes their steps. Collectives still match, because
only the group's steps have any, and every member takes these in the same order.
"""

from collections.abc import Mapping
from typing import Any

import zmq

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.link import instructions
from shoal.runtime.protocol.transport import LONGEST_WAIT_SECONDS


class Turns:
    """Whose step comes next on a member that interleaves: its group's, or one of its own.

    One own step may come after every ``ratio`` steps of the group; while only one side has steps,
    that side has every turn. All members count the same steps of the group, so their own steps run
    side by side, and the group waits for the longest of these instead of for one after the other.

    Args:
        ratio: steps of the group for each of the member's own.
    """

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._steps = 0
        self._own_due = False
        self.group_works = False
        """Whether the group is sure to send another step, or word that it has none."""

    def group_step(self) -> None:
        """Count a step of the group."""
        self._steps += 1
        self._own_due = self._steps % self._ratio == 0
        self.group_works = True

    def group_rests(self) -> None:
        """Take the group's word that it has no step for now."""
        self.group_works = False

    def own_step(self) -> None:
        """Count a step of the member's own."""
        self._own_due = False

    @property
    def own_due(self) -> bool:
        """Whether the member's own step goes first if there is one."""
        return self._own_due

    @property
    def own_allowed(self) -> bool:
        """Whether the member's own step need not wait for one of the group's."""
        return self._own_due or not self.group_works


class StepQueues:
    """The queues of a runner, read in the order in which it has to do what they say.

    Args:
        queues: a PULL socket for each layout; DP's is the engine's own.
        ratio: see ``Turns``.
    """

    def __init__(self, queues: "Mapping[Layout, zmq.Socket[bytes]]", ratio: int) -> None:
        self._queues = dict(queues)
        self._ratio = ratio
        self._bound = DP
        self._turns: Turns | None = None
        self._unsampled: Layout | None = None
        """The layout whose step waits for ``Sample``: nothing comes in between."""

    def read(self, layout: Layout) -> None:
        """Read only the queue of this layout, until ``Detach``: for the start of its core."""
        self._bound = layout

    def replace(self, layout: Layout, queue: "zmq.Socket[bytes]") -> None:
        """Read this queue for a layout from now on; what its former one holds is dropped."""
        former = self._queues.get(layout)
        if former is not None:
            former.close(linger=0)
        self._queues[layout] = queue

    def receive(self) -> tuple[Layout, instructions.Instruction]:
        """Wait for the next instruction; return the layout that it is for, and itself."""
        while True:
            layout = self._next()
            instruction: instructions.Instruction = instructions.loads(self._queues[layout].recv())
            self._follow(layout, instruction)
            if not isinstance(instruction, instructions.OrderOfQueues):
                return layout, instruction

    def _next(self) -> Layout:
        turns = self._turns
        if self._unsampled is not None:
            return self._wait(self._unsampled)
        if turns is None or not turns.own_allowed:
            return self._wait(self._bound)
        return self._wait(DP, self._bound) if turns.own_due else self._wait(self._bound, DP)

    def _wait(self, *layouts: Layout) -> Layout:
        """Wait for one of these queues; return the first that has something."""
        poller = zmq.Poller()
        for layout in layouts:
            poller.register(self._queues[layout], zmq.POLLIN)
        ready: dict[Any, int] = {}
        while not ready:
            ready = dict(poller.poll(int(LONGEST_WAIT_SECONDS * 1000)))
        return next(layout for layout in layouts if self._queues[layout] in ready)

    def _follow(self, layout: Layout, instruction: instructions.Instruction) -> None:
        turns = self._turns
        match instruction:
            case instructions.Step(sample=sample):
                self._unsampled = None if sample else layout
                if turns is not None:
                    turns.own_step() if layout == DP else turns.group_step()
            case instructions.Sample():
                self._unsampled = None
            case instructions.Rest() if turns is not None:
                turns.group_rests()
            case instructions.Attach(bound, _, interleaves):
                self._bound = bound
                self._turns = Turns(self._ratio) if interleaves else None
            case instructions.AwaitDetach():
                self._turns = None
            case instructions.Detach():
                self._bound, self._turns = DP, None
