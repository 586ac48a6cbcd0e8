"""A controller that does not answer: what needs it is refused, what runs without it goes on.

Outputs come from the engines directly, so streams go on while the controller hangs. What has come
and what waits for the controller's word is ended here, as the controller would end it: with a note,
and with a finish reason. The controller finds that among its messages if it ever goes on.
"""

from collections.abc import Callable, Sequence

from shoal.runtime.node.heartbeat import HeartbeatMonitor
from shoal.runtime.protocol.messages import UNAVAILABLE_RETRY_SECONDS, Ended, Outcome
from shoal.server.gate.placement import Placements
from shoal.server.gate.pool_door import PoolDoor


class Silence:
    """A front end's side of a controller that hangs.

    Args:
        monitor: knows whether it does.
        timeout: the limit of that, seconds; None: there is none.
        door: refuses what comes meanwhile.
        placements: know which requests wait for the controller's word.
        ended: hears of requests in the controller's stead.
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
        """Look after the controller; to be called several times within the limit."""
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
