"""The node's main process: it starts all others, watches them, and leaves nothing behind.

If a front end or the controller ends, or the controller hangs, the node ends. If an engine's
scheduler or runner ends, its other process is killed. The node goes on with the remaining engines,
and the dead engine is restarted a few times (``restarts.py``). A helper is always restarted.
"""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zmq

from shoal.runtime.clock import Clock, process_seconds
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.node.child_process import (
    Child,
    Target,
    choose_context,
    end_helper,
    named_target,
    signals_held,
)
from shoal.runtime.node.end_signals import EndSignals
from shoal.runtime.node.heartbeat import HeartbeatMonitor, heartbeat_path
from shoal.runtime.node.helpers import Helpers
from shoal.runtime.node.restarts import Restart, Restarts
from shoal.runtime.node.runtime_dir import remove_runtime_dir
from shoal.runtime.protocol.messages import (
    DeathCause,
    EndNode,
    EngineDied,
    EngineStarting,
    GetLayout,
    KillEngines,
    LayoutView,
    Message,
    decode_from_controller,
    encode,
)
from shoal.runtime.protocol.messages.views import EngineView
from shoal.runtime.protocol.transport import SUPERVISOR, drain, open_socket

Say = Callable[[str], None]
"""Prints one line for the user."""

_POLL_SECONDS = 0.1
"""How often the supervisor asks the controller during the start whether the engines are up."""
_LOOK_SECONDS = 0.5
"""Time between looks at the processes. An engine is given up if a process of it is stopped at two
looks in a row."""
_MOST_TIMEOUTS = 3.0
"""The node ends when the controller has been silent for so many times its time-out. Until then the
controller may come back."""
_EXIT_SECONDS = 5.0
"""How long a process may take to end in an orderly way."""
_HURRY_SECONDS = 3.0
"""How long front ends may take to tell their clients that the node ends at once."""

_GIB = 1 << 30

_SCHEDULER = "shoal.runtime.engine.scheduler.vllm_backend:run_scheduler"
_RUNNER = "shoal.runtime.engine.runner.runner:run_runner"
_RECORDING_RUNNER = "shoal.runtime.engine.runner.recorder:run_recording_runner"
_FAKE = "shoal.runtime.engine.fake.fake_backend:run_fake_engine"
_CONTROLLER = "shoal.runtime.controller.main:run_controller"


class NodeFailedError(RuntimeError):
    """The node cannot go on; the message is the cause, in one line."""


class StopRequestedError(Exception):
    """A signal asked the node to end."""


