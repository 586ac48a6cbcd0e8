"""An engine's part in forming a group anew, after a death has broken its communicators.

The controller asks every member twice: to make its part of the group's layout (``FormGroup``), and
when all have, to start the group's core on it (``StartGroup``). Both take seconds, in which the
engine's loop goes on; its own steps queue up behind what its runner does meanwhile.
"""

from concurrent.futures import Future
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import EngineBackend
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

POLL_SECONDS = 0.02
"""How often to look whether it is done: not all of it ends with a message."""


class Task(msgspec.Struct):
    """What the runner is at."""

    epoch: int
    unit: Unit
    forms: bool
    """Whether it makes its part: then the result is why it could not."""
    future: "Future[Any]"


class Forming:
    """Takes the controller's wishes for groups, one at a time, and answers ``Formed``.

    Args:
        backend: the engine.
        transport: the way to the controller.
    """

    def __init__(self, backend: EngineBackend, transport: AgentTransport) -> None:
        self._backend = backend
        self._transport = transport
        self._task: Task | None = None

    @property
    def busy(self) -> bool:
        """Whether the engine's runner is at it."""
        return self._task is not None

    def take(self, message: m.FormGroup | m.StartGroup, *, alone: bool) -> None:
        """Begin what the controller wants.

        Args:
            message: that.
            alone: whether the engine is in no bind: else its runner may be in a group's steps.
        """
        if not alone or self.busy:
            self._answer(message.epoch, f"engine {self._backend.engine} is not free")
            return
        match message:
            case m.FormGroup(epoch, unit, generation):
                self._task = Task(epoch, unit, True, self._backend.form(unit, generation))
            case m.StartGroup(epoch, unit):
                self._task = Task(epoch, unit, False, self._backend.start(unit))

    def tend(self) -> Unit | None:
        """Answer if it is done; return the group then."""
        task = self._task
        if task is None or not task.future.done():
            return None
        self._task = None
        error: object = task.future.exception()
        if error is None and task.forms:
            error = task.future.result()
        self._answer(task.epoch, str(error or "").split("\n")[0])
        return task.unit

    def _answer(self, epoch: int, error: str) -> None:
        self._transport.to_controller(m.Formed(epoch, self._backend.engine, error))
