"""An engine's part in forming a group anew, after a death has broken its communicators.

The controller asks every member first to make its part of the group's layout (``FormGroup``). When
all have done so, it asks them to start the group's core (``StartGroup``). Both take seconds. The
engine's loop goes on meanwhile, but its own steps queue up behind what its runner does.
"""

from concurrent.futures import Future
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import EngineBackend
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

POLL_SECONDS = 0.02
"""Time between two looks whether a task is done: not every task ends with a message."""


class Task(msgspec.Struct):
    """What the engine's runner does for a group."""

    epoch: int
    unit: Unit
    forms: bool
    """Whether the runner makes its part of the group; its result is then why it could not."""
    future: "Future[Any]"


class Forming:
    """Does what the controller asks for groups, one task at a time, and answers ``Formed``.

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
        """Whether the engine's runner works on a task."""
        return self._task is not None

    def take(self, message: m.FormGroup | m.StartGroup, *, alone: bool) -> None:
        """Begin what the controller wants.

        Args:
            message: what the controller wants.
            alone: whether the engine is in no bind; if it is in one, its runner may be in a
                group's steps.
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
        """Answer if the task is done, and return its group; return None otherwise."""
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