class _Stage(enum.Enum):
    """What the supervisor is doing; this decides what the end of a process means."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    ENDING = enum.auto()


class Supervisor:
    """Runs one node from start to end.

    Args:
        config: the node.
        frontends: what each front end runs.
        say: prints a line of the start-up report.
        shutdown_seconds: how long front ends may take to finish their requests.
        elapsed: returns the seconds since the node's start began, for the start-up report.
        helpers: what other processes run, by name; they may die (``helpers.py``).
    """

    def __init__(
        self,
        config: NodeConfig,
        frontends: Sequence[Target],
        say: Say,
        shutdown_seconds: float = 0.0,
        elapsed: Clock = process_seconds,
        helpers: Mapping[str, Target] | None = None,
    ) -> None:
        self._config = config
        self._elapsed = elapsed
        self._frontend_targets = frontends
        self._say = say
        self._shutdown_seconds = shutdown_seconds
        self._stage = _Stage.STARTING
        self._children: list[Child] = []
        self._frontends: list[Child] = []
        self._helpers = Helpers(helpers or {})
        self._dead_engines: set[int] = set()
        self._restarts = Restarts(config.restart_limit, config.restart_backoff_seconds)
        timeout = config.controller_timeout_seconds
        self._controller_limit = None if timeout is None else _MOST_TIMEOUTS * timeout
        self._controller = HeartbeatMonitor(
            heartbeat_path(config.runtime_dir), self._controller_limit
        )
        self._stopped: set[Child] = set()
        self._looked_at = 0.0
        self._signals = EndSignals()
        self._control: zmq.Socket[Any] | None = None
        self._layout: LayoutView | None = None

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start the node, serve until a signal or a failure, end it, and return the exit code.

        Args:
            on_ready: called once when the node takes requests.
        """
        with self._signals.caught():
            try:
                with suppress(StopRequestedError):
                    self._serve(on_ready)
                return 0 if self._end_in_order() else 1
            except NodeFailedError as error:
                self._say(f"shoal: {error}")
                return 1
            finally:
                self._clean_up()

    def _serve(self, on_ready: Callable[[], None]) -> None:
        """Start the node and serve until ``StopRequestedError`` or ``NodeFailedError``."""
        self._start()
        self._wait_until_ready()
        self._stage = _Stage.SERVING
        on_ready()
        while True:
            self._turn(_LOOK_SECONDS)
            self._tend_engines()

    def _tend_engines(self) -> None:
        self._look_for_stopped()
        self._restart_engines()

    # --- start ---

    def _start(self) -> None:
        config = self._config
        child = partial(Child, choose_context(), log_format=config.log_format)
        with signals_held():
            for engine in range(config.engines):
                self._start_engine(child, engine)
            self._children.append(child("controller", named_target(_CONTROLLER, config)))
            for index, target in enumerate(self._frontend_targets):
                self._frontends.append(child(f"front end {index}", target))
            self._helpers.start(child)
            self._children += [*self._frontends, *self._helpers.children]
        # This comes after the children: a ZMQ context starts threads, and must not be inherited.
        self._control = open_socket(zmq.Context(), zmq.DEALER, identity=SUPERVISOR.encode())
        self._control.connect(Addresses(config.runtime_dir).control)

    def _start_engine(self, child: Callable[..., Child], engine: int) -> None:
        for role, path in _engine_roles(self._config).items():
            name = f"engine {engine} {role}".rstrip()
            target = named_target(path, self._config, engine, self._restarts.incarnation(engine))
            self._children.append(child(name, target, engine))

    def _wait_until_ready(self) -> None:
        view = self._ask_layout()
        self._say(f"  controller up after {self._elapsed():.1f} s")
        reported: set[int] = set()
        while True:
            self._report_engines(view, reported)
            if view.ready:
                break
            if all(engine.state == "serving" for engine in view.engines):
                # Steps are being timed, and the node starts even if an engine dies of that.
                self._stage = _Stage.SERVING
            self._turn(_POLL_SECONDS)
            if self._stage is _Stage.SERVING:
                # All may have died of it: then the node is not ready before one is back.
                self._tend_engines()
            view = self._ask_layout()
        while not all(child.is_ready for child in self._frontends):
            self._turn(_LOOK_SECONDS)
        self._say(f"  front end up after {self._elapsed():.1f} s")
        if len(set(view.lengths.values())) > 1:
            held = ", ".join(f"{tokens} in {name}" for name, tokens in view.lengths.items())
            self._say(f"  not every layout holds the longest requests: up to {held} (tokens)")

    def _ask_layout(self) -> LayoutView:
        self._layout = None
        self._send(GetLayout(call=0))
        while (view := self._answer()) is None:
            self._turn(_LOOK_SECONDS)
        return view

    def _answer(self) -> LayoutView | None:
        return self._layout

    def _report_engines(self, view: LayoutView, reported: set[int]) -> None:
        for engine in view.engines:
            if engine.startup_seconds and engine.engine not in reported:
                reported.add(engine.engine)
                after = f"after {self._elapsed():.1f} s"
                self._say(f"  engine {engine.engine} up {after} ({_phases(engine)})")

    # --- watch ---

    def _turn(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for something to happen, and deal with it.

        Raises:
            StopRequestedError: a signal has come.
            NodeFailedError: the node cannot go on.
        """
        if not self._signals.count:
            self._watch(timeout)
        if self._signals.count:
            raise StopRequestedError
        self._controller.look()
        if self._controller.is_silent:
            limit = self._controller_limit
            raise NodeFailedError(f"controller: it has not answered for {limit:g} s")

    def _watch(self, timeout: float) -> None:
        assert self._control is not None
        # A ZMQ file descriptor signals only changes, so present messages are read first.
        if not self._read_control():
            left = self._restarts.seconds_left(time.monotonic())
            if left is not None:
                timeout = min(timeout, max(left, _POLL_SECONDS))
            reports = [child.reports for child in self._children if not child.is_ready]
            wait(
                [
                    *(child.sentinel for child in self._children),
                    *reports,
                    self._control.fileno(),
                    self._signals.wakeup,
                ],
                timeout,
            )
            self._read_control()
        for child in list(self._children):
            child.read_report()
            if not child.is_alive:
                self._children.remove(child)
                self._ended(child)

    def _read_control(self) -> bool:
        assert self._control is not None
        messages = [decode_from_controller(frames[0]) for frames in drain(self._control)]
        for message in messages:
            if isinstance(message, LayoutView):
                self._layout = message
            elif isinstance(message, KillEngines):
                for engine, incarnation in message.engines.items():
                    if incarnation == self._restarts.incarnation(engine):
                        self._lose_engine(engine, message.reason)
        return bool(messages)

    def _ended(self, child: Child) -> None:
        if self._stage is _Stage.ENDING and child in self._frontends:
            return
        cause = f"{child.name}: {child.cause}"
        pause = self._helpers.ended(child)
        if pause is not None:
            if self._stage is not _Stage.ENDING:
                self._say(f"shoal: {cause}; it is restarted in {pause:.1f} s")
            return
        if child.engine is None or self._stage is _Stage.STARTING:
            raise NodeFailedError(cause)
        self._lose_engine(child.engine, cause)

    def _look_for_stopped(self) -> None:
        """Give up engines that have a process which is stopped now and was at the last look."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_SECONDS:
            return
        engines = [child for child in self._children if child.engine is not None]
        stopped = {child for child in engines if child.is_stopped}
        for child in stopped & self._stopped:
            assert child.engine is not None
            reason = f"{child.name}: stopped by a signal"
            self._lose_engine(child.engine, reason, DeathCause.STOPPED)
        self._looked_at, self._stopped = now, stopped

    def _lose_engine(self, engine: int, reason: str, cause: DeathCause = DeathCause.ENDED) -> None:
        if engine in self._dead_engines:
            return
        if self._stage is _Stage.STARTING:
            raise NodeFailedError(f"engine {engine}: {reason}")
        self._dead_engines.add(engine)
        for twin in self._children:
            if twin.engine == engine:
                twin.kill()
        serving = self._stage is _Stage.SERVING
        restart = self._restarts.plan(engine, time.monotonic()) if serving else None
        hope = serving and self._restarts.pending
        if len(self._dead_engines) == self._config.engines and not hope:
            raise NodeFailedError(f"no engine is left: {reason}")
        self._say(f"shoal: engine {engine} is lost, {self._prospect(restart)}: {reason}")
        incarnation = self._restarts.incarnation(engine)
        self._send(EngineDied(engine, reason, cause, incarnation, restart is not None))

    def _prospect(self, restart: Restart | None) -> str:
        """Return what happens next with a lost engine, for the user."""
        if restart is not None:
            return f"to be restarted in {max(0.0, restart.at - time.monotonic()):.1f} s"
        if self._config.restart_limit and self._stage is _Stage.SERVING:
            return "and was restarted too often to be restarted again; serving goes on"
        return "serving goes on"

    def _restart_engines(self) -> None:
        """Restart the dead engines whose time has come and whose processes have all ended."""
        dying = {child.engine for child in self._children if child.engine in self._dead_engines}
        child = partial(Child, choose_context(), log_format=self._config.log_format)
        for restart in self._restarts.due(time.monotonic()):
            if restart.engine in dying:
                continue
            self._restarts.begun(restart)
            self._dead_engines.discard(restart.engine)
            with signals_held():
                self._start_engine(child, restart.engine)
            self._say(f"shoal: engine {restart.engine} is restarted ({restart.incarnation})")
            self._send(EngineStarting(restart.engine, restart.incarnation))
        with signals_held():
            self._children += self._helpers.restart(child)

    def _send(self, message: Message) -> None:
        assert self._control is not None
        self._control.send(encode(message))

    # --- end ---

    def _end_in_order(self) -> bool:
        """End the front ends, then the engines, then the controller; return whether that worked.

        A second signal, or a controller that does not end, leaves the rest to ``_clean_up``. An
        engine that does not end is killed. This loses nothing, because its requests have ended by
        now. It can happen to a starting engine, which may not react to a signal while it imports
        vLLM.

        Raises:
            NodeFailedError: the controller ended first, or no engine is left.
        """
        self._stage = _Stage.ENDING
        asked = self._signals.count
        if not self._drain():
            return False
        engines = [child for child in self._children if child.engine is not None]
        controller = [child for child in self._children if child.engine is None]
        for children in (engines, controller):
            for child in children:
                child.terminate()
            deadline = time.monotonic() + _EXIT_SECONDS
            while alive := [child for child in children if child.is_alive]:
                left = deadline - time.monotonic()
                if self._signals.count > asked:
                    return False
                if left <= 0:
                    self._say_late(alive, _EXIT_SECONDS)
                    if children is controller:
                        return False
                    for child in alive:
                        child.kill()
                    break
                wait([*(child.sentinel for child in alive), self._signals.wakeup], left)
                self._signals.rest()
        return True

    def _drain(self) -> bool:
        """End the front ends when their requests are done; return whether that was in time.

        After a second signal they have only the time to tell their clients, after a third none.
        """
        taken = asked = self._signals.count
        seconds = self._shutdown_seconds + _EXIT_SECONDS
        deadline = self._end_front_ends(self._shutdown_seconds, seconds)
        while alive := [child for child in self._frontends if child.is_alive]:
            if self._signals.count > asked + 1:
                return False
            if self._signals.count > taken:
                taken, seconds = self._signals.count, _HURRY_SECONDS
                deadline = self._end_front_ends(0.0, seconds)
            left = deadline - time.monotonic()
            if left <= 0:
                self._say_late(alive, seconds)
                return False
            self._watch(left)
            self._signals.rest()
        return self._signals.count == asked

    def _end_front_ends(self, request_seconds: float, exit_seconds: float) -> float:
        """Ask the front ends to end, and return the time by which they must have ended."""
        self._send(EndNode(request_seconds))
        for child in (*self._frontends, *self._helpers.children):
            child.terminate()
        return time.monotonic() + exit_seconds

    def _say_late(self, children: Sequence[Child], seconds: float) -> None:
        late = ", ".join(child.name for child in children)
        self._say(f"shoal: killed what did not end within {seconds:g} s: {late}")

    def _clean_up(self) -> None:
        """Kill all remaining processes, and remove the runtime directory and shared memory."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join()
        end_helper()
        if self._control is not None:
            self._control.context.destroy(linger=0)
        remove_runtime_dir(Path(self._config.runtime_dir))


def _phases(engine: EngineView) -> str:
    """Return the time and the device memory that each phase of an engine's start took."""
    gib = {name: f" {taken / _GIB:.2f} GiB" for name, taken in engine.startup_bytes.items()}
    # Memory that was taken before the first phase has no time.
    times = {name: f" {seconds:.1f} s" for name, seconds in engine.startup_seconds.items()}
    names = dict.fromkeys((*gib, *times))
    return ", ".join(f"{name}{times.get(name, '')}{gib.get(name, '')}" for name in names)


def _engine_roles(config: NodeConfig) -> Mapping[str, str]:
    """Return the processes of one engine: the role of each for the user, and what it runs."""
    if config.fake is not None:
        return {"": _FAKE}
    runner = _RUNNER if config.recording_dir is None else _RECORDING_RUNNER
    return {"scheduler": _SCHEDULER, "runner": runner}
