"""Requests that leave their unit, to be computed again elsewhere from the tokens they have."""

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport


class Moving:
    """Takes requests out of cores; a core pauses for that until its steps in flight are collected.

    Args:
        backend: the engine.
        transport: the way to the controller.
    """

    def __init__(self, backend: EngineBackend, transport: AgentTransport) -> None:
        self._backend = backend
        self._transport = transport
        self._leaving: dict[Unit, list[str]] = {}

    def begin(self, message: m.MoveOut) -> None:
        """Have requests leave as soon as they can."""
        self._leaving.setdefault(message.unit, []).extend(message.request_ids)

    def holds(self, core: Core) -> bool:
        """Return whether a core pauses because requests are about to leave it."""
        return core.unit in self._leaving

    def take_out(self) -> bool:
        """Take requests out whose core has no step in flight; return whether a core goes on."""
        ready = [unit for unit in self._leaving if not self._backend.cores[unit].in_flight]
        for unit in ready:
            tokens = self._backend.cores[unit].withdraw(self._leaving.pop(unit))
            self._transport.to_controller(m.Moved(self._backend.engine, tokens))
        return bool(ready)
