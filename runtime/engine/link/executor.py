"""vLLM's ``Executor`` for a unit whose runners are other processes, reached over queues."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, TypeVar

import zmq
from vllm.v1.executor.abstract import Executor

from shoal.policies.values.layouts import Unit
from shoal.runtime.config import Addresses
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.link import instructions
from shoal.runtime.protocol.messages import Mode

T = TypeVar("T")


class UnitChannel:
    """A unit's queues to its members' runners, and the answers that are due.

    Args:
        unit: the unit.
        sockets: one PUSH per member, in order.
    """

    def __init__(self, unit: Unit, sockets: "list[zmq.Socket[bytes]]") -> None:
        self.unit = unit
        self._sockets = sockets
        self._next_seq = 0
        self._due: dict[int, tuple[Future[Any], int, list[Any]]] = {}

    def send(self, instruction: instructions.Instruction) -> None:
        """Queue an instruction for every member; serialised once."""
        data = instructions.dumps(instruction)
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

    def resolve(self, result: instructions.Result) -> None:
        """Take one member's answer; it is dropped if another member has failed before."""
        future, answers, received = self._due[result.seq]
        received.append(result)
        if len(received) < answers:
            return
        del self._due[result.seq]
        if future.done():
            return
        received.sort(key=lambda answer: answer.engine)
        values = [answer.value for answer in received]
        future.set_result(values[0] if answers == 1 else values)

    def close(self) -> None:
        """Close the queues; what is still in them is lost."""
        for socket in self._sockets:
            socket.close(linger=0)

    def fail(self, error: Exception) -> None:
        """Resolve every answer that is due with this error. Other members may still answer."""
        for future, _, _ in list(self._due.values()):
            if not future.done():
                future.set_exception(error)


def copied_by_all(request_ids: Sequence[str], future: "Future[Any]") -> Copied:
    """Return what all members together answered to a ``Carry`` or ``CopyAhead``.

    Args:
        request_ids: the requests whose KV they were to read.
        future: has ended.

    Raises:
        RunnerDied: a member cannot answer.
    """
    answer = future.result()
    members: list[instructions.Copied] = answer if isinstance(answer, list) else [answer]
    return Copied(
        list(request_ids),
        sum(member.bytes for member in members),
        max(member.seconds for member in members),
        next((member.problem for member in members if member.problem), ""),
        sum(member.host_bytes for member in members),
    )


class Answers(Protocol):
    """Where an executor waits for answers."""

    def wait(self, future: "Future[Any]", timeout_seconds: float) -> Any:
        """Return the result of ``future`` once it is there.

        Raises:
            RunnerDied: a runner that owes the answer cannot go on.
            TimeoutError: nothing came for ``timeout_seconds``.
        """

    def drain(self) -> None:
        """Take in what has arrived."""


class Inbox:
    """The answers of every runner that works for one engine's cores.

    Args:
        context: ZMQ context of the process.
        address: where runners send the answers.
        engine: the engine whose cores wait for them.
    """

    def __init__(self, context: zmq.Context[Any], address: str, engine: int) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self._engine = engine
        self._channels: dict[str, UnitChannel] = {}
        """Channels by layout name: an engine belongs to one unit of each layout."""

    def add(self, channel: UnitChannel) -> None:
        """Deliver answers for this channel's unit to it."""
        self._channels[channel.unit.name] = channel

    def drop(self, unit: Unit) -> None:
        """Close the channel of a unit, if there is one."""
        channel = self._channels.pop(unit.name, None)
        if channel is not None:
            channel.close()

    def drain(self) -> None:
        """Deliver everything that has arrived.

        Raises:
            RunnerDied: this engine's own runner reported that it cannot go on.
        """
        while self.socket.poll(0):
            self._deliver(instructions.loads(self.socket.recv()))

    def wait(self, future: "Future[Any]", timeout_seconds: float) -> Any:
        """Deliver answers until ``future`` is done and return its result.

        Raises:
            RunnerDied: a runner reported that it cannot go on.
            TimeoutError: nothing arrived for ``timeout_seconds``.
        """
        while not future.done():
            if not self.socket.poll(int(timeout_seconds * 1000)):
                raise TimeoutError(f"no answer from a runner for {timeout_seconds:.0f} s")
            self._deliver(instructions.loads(self.socket.recv()))
        return future.result()

    def _deliver(self, message: instructions.Result | instructions.Failure) -> None:
        if isinstance(message, instructions.Result):
            # A unit that is being formed anew has no channel.
            if message.layout in self._channels:
                self._channels[message.layout].resolve(message)
            return
        error = RunnerDied(f"runner of engine {message.engine}: {message.error}")
        if message.engine == self._engine:
            raise error
        # If another engine's runner fails, its answers fail: this engine may work alone.
        for channel in self._channels.values():
            if message.engine in channel.unit.engines:
                channel.fail(error)


