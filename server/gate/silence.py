"""When the controller does not answer, requests that need it are refused; others go on.

Outputs come from the engines directly, so streams go on while the controller hangs. Requests that
wait for the controller's note are ended here as the controller would end them: with a note, and
with a finish reason. If the controller ever goes on, it finds a message about them.
"""

from collections.abc import Callable, Sequence

from shoal.runtime.node.heartbeat import HeartbeatMonitor
from shoal.runtime.protocol.messages import UNAVAILABLE_RETRY_SECONDS, Ended, Outcome
from shoal.server.gate.placement import Placements
from shoal.server.gate.pool_door import PoolDoor


class Silence:
    """Watches the controller for a front end, and acts while the controller hangs.

    Args:
        monitor: knows whether the controller hangs.
        timeout: the seconds after which the controller counts as hanging; None: no limit.
        door: refuses new requests meanwhile.
        placements: know which requests wait for a note of the controller.
        ended: is given the notes in place of the controller's.
        end: ends requests with an error, for vLLM and for the controller.
    """

    def __init__(
        self,
        monitor: HeartbeatMonitor,
        timeout: float | None,
        door: PoolDoor,
        placements: Placements,
        *,
        ended: Callable[[Ended], None],
        end: Callable[[Sequence[str]], None],
    ) -> None:
        self._monitor = monitor
        self._reason = f"the controller has not answered for {timeout:g} s" if timeout else ""
        self._door = door
        self._placements = placements
        self._ended = ended
        self._end = end

    def look(self) -> None:
        """Check the controller. Call it several times within ``timeout``."""
        self._monitor.look()
        if self._monitor.is_silent:
            self._door.unavailable = self._reason
            self._end_awaiting()
        else:
            self._door.unavailable = None

    def _end_awaiting(self) -> None:
        awaiting = self._placements.awaiting()
        for request_id in awaiting:
            retry_after = UNAVAILABLE_RETRY_SECONDS
            note = Ended(request_id, Outcome.UNAVAILABLE, 503, self._reason, retry_after)
            self._ended(note)
        if awaiting:
            self._end(awaiting)
