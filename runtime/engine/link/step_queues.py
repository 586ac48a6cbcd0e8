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
            instruction = self.receive_of(layout, LONGEST_WAIT_SECONDS)
            if instruction is None:
                continue
            self._follow(layout, instruction)
            if not isinstance(instruction, instructions.Attach):
                return layout, instruction

    def receive_own(self, seconds: float) -> instructions.Instruction | None:
        """Wait for the next instruction of the engine's own queue, if that queue is next.

        Returns:
            None: nothing came in so many seconds, or another queue is next.
        """
        if (self._unsampled or self._bound) != DP:
            return None
        instruction = self.receive_of(DP, seconds)
        if instruction is not None:
            self._follow(DP, instruction)
        return None if isinstance(instruction, instructions.Attach) else instruction

    @property
    def awaits_sample(self) -> bool:
        """Whether the latest step waits for ``Sample``."""
        return self._unsampled is not None

    def receive_of(self, layout: Layout, seconds: float) -> instructions.Instruction | None:
        """Wait for the next instruction of one queue, whichever is next; None: nothing came.

        It does not change which queue is next.
        """
        queue = self._queues[layout]
        if not queue.poll(int(seconds * 1000)):
            return None
        instruction: instructions.Instruction = instructions.loads(queue.recv())
        return instruction

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
