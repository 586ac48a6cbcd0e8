"""Copies an engine's KV into memory of the host, for engines that cannot read it themselves.

It does so in threads of its own, whatever the runner is doing, and after no work of its device: the
requests' unit computes nothing that could change the blocks (``carry.md``), and a step may be in a
collective with the very member that waits for the KV.
"""

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.kv_memory import HostMemory, Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.portions import Copier
from shoal.runtime.engine.kv.staging_memory import Pins, Region, open_region
from shoal.runtime.engine.kv.staging_plan import Ask, gathered

log = logging.getLogger("shoal.engine")

BACKLOG = 64
"""Readers that may connect at once; each has two connections to each engine."""


def address_of(directory: Path, engine: int) -> str:
    """Return where an engine copies KV for others."""
    return str(directory / f"staging-{engine}")


class StagingServer:
    """Does what readers ask for: for each connection one ``Ask`` after another.

    A reader first sends its ``Offer``, and hears why the region cannot be used, or "". Then each
    ``Ask`` is answered, once the KV is in the slot, with why it is not, or "".

    Args:
        address: where to listen.
        groups: the pages of each KV group.
        own: the engine's own buffer.
        copier: copies on its device.
        memory: maps readers' regions.
        pins: lets the device reach them.
    """

    def __init__(
        self,
        address: str,
        groups: Sequence[KvPages],
        own: Mapped,
        copier: Copier,
        memory: HostMemory,
        pins: Pins,
    ) -> None:
        self._groups, self._own, self._copier = groups, own, copier
        self._memory, self._pins = memory, pins
        Path(address).unlink(missing_ok=True)  # an earlier incarnation's
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(BACKLOG)
        threading.Thread(target=self._accept, name="staging", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                log.error("no more engines can have KV through the host: %s", error)
                return
            connection: Connection[str, Any] = Connection(accepted.detach())
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: "Connection[str, Any]") -> None:
        """Serve one reader until it closes the connection, or ends."""
        self._pins.enter()
        with connection, suppress(EOFError, OSError):  # when the reader is gone
            try:
                region = open_region(self._memory, connection.recv(), self._pins)
            except NotSharedError as error:
                connection.send(str(error))
                return
            try:
                connection.send("")
                while True:
                    ask = connection.recv()
                    connection.send(self._copied(region, ask))
            finally:
                region.close()

    def _copied(self, region: Region, ask: Ask) -> str:
        slot = region.slots[ask.slot]
        portion = gathered(ask, self._groups[ask.group], self._own, slot.memory)
        try:
            self._copier.at_once()([portion], slot.table)()
        except Exception as error:  # noqa: BLE001 - the reader's requests begin again
            log.error("no KV could be copied for another engine: %s", error)
            return str(error).partition("\n")[0] or type(error).__name__
        return ""
