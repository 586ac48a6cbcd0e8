"""The front ends' side of the control channel: it sends calls and receives answers and notes."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq.asyncio

from shoal.policies.shift import ShiftThreshold
from shoal.runtime.config import Addresses
from shoal.runtime.protocol.messages import (
    AuditDone,
    AuditNode,
    CallFailed,
    CarriedOn,
    ChangeMemory,
    CountRefused,
    DrainEngines,
    Ended,
    GetLayout,
    GetMetrics,
    GoesOn,
    Interrupted,
    KillEngines,
    LayoutView,
    MemoryChanged,
    Message,
    NodeMetrics,
    Note,
    Outcome,
    Placed,
    PoolLimits,
    Received,
    SetLayout,
    SetPolicy,
    SetShiftThreshold,
    Stopped,
    SwitchDone,
    Switching,
    Treatment,
    decode_from_controller,
    encode,
)
from shoal.runtime.protocol.messages.views import MemoryView, SwitchView
from shoal.runtime.protocol.transport import front_identity

ANSWER_SECONDS = 5.0
"""How long the controller may take to answer a call that waits for no other process."""

MEMORY_SECONDS = 900.0
"""How long a change of memory may take: engines copy weights, and one stage waits for another."""

Answer = LayoutView | NodeMetrics | SwitchDone | MemoryChanged | AuditDone
A = TypeVar("A", LayoutView, NodeMetrics, SwitchDone, MemoryChanged, AuditDone)


class CallError(Exception):
    """The controller refused a call, failed at it, or did not answer.

    Attributes:
        status: the HTTP status for this failure.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ControlClient:
    """Calls to the controller, from one asyncio event loop. An asynchronous context manager.

    Args:
        addresses: the node's endpoints.
        index: this front end's number.
        on_note: called for every note of the controller, in order.
    """

    def __init__(self, addresses: Addresses, index: int, on_note: Callable[[Note], None]) -> None:
        self._address = addresses.control
        self._identity = front_identity(index).encode()
        self._on_note = on_note
        self._calls = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._reports: set[asyncio.Future[Any]] = set()
        """Reports that are being sent. asyncio itself keeps no reference to them."""
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket
        self._reader: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        # The queue has no limit, because a controller that hangs must not block senders.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(self._address)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail_pending("the front end is shutting down")
        if self._context is not None:
            self._context.destroy(linger=0)

    async def get_layout(self, timeout: float = ANSWER_SECONDS, *, named: int = 0) -> LayoutView:
        """Return the node's layout as it is now.

        Args:
            timeout: how long the controller may take, in seconds.
            named: the most requests of each unit that its view names.

        Raises:
            CallError: there was no answer within ``timeout`` seconds.
        """
        return await self._call(LayoutView, lambda call: GetLayout(call, named), timeout)

    async def get_metrics(self) -> NodeMetrics:
        """Return the controller's metrics.

        Raises:
            CallError: there was no answer.
        """
        return await self._call(NodeMetrics, lambda call: GetMetrics(call))

    async def set_layout(
        self,
        units: Sequence[Sequence[int]],
        treatment: Treatment,
        timeout: float,
        wait: float | None = None,
        layouts: Sequence[str] = (),
    ) -> SwitchView:
        """Switch to a partition, and return the finished switch.

        Args:
            units: the engines of every unit.
            treatment: what happens to the requests that run on the engines concerned.
            timeout: seconds after which the controller gives up.
            wait: seconds after which the switch stops waiting for requests; None: it never stops.
            layouts: see ``messages.SetLayout``.

        Raises:
            CallError: the partition is not valid, or the switch failed.
        """
        wanted = [list(unit) for unit in units]
        done = await self._call(
            SwitchDone,
            lambda call: SetLayout(call, wanted, treatment, timeout, wait, list(layouts)),
            timeout + ANSWER_SECONDS,
        )
        return done.switch

    async def drain(self, engines: Sequence[int], *, drained: bool) -> LayoutView:
        """Take engines out or let them serve again, and return the node's layout after that.

        The engines that are taken out may still have requests then.

        Args:
            engines: the engines concerned.
            drained: whether they are taken out.

        Raises:
            CallError: there is no such engine, no other engine would be left, or there was no
                answer.
        """
        wanted = list(engines)
        return await self._call(LayoutView, lambda call: DrainEngines(call, wanted, drained))

    async def set_policy(self, policy: str) -> LayoutView:
        """Change the policy, and return the node's layout after that.

        Raises:
            CallError: no policy has this name, or there was no answer.
        """
        return await self._call(LayoutView, lambda call: SetPolicy(call, policy))

    async def set_shift(self, threshold: ShiftThreshold) -> LayoutView:
        """Change the threshold for SP, and return the node's layout after that.

        Raises:
            CallError: the node has no SP or cannot use this threshold, or there was no answer.
        """
        return await self._call(LayoutView, lambda call: SetShiftThreshold(call, threshold))

    async def change_memory(self, share_weights: int, stages: int = 1) -> MemoryView:
        """Change the level of memory (``policies.values.level``); return the finished change.

        Raises:
            CallError: the node cannot have this level, or the change failed.
        """
        done = await self._call(
            MemoryChanged,
            lambda call: ChangeMemory(call, share_weights, stages, MEMORY_SECONDS),
            MEMORY_SECONDS,
        )
        return done.change

    async def audit(self) -> list[str]:
        """Return every broken invariant of the controller's and the engines' books.

        Raises:
            CallError: an engine or the controller did not answer.
        """
        done = await self._call(AuditDone, lambda call: AuditNode(call), 2 * ANSWER_SECONDS)
        return done.problems

    async def count_refused(self, outcome: Outcome) -> None:
        """Tell the controller about a request that this front end refused; it does not answer."""
        await self._socket.send(encode(CountRefused(outcome)))

    async def stop_requests(self, request_ids: Sequence[str]) -> None:
        """Tell the controller which requests a stop string has ended; it does not answer."""
        await self._socket.send(encode(Stopped(list(request_ids))))

    def report(self, message: Received | GoesOn | Stopped) -> None:
        """Tell the controller what became of requests; it does not answer."""
        self._reports.add(report := asyncio.ensure_future(self._socket.send(encode(message))))
        report.add_done_callback(self._reports.discard)

    async def _call(
        self, kind: type[A], request: Callable[[int], Message], timeout: float = ANSWER_SECONDS
    ) -> A:
        if self._reader.done():
            raise CallError(503, "the link to the controller is broken")
        call = next(self._calls)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[call] = future
        try:
            await self._socket.send(encode(request(call)))
            async with asyncio.timeout(timeout):
                answer = await future
        except TimeoutError:
            message = f"the controller did not answer within {timeout:g} seconds"
            raise CallError(504, message) from None
        finally:
            del self._pending[call]
        if not isinstance(answer, kind):
            raise CallError(500, f"the controller answered with {type(answer).__name__}")
        return answer

    async def _read(self) -> None:
        try:
            while True:
                self._take(decode_from_controller(await self._socket.recv()))
        finally:
            self._fail_pending("the link to the controller is broken")

    def _take(self, message: Any) -> None:
        match message:
            case Placed() | Ended() | Interrupted() | PoolLimits() | Switching():
                self._on_note(message)
            case CarriedOn(request_ids, unit):
                for request_id in request_ids:
                    self._on_note(Placed(request_id, unit))
            case KillEngines():
                raise TypeError("KillEngines is for the supervisor")
            case CallFailed(call=call, status=status, error=error):
                self._settle(call, CallError(status, error))
            case (
                LayoutView(call=call)
                | NodeMetrics(call=call)
                | SwitchDone(call=call)
                | MemoryChanged(call=call)
                | AuditDone(call=call)
            ):
                self._settle(call, message)

    def _settle(self, call: int, result: Answer | CallError) -> None:
        future = self._pending.get(call)
        if future is None or future.done():
            return  # its caller gave up
        if isinstance(result, CallError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _fail_pending(self, reason: str) -> None:
        for call in list(self._pending):
            self._settle(call, CallError(503, reason))
