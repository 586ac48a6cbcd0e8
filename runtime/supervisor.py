"""The node's main process: starts every other one, watches them, and leaves nothing behind.

A front end or the controller that ends takes the node with it. An engine (its scheduler or its
runner) that ends takes its twin with it, and the node goes on with the engines it has left.
"""

import enum
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zmq

from runtime.config import Addresses, NodeConfig
from runtime.messages import (
    EngineDied,
    GetLayout,
    KillEngines,
    LayoutView,
    Message,
    decode_from_controller,
    encode,
)
from runtime.process import Child, Target, choose_context, named_target, signals_held
from runtime.transport import SUPERVISOR, drain, open_socket

Say = Callable[[str], None]
"""Prints one line for the user."""

_POLL_SECONDS = 0.1
"""How often the controller is asked whether the engines are up, during the start."""
_EXIT_SECONDS = 5.0
"""How long a process may take to end in order."""

_SCHEDULER = "runtime.engine.vllm_backend:run_scheduler"
_RUNNER = "runtime.engine.runner:run_runner"
_FAKE = "runtime.engine.fake:run_fake_engine"
_CONTROLLER = "runtime.controller.process:run_controller"
_SHARED_MEMORY = Path("/dev/shm")


class NodeFailedError(RuntimeError):
    """The node cannot go on; the message is the cause, in one line."""


class StopRequestedError(Exception):
    """A signal asked the node to end."""


class _Stage(enum.Enum):
    """What the supervisor is doing, which decides what the end of a process means."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    ENDING = enum.auto()


def make_runtime_dir() -> Path:
    """Make the node's private directory. Short: a Unix socket's path has at most 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="shoal-"))


