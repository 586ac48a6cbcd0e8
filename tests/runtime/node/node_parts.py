"""Processes of a node played for the supervisor's tests: no vLLM, no engine, no HTTP.

What each does follows from the ``NodeConfig.vllm`` of the test: ``fail`` names the part that
fails, ``failing_restarts`` says how often an engine's restart does, ``kill`` the engines that the
controller wants ended at SIGUSR1, ``log`` its file. ``times`` says that it times steps, and is not
ready before all engines were restarted; beside the log it notes that the supervisor knows of it.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.node.heartbeat import Heartbeat, heartbeat_path
from shoal.runtime.protocol.messages import (
    EndNode,
    EngineDied,
    EngineStarting,
    GetLayout,
    KillEngines,
    LayoutView,
    decode_control,
    encode,
)
from shoal.runtime.protocol.messages.views import EngineView
from shoal.runtime.protocol.transport import LONGEST_WAIT_SECONDS, SUPERVISOR


def note_pid(config: NodeConfig, name: str) -> None:
    """Write this process's id where the test reads it: whole, or not at all."""
    folder = Path(config.vllm["pids"])
    draft = folder.with_name(f"{name}.pid")
    draft.write_text(str(os.getpid()))
    draft.rename(folder / name)


def scheduler(config: NodeConfig, engine: int, incarnation: int) -> None:
    run_part(config, f"scheduler-{engine}", incarnation)


def runner(config: NodeConfig, engine: int, incarnation: int) -> None:
    # A segment that only the supervisor can remove if this process is killed.
    Path(f"/dev/shm/test-{Path(config.runtime_dir).name}-{engine}").touch()
    run_part(config, f"runner-{engine}", incarnation)


def run_part(config: NodeConfig, name: str, incarnation: int) -> None:
    """Say who and where this process is, then fail or wait for the end, as the test wants."""
    if name in config.vllm.get("helped", []):
        # Like a compiler that an engine runs as it starts; it outlives whoever waits for it.
        helper = subprocess.Popen(["sleep", "600"])
        Path(config.vllm["pids"], f"helper-of-{name}").write_text(str(helper.pid))
    note_pid(config, f"{name}.{incarnation}" if incarnation else name)
    failing = 0 < incarnation <= config.vllm.get("failing_restarts", 0)
    if config.vllm.get("fail") == name or failing:
        raise OSError("out of\nblocks")
    while True:
        signal.pause()


def controller(config: NodeConfig) -> None:
    """Answer layouts, ask for what the test wants to be killed, and note every death."""
    note_pid(config, "controller")
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(Addresses(config.runtime_dir).control)
    wanted = config.vllm.get("kill", [])

    def kill(*_: object) -> None:
        message = encode(KillEngines(dict.fromkeys(wanted, 0), "their group broke"))
        socket.send_multipart([SUPERVISOR.encode(), message])

    signal.signal(signal.SIGUSR1, kill)
    questions = restarts = 0
    was_up = False
    heartbeat = Heartbeat(heartbeat_path(config.runtime_dir))
    while True:
        heartbeat.beat()
        # In bounded waits: see LONGEST_WAIT_SECONDS.
        while not socket.poll(int(LONGEST_WAIT_SECONDS * 1000)):
            heartbeat.beat()
        peer, payload = socket.recv_multipart()
        message = decode_control(payload)
        if isinstance(message, EngineDied):
            with Path(config.vllm["log"]).open("a") as log:
                log.write(f"{message.engine}: {message.reason}\n")
            Path(config.vllm["pids"], f"died-{message.engine}").touch()
        if isinstance(message, EngineStarting):
            restarts += 1
            with Path(config.vllm["log"]).open("a") as log:
                log.write(f"{message.engine}: restarted, {message.incarnation}\n")
        if isinstance(message, EndNode):
            with Path(config.vllm["log"]).with_name("ending").open("a") as log:
                log.write(f"{message.seconds:g}\n")
        if isinstance(message, GetLayout):
            questions += 1
            # The supervisor has to ask again, and for ever where a part never comes up.
            up = questions > 1 and "fail" not in config.vllm and are_up(config)
            ready = up and ("times" not in config.vllm or restarts == config.engines)
            if was_up and not ready:
                Path(config.vllm["log"]).with_name("timing").touch()
            was_up = up
            socket.send_multipart([peer, encode(layout(config, message.call, up, ready))])


def are_up(config: NodeConfig) -> bool:
    """Return whether every part of every engine has said where it is: tests kill them then."""
    parts = [f"{role}-{e}" for role in ("scheduler", "runner") for e in range(config.engines)]
    return all(Path(config.vllm["pids"], part).exists() for part in parts)


def layout(config: NodeConfig, call: int, up: bool, ready: bool) -> LayoutView:
    state, phases = ("serving", {"weights": 1.5}) if up else ("starting", {})
    engines = [EngineView(e, state, 8, {}, phases) for e in range(config.engines)]
    return LayoutView(call, engines, [], [], 0, "manual", ready, None)


@dataclass(frozen=True)
class FrontEnd:
    """A front end that is ready at once and ends on SIGTERM, or only when it is killed."""

    config: NodeConfig
    stubborn: bool = False

    def __call__(self, ready: Callable[[], None]) -> None:
        if self.stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_pid(self.config, "front")
        ready()
        while True:
            signal.pause()
