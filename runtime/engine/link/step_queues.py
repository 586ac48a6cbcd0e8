"""What a runner does next: between binds what its own queue says, in a group what the group's says.

A queue is left only between two steps: a step that was sent without its sampling has its ``Sample``
still in the queue, behind the instruction that leaves the queue.
"""

from collections.abc import Mapping

import zmq

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.link import instructions
from shoal.runtime.protocol.transport import LONGEST_WAIT_SECONDS


class StepQueues:
    """The queues of a runner, read in the order in which it has to do what they say.

    Args:
        queues: a PULL socket for each layout; DP's is the engine's own.
    """

    def __init__(self, queues: "Mapping[Layout, zmq.Socket[bytes]]") -> None:
        self._queues = dict(queues)
        self._bound = DP
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
            layout = self._unsampled or self._bound
            queue = self._queues[layout]
            while not queue.poll(int(LONGEST_WAIT_SECONDS * 1000)):
                pass
            instruction: instructions.Instruction = instructions.loads(queue.recv())
            self._follow(layout, instruction)
            if not isinstance(instruction, instructions.Attach):
                return layout, instruction

    def _follow(self, layout: Layout, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.Step(sample=sample):
                self._unsampled = None if sample else layout
            case instructions.Sample():
                self._unsampled = None
            case instructions.Attach(bound):
                self._bound = bound
            case instructions.Detach():
                self._bound = DP