class Supervisor:
    """Runs one node from start to end.

    Args:
        config: the node.
        frontends: what each front end runs.
        say: prints a line of the start-up report.
        shutdown_seconds: how long front ends may take to finish their requests.
    """

    def __init__(
        self,
        config: NodeConfig,
        frontends: Sequence[Target],
        say: Say,
        shutdown_seconds: float = 0.0,
    ) -> None:
        self._config = config
        self._frontend_targets = frontends
        self._say = say
        self._shutdown_seconds = shutdown_seconds
        self._stage = _Stage.STARTING
        self._children: list[Child] = []
        self._frontends: list[Child] = []
        self._dead_engines: set[int] = set()
        self._signals = 0
        self._wakeup: socket.socket
        self._control: zmq.Socket[Any] | None = None
        self._layout: LayoutView | None = None

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start the node, serve until a signal or a failure, end it, and return the exit code.

        Args:
            on_ready: called once when the node takes requests.
        """
        with self._signal_handlers():
            try:
                self._start()
                self._wait_until_ready()
                self._stage = _Stage.SERVING
                on_ready()
                while True:
                    self._turn(None)
            except StopRequestedError:
                return 0 if self._end_in_order() else 1
            except NodeFailedError as error:
                self._say(f"shoal: {error}")
                return 1
            finally:
                self._clean_up()

    # --- start ---

    def _start(self) -> None:
        config = self._config
        child = partial(Child, choose_context(), log_format=config.log_format)
        with signals_held():
            for engine in range(config.engines):
                for role, path in _engine_roles(config).items():
                    name = f"engine {engine} {role}".rstrip()
                    target = named_target(path, config, engine)
                    self._children.append(child(name, target, engine))
            self._children.append(child("controller", named_target(_CONTROLLER, config)))
            for index, target in enumerate(self._frontend_targets):
                self._frontends.append(child(f"front end {index}", target))
            self._children += self._frontends
        # Only now: a ZMQ context starts threads, and must not be inherited.
        self._control = open_socket(zmq.Context(), zmq.DEALER, identity=SUPERVISOR.encode())
        self._control.connect(Addresses(config.runtime_dir).control)

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        view = self._ask_layout()
        self._say(f"  controller up after {time.monotonic() - started:.1f} s")
        reported: set[int] = set()
        while True:
            self._report_engines(view, reported, started)
            if view.ready:
                break
            self._turn(_POLL_SECONDS)
            view = self._ask_layout()
        while not all(child.is_ready for child in self._frontends):
            self._turn(None)
        self._say(f"  front end up after {time.monotonic() - started:.1f} s")

    def _ask_layout(self) -> LayoutView:
        self._layout = None
        self._send(GetLayout(call=0))
        while (view := self._answer()) is None:
            self._turn(None)
        return view

    def _answer(self) -> LayoutView | None:
        return self._layout

    def _report_engines(self, view: LayoutView, reported: set[int], started: float) -> None:
        for engine in view.engines:
            if engine.startup_seconds and engine.engine not in reported:
                reported.add(engine.engine)
                phases = ", ".join(f"{k} {v:.1f} s" for k, v in engine.startup_seconds.items())
                after = time.monotonic() - started
                self._say(f"  engine {engine.engine} up after {after:.1f} s ({phases})")

    # --- watch ---

    def _turn(self, timeout: float | None) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and deal with it."""
        if self._signals:
            raise StopRequestedError
        assert self._control is not None
        # A ZMQ file descriptor tells of changes only: what is there already is read first.
        if not self._read_control():
            reports = [child.reports for child in self._children if not child.is_ready]
            wait(
                [
                    *(child.sentinel for child in self._children),
                    *reports,
                    self._control.fileno(),
                    self._wakeup,
                ],
                timeout,
            )
            self._read_control()
        for child in list(self._children):
            child.read_report()
            if not child.is_alive:
                self._children.remove(child)
                self._ended(child)
        if self._signals:
            raise StopRequestedError

    def _read_control(self) -> bool:
        assert self._control is not None
        messages = [decode_from_controller(frames[0]) for frames in drain(self._control)]
        for message in messages:
            if isinstance(message, LayoutView):
                self._layout = message
            elif isinstance(message, KillEngines):
                for engine in message.engines:
                    self._lose_engine(engine, message.reason)
        return bool(messages)

    def _ended(self, child: Child) -> None:
        cause = f"{child.name}: {child.cause}"
        if child.engine is None or self._stage is _Stage.STARTING:
            raise NodeFailedError(cause)
        self._lose_engine(child.engine, cause)

    def _lose_engine(self, engine: int, reason: str) -> None:
        if engine in self._dead_engines:
            return
        if self._stage is _Stage.STARTING:
            raise NodeFailedError(f"engine {engine}: {reason}")
        self._dead_engines.add(engine)
        for twin in self._children:
            if twin.engine == engine:
                twin.kill()
        if len(self._dead_engines) == self._config.engines:
            raise NodeFailedError(f"no engine is left: {reason}")
        self._say(f"shoal: engine {engine} is lost, serving goes on: {reason}")
        self._send(EngineDied(engine, reason))

    def _send(self, message: Message) -> None:
        assert self._control is not None
        self._control.send(encode(message))

    # --- end ---

    def _end_in_order(self) -> bool:
        """End the front ends, then the engines, then the controller; return whether all did.

        A second signal, or a process that does not end, leaves the rest to ``_clean_up``.
        """
        self._stage = _Stage.ENDING
        asked = self._signals
        rest = [child for child in self._children if child not in self._frontends]
        engines = [child for child in rest if child.engine is not None]
        controller = [child for child in rest if child.engine is None]
        for children, seconds in (
            (self._frontends, self._shutdown_seconds + _EXIT_SECONDS),
            (engines, _EXIT_SECONDS),
            (controller, _EXIT_SECONDS),
        ):
            for child in children:
                child.terminate()
            deadline = time.monotonic() + seconds
            while alive := [child for child in children if child.is_alive]:
                left = deadline - time.monotonic()
                if self._signals > asked:
                    return False
                if left <= 0:
                    late = ", ".join(child.name for child in alive)
                    self._say(f"shoal: killed what did not end within {seconds:g} s: {late}")
                    return False
                wait([*(child.sentinel for child in alive), self._wakeup], left)
                self._empty_wakeup()
        return True

    def _clean_up(self) -> None:
        """Kill what still runs, and remove the runtime directory and shared memory."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join()
        if self._control is not None:
            self._control.context.destroy(linger=0)
        runtime_dir = Path(self._config.runtime_dir)
        # Segments that a killed runner could not unlink; they carry the directory's name.
        for segment in _SHARED_MEMORY.glob(f"*{runtime_dir.name}*"):
            segment.unlink(missing_ok=True)
        shutil.rmtree(runtime_dir, ignore_errors=True)

    # --- signals ---

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        self._wakeup, write_end = socket.socketpair()
        self._wakeup.setblocking(False)
        write_end.setblocking(False)
        before = {n: signal.signal(n, self._count) for n in (signal.SIGINT, signal.SIGTERM)}
        previous_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wakeup.close()
            write_end.close()

    def _count(self, number: int, frame: object) -> None:
        del number, frame
        self._signals += 1

    def _empty_wakeup(self) -> None:
        try:
            self._wakeup.recv(64)
        except BlockingIOError:
            return


def _engine_roles(config: NodeConfig) -> Mapping[str, str]:
    """Return the processes of one engine: their role for the user, and what they run."""
    if config.fake is not None:
        return {"": _FAKE}
    return {"scheduler": _SCHEDULER, "runner": _RUNNER}
