"""An engine's part in pre-copies: whole blocks of requests are read while their unit computes them.

A source pins blocks, a destination reserves some, and every unit that has members of the
destination lets these read. No step waits for any of this.
"""

from collections.abc import Iterator

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.copies_ahead import Prefixes
from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.engine.agent.sliced_work import SlicedWork
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

PINNED_AT_ONCE = 8
"""Requests that have ended, of which the core looks up at once what is cached."""


class CopyingAhead:
    """Answers the messages of pre-copies.

    Args:
        backend: the engine.
        transport: the way to the controller.
        work: does what takes long.
    """

    def __init__(self, backend: EngineBackend, transport: AgentTransport, work: SlicedWork) -> None:
        self._backend = backend
        self._transport = transport
        self._work = work
        self._reading: list[tuple[Unit, int, Core]] = []
        """The cores whose members read, with their unit and the carry, once for each message."""
        self._reserved: dict[int, dict[str, int]] = {}
        """Up to which token the requests of each carry are copied, until ``Settle``."""
        self._copied: dict[int, dict[str, int]] = {}
        """The same afterwards, until the requests come."""

    def take(self, message: m.Pin | m.Reserve | m.CopyAhead | m.Settle | m.Unpin) -> None:
        """Do what the controller says."""
        match message:
            case m.Pin():
                self._work.start(message.carry, self._pin(message))
            case m.Reserve():
                self._work.add(message.carry, self._reserve(message))
            case m.CopyAhead():
                self._read(message)
            case m.Settle():
                # After ``Reserve``, of which some may be left to do.
                self._work.add(message.carry, self._settle(message))
            case m.Unpin():
                # After ``Pin``, of which some may be left to do.
                self._work.start(message.carry, self._unpin(message))

    # --- as the source ---

    def _pin(self, message: m.Pin) -> Iterator[None]:
        """Hold what requests have filled, and what is cached of those that have ended; answer."""
        core, names = self._backend.cores[message.unit], list(message.prefixes)
        requests = core.pin(message.carry, message.request_ids)
        for first in range(0, len(names), PINNED_AT_ONCE):
            yield
            some = {n: message.prefixes[n] for n in names[first : first + PINNED_AT_ONCE]}
            requests += core.pin(message.carry, [], Prefixes(some, message.room))
        self._transport.to_controller(
            m.Pinned(message.carry, self._backend.engine, message.unit, requests)
        )

    def _unpin(self, message: m.Unpin) -> Iterator[None]:
        """Hold it no longer."""
        # A group that is formed anew has no core.
        while (core := self._backend.cores.get(message.unit)) and not core.unpin(message.carry):
            yield

    # --- as the destination ---

    def _reserve(self, message: m.Reserve) -> Iterator[None]:
        """Take blocks, first for the longest request; answer."""
        core, taken = self._backend.cores[message.unit], list[m.AheadRequest]()
        for request in sorted(message.requests, key=lambda r: -r.computed):
            taken += core.reserve(message.carry, message.source, [request])
            yield
        self._reserved[message.carry] = {each.request_id: each.end for each in taken}
        self._transport.to_controller(
            m.Reserved(message.carry, self._backend.engine, message.unit, taken)
        )
        # Other carries that have come by now reserve first what is to be copied ahead for them.
        self._work.add(message.carry, self._promise(core, message))

    def _promise(self, core: Core, message: m.Reserve) -> Iterator[None]:
        """Give requests the blocks that they need when they come, while the first are read into."""
        for request in (each for each in message.requests if not each.is_prefix):
            core.promise(message.carry, request.request_id)
            yield

    def _settle(self, message: m.Settle) -> Iterator[None]:
        """Let the blocks be used, or freed."""
        reserved = self._reserved.pop(message.carry, {})
        if message.copied:
            self._copied[message.carry] = reserved
        copied = message.copied
        while (core := self._backend.cores.get(message.unit)) is not None:
            if core.settle(message.carry, copied=copied):
                break
            yield

    def arrive(self, carry: int) -> dict[str, int]:
        """Return up to which token requests, which arrive now, are copied already."""
        return self._copied.pop(carry, {})

    # --- as a unit with members of the destination ---

    def _read(self, message: m.CopyAhead) -> None:
        """Let members read, and answer when they have."""
        core = self._backend.cores[message.unit]
        core.copy_ahead(message.carry, message.source, message.destination, message.requests)
        self._reading.append((message.unit, message.carry, core))

    def tend(self) -> None:
        """Answer for the copies that have ended."""
        for unit, core in {unit: core for unit, _, core in self._reading}.items():
            if self._backend.cores.get(unit) is not core:  # the group is formed anew
                self._reading = [each for each in self._reading if each[2] is not core]
                continue
            for carry, copied in core.copied_ahead():
                self._reading.remove((unit, carry, core))
                self._transport.to_controller(
                    m.CopiedAhead(
                        carry,
                        self._backend.engine,
                        unit,
                        copied.bytes,
                        copied.problem,
                        copied.host_bytes,
                    )
                )