class Elsewhere:
    """Lets a thread wait for answers that the thread of the ``Inbox`` delivers."""

    def wait(self, future: "Future[Any]", timeout_seconds: float) -> Any:
        """See ``Answers.wait``."""
        return future.result(timeout_seconds)

    def drain(self) -> None:
        """See ``Answers.drain``: done by the other thread."""


def in_thread(function: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - the future carries it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


CALL_TIMEOUT_SECONDS = 1800.0
"""Longest start-up call of a worker (compiling and capturing a large model)."""


class UnitExecutor(Executor):  # type: ignore[misc]
    """Carries vLLM's start-up calls and Shoal's steps to the runners.

    ``connect`` must run before an ``EngineCore`` is made with this class: vLLM creates its executor
    from a configuration alone.
    """

    supports_pp: ClassVar[bool] = True
    """vLLM asks: steps reach all stages through the members' queues."""
    channels: ClassVar[deque[tuple[UnitChannel, Answers]]] = deque()
    """What the next executors of this process connect to, in order."""

    @classmethod
    def connect(cls, channel: UnitChannel, answers: Answers) -> None:
        """Give the next executor its channel."""
        cls.channels.append((channel, answers))

    def _init_executor(self) -> None:
        self.channel, self._answers = self.channels.popleft()

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
        members = len(self.channel.unit.engines)
        seq, future = self.channel.expect(answers=members)
        self.channel.send(instructions.Call(seq, method, args, kwargs or {}))
        values = self._answers.wait(future, timeout or CALL_TIMEOUT_SECONDS)
        return [values] if members == 1 else values

    def run_step(
        self,
        scheduler_output: Any,
        grammar_output: Any,
        *,
        sample: bool,
        mode: Mode,
        begun: instructions.Begun,
    ) -> "tuple[int, Future[Any]]":
        """Queue one step; the future yields vLLM's ``ModelRunnerOutput``."""
        seq, future = self.channel.expect(answers=1)
        step = instructions.Step(seq, scheduler_output, grammar_output, sample, mode, begun)
        self.channel.send(step)
        return seq, future

    def sample_step(self, seq: int, grammar_output: Any) -> None:
        """Finish a step queued with ``sample=False``."""
        self.channel.send(instructions.Sample(seq, grammar_output))

    def check_health(self) -> None:
        """The inbox raises when a runner has failed."""
        self._answers.drain()

    def shutdown(self) -> None:
        """Nothing to end here: the supervisor owns the runners."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps are queued, so the next can be scheduled while one runs."""
        return True


def channel_sockets(
    context: zmq.Context[Any], addresses: Addresses, unit: Unit, generation: int = 0
) -> "list[zmq.Socket[bytes]]":
    """Return a PUSH per member of a unit to the queue that its runner reads for the unit."""
    queues = [addresses.queue(unit, engine, generation) for engine in unit.engines]
    return [push_socket(context, queue) for queue in queues]


def push_socket(context: zmq.Context[Any], address: str) -> "zmq.Socket[bytes]":
    """Return a PUSH socket without a send limit, connected to ``address``."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket
