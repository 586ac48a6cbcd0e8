"""What a runner does next: between binds what its own queue says, in a group what the group's says.

A queue is left only between two steps: a step that was sent without its sampling has its ``Sample``
still in the queue, behind the instruction that leaves the queue.

While there is nothing to do, instructions of the other queues are read. Those that prepare a coming
group for its requests (``PREPARING``) are followed at once, because they take milliseconds, for
which requests would stand still after the bind. The others wait until their queue is next.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import zmq

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.link import instructions
from shoal.runtime.protocol.transport import LONGEST_WAIT_SECONDS

PREPARING = instructions.Introduce | instructions.Extend | instructions.Seat | instructions.Foresee
"""What touches neither the device nor anything that another layout's steps use."""


class StepQueues:
    """The queues of a runner, read in the order in which it has to do what they say.

    Args:
        queues: a PULL socket for each layout; DP's is the engine's own.
        prepare: follows an instruction that prepares a layout whose queue is not next.
    """

    def __init__(
        self,
        queues: "Mapping[Layout, zmq.Socket[bytes]]",
        prepare: Callable[[Layout, PREPARING], None],
    ) -> None:
        self._queues = dict(queues)
        self._prepare = prepare
        self._poller = zmq.Poller()
        for queue in self._queues.values():
            self._poller.register(queue, zmq.POLLIN)
        self._read: defaultdict[Layout, deque[instructions.Instruction]] = defaultdict(deque)
        """Instructions that were read before their queue was next."""
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
            self._poller.unregister(former)
            former.close(linger=0)
        self._read.pop(layout, None)
        self._queues[layout] = queue
        self._poller.register(queue, zmq.POLLIN)

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
        if self._read[layout]:
            return self._read[layout].popleft()
        return self._load(layout) if self._comes(layout, seconds) else None

    def _comes(self, layout: Layout, seconds: float) -> bool:
        """Return whether an instruction comes to a queue.

        Others are read meanwhile, and after each of them so many seconds begin anew.
        """
        queue = self._queues[layout]
        while not queue.poll(0):
            ready = dict(self._poller.poll(int(seconds * 1000)))
            if not ready:
                return False
            if queue in ready:
                break
            for other in [each for each, socket in self._queues.items() if socket in ready]:
                self._look_ahead(other)
        return True

    def _look_ahead(self, layout: Layout) -> None:
        """Read an instruction before its queue is next, and follow it if nothing is before it."""
        instruction = self._load(layout)
        if isinstance(instruction, PREPARING) and not self._read[layout]:
            self._prepare(layout, instruction)
        else:
            self._read[layout].append(instruction)

    def _load(self, layout: Layout) -> instructions.Instruction:
        instruction: instructions.Instruction = instructions.loads(self._queues[layout].recv())
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
