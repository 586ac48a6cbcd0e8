"""Requests that leave an engine's cores for other units, with their KV: a carry's source.

A core exports requests at a safe point without steps in flight, and holds their blocks until it is
told to drop or to keep them.
"""

from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport


class Departures:
    """Takes requests out of cores.

    Args:
        backend: the engine.
        transport: the way to the controller.
    """

    def __init__(self, backend: EngineBackend, transport: AgentTransport) -> None:
        self._backend = backend
        self._transport = transport
        self._exports: list[m.Export] = []

    @property
    def is_under_way(self) -> bool:
        """Whether requests are about to leave."""
        return bool(self._exports)

    def holds(self, core: Core) -> bool:
        """Return whether a core pauses because requests are about to leave it."""
        return any(export.unit == core.unit for export in self._exports)

    def take(self, message: m.Export | m.Drop | m.Keep) -> None:
        """Do what the controller says."""
        match message:
            case m.Export():
                self._export(message)
            case m.Drop(unit, request_ids):
                # Another unit has them, or nobody wants them.
                self._backend.cores[unit].abort(request_ids)
            case m.Keep():
                self._keep(message)

    def _export(self, message: m.Export) -> None:
        """Export requests at ``take_out``; say by now what they will be after their last steps."""
        self._exports.append(message)
        core = self._backend.cores[message.unit]
        # Who has no output now may have one after the steps in flight, and leaves then.
        told = not _rests(core) and not message.only_decoding
        announced = core.announce(message.request_ids) if told else []
        if announced:
            self._transport.to_controller(
                m.Leaving(message.carry, self._backend.engine, message.unit, announced)
            )

    def take_out(self) -> bool:
        """Export what can be exported now; return whether a core goes on."""
        ready = [export for export in self._exports if _rests(self._backend.cores[export.unit])]
        for export in ready:
            self._exports.remove(export)
            core = self._backend.cores[export.unit]
            requests = core.export(export.request_ids)
            if export.only_decoding:
                core.keep([each.request_id for each in requests if not each.tokens])
                requests = [each for each in requests if each.tokens]
            self._transport.to_controller(
                m.Exported(export.carry, self._backend.engine, export.unit, requests)
            )
        return bool(ready)

    def _keep(self, message: m.Keep) -> None:
        """Go on with requests that were to leave."""
        kept = set(message.request_ids)
        for export in self._exports:
            if export.unit == message.unit:
                export.request_ids[:] = [id_ for id_ in export.request_ids if id_ not in kept]
        self._backend.cores[message.unit].keep(message.request_ids)


def _rests(core: Core) -> bool:
    """Return whether nothing is about to write to a core's blocks."""
    return not core.in_flight and not core.copies
