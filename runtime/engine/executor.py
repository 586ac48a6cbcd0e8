"""vLLM's ``Executor`` for a unit whose runners are other processes, reached over queues."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import zmq
from vllm.v1.executor.abstract import Executor

from policies.partition import Group
from runtime.config import Addresses
from runtime.engine import steps
from runtime.engine.interface import RunnerDied


class UnitChannel:
    """A unit's queues to its members' runners, and the answers that are due.

    Args:
        group: the unit's engines.
        sockets: one PUSH per member, in order.
    """

    def __init__(self, group: Group, sockets: "list[zmq.Socket[bytes]]") -> None:
        self.group = group
        self._sockets = sockets
        self._next_seq = 0
        self._due: dict[int, tuple[Future[Any], int, list[Any]]] = {}

    def send(self, instruction: steps.Instruction) -> None:
        """Queue an instruction for every member; serialised once."""
        data = steps.dumps(instruction)
        for socket in self._sockets:
            socket.send(data)

    def expect(self, answers: int) -> tuple[int, "Future[Any]"]:
        """Return a sequence number and the future of its ``answers`` answers.

        One answer resolves to its value, several to a list in member order.
        """
        seq = self._next_seq
        self._next_seq += 1
        future: Future[Any] = Future()
        self._due[seq] = (future, answers, [])
        return seq, future

    def resolve(self, result: steps.Result) -> None:
        """Take one member's answer."""
        future, answers, received = self._due[result.seq]
        received.append(result)
        if len(received) < answers:
            return
        del self._due[result.seq]
        received.sort(key=lambda answer: answer.engine)
        values = [answer.value for answer in received]
        future.set_result(values[0] if answers == 1 else values)


class Inbox:
    """The answers of every runner that works for one engine's cores."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self._channels: dict[Group, UnitChannel] = {}

    def add(self, channel: UnitChannel) -> None:
        """Deliver answers for this channel's group to it."""
        self._channels[channel.group] = channel

    def drain(self) -> None:
        """Deliver everything that has arrived.

        Raises:
            RunnerDied: a runner reported that it cannot go on.
        """
        while self.socket.poll(0):
            self._deliver(steps.loads(self.socket.recv()))

    def wait(self, future: "Future[Any]", timeout_seconds: float) -> Any:
        """Deliver answers until ``future`` is done and return its result.

        Raises:
            RunnerDied: a runner reported that it cannot go on.
            TimeoutError: nothing arrived for ``timeout_seconds``.
        """
        while not future.done():
            if not self.socket.poll(int(timeout_seconds * 1000)):
                raise TimeoutError(f"no answer from a runner for {timeout_seconds:.0f} s")
            self._deliver(steps.loads(self.socket.recv()))
        return future.result()

    def _deliver(self, message: steps.Result | steps.Failure) -> None:
        if isinstance(message, steps.Failure):
            raise RunnerDied(f"runner of engine {message.engine}: {message.error}")
        self._channels[message.group].resolve(message)


CALL_TIMEOUT_SECONDS = 1800.0
"""Longest start-up call of a worker (compiling and capturing a large model)."""


class UnitExecutor(Executor):  # type: ignore[misc]
    """Carries vLLM's start-up calls and Shoal's steps to the runners.

    ``connect`` must run before an ``EngineCore`` is made with this class: vLLM creates its executor
    from a configuration alone.
    """

    channels: ClassVar[deque[tuple[UnitChannel, Inbox]]] = deque()
    """What the next executors of this process connect to, in order."""

    @classmethod
    def connect(cls, channel: UnitChannel, inbox: Inbox) -> None:
        """Give the next executor its channel."""
        cls.channels.append((channel, inbox))

    def _init_executor(self) -> None:
        self.channel, self._inbox = self.channels.popleft()

    def collective_rpc(  # type: ignore[no-untyped-def]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        **_: Any,
    ):
        """Run a worker method on every member and return their results in order.

        Only while the members' runners are attached to the unit: at start-up.
        """
        if non_block or not isinstance(method, str):
            raise NotImplementedError("a unit runs named worker methods, and waits for them")
        members = len(self.channel.group)
        seq, future = self.channel.expect(answers=members)
        self.channel.send(steps.Call(seq, method, args, kwargs or {}))
        values = self._inbox.wait(future, timeout or CALL_TIMEOUT_SECONDS)
        return [values] if members == 1 else values

    def run_step(
        self, scheduler_output: Any, grammar_output: Any, *, sample: bool
    ) -> "tuple[int, Future[Any]]":
        """Queue one step; the future yields vLLM's ``ModelRunnerOutput``."""
        seq, future = self.channel.expect(answers=1)
        self.channel.send(steps.Step(seq, scheduler_output, grammar_output, sample))
        return seq, future

    def sample_step(self, seq: int, grammar_output: Any) -> None:
        """Finish a step queued with ``sample=False``."""
        self.channel.send(steps.Sample(seq, grammar_output))

    def check_health(self) -> None:
        """The inbox raises when a runner has failed."""
        self._inbox.drain()

    def shutdown(self) -> None:
        """Nothing to end here: the supervisor owns the runners."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps are queued, so the next can be scheduled while one runs."""
        return True


def channel_sockets(
    context: zmq.Context[Any], addresses: Addresses, group: Group
) -> "list[zmq.Socket[bytes]]":
    """Return a PUSH per member of ``group`` to the queue its runner reads for that group."""
    return [push_socket(context, addresses.queue(group, engine)) for engine in group]


def push_socket(context: zmq.Context[Any], address: str) -> "zmq.Socket[bytes]":
    """Return a PUSH socket without a send limit, connected to ``address``."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket
