import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.runtime.clock import ManualClock
from shoal.runtime.config import NodeConfig
from shoal.runtime.node import supervisor
from shoal.runtime.node.child_process import Child, choose_context
from shoal.runtime.node.heartbeat import HeartbeatMonitor
from shoal.runtime.node.runtime_dir import make_runtime_dir
from shoal.runtime.node.supervisor import Supervisor
from tests.runtime.node.node_parts import FrontEnd

PARTS = "tests.runtime.node.node_parts"


class Node:
    """A supervisor over played processes, and what is to be seen of it from outside."""

    def __init__(self, tmp_path: Path, **wanted: Any) -> None:
        self.pids_dir = tmp_path / "pids"
        self.pids_dir.mkdir()
        self.log = tmp_path / "log"
        self.log.touch()
        self.said: list[str] = []
        self.runtime_dir = make_runtime_dir()
        self.config = NodeConfig(
            engines=2,
            max_group=2,
            policy="manual",
            runtime_dir=str(self.runtime_dir),
            vllm={"pids": str(self.pids_dir), "log": str(self.log), **wanted},
        )

    def run(
        self,
        on_ready: Callable[[], None],
        *,
        stubborn: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> int:
        front = FrontEnd(self.config, stubborn)
        return Supervisor(self.config, [front], say or self.said.append).run(on_ready)

    def pid(self, part: str) -> int:
        return int((self.pids_dir / part).read_text())

    def kill(self, part: str) -> None:
        os.kill(self.pid(part), signal.SIGKILL)

    def ask_to_kill(self) -> None:
        os.kill(self.pid("controller"), signal.SIGUSR1)

    def leftovers(self) -> list[str]:
        names = [path.name for path in self.pids_dir.iterdir() if not path.name.startswith("died")]
        alive = [name for name in names if is_alive(self.pid(name))]
        shared = [path.name for path in Path("/dev/shm").glob(f"*{self.runtime_dir.name}*")]
        return alive + shared + [str(d) for d in [self.runtime_dir] if d.exists()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def played_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "_SCHEDULER", f"{PARTS}:scheduler")
    monkeypatch.setattr(supervisor, "_RUNNER", f"{PARTS}:runner")
    monkeypatch.setattr(supervisor, "_CONTROLLER", f"{PARTS}:controller")
    # Nothing takes that long.
    monkeypatch.setattr(supervisor, "_EXIT_SECONDS", 120.0)
    monkeypatch.setattr(supervisor, "_HURRY_SECONDS", 120.0)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def when(path: Path, act: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls ``act`` once ``path`` exists."""

    def wait() -> None:
        while not path.exists():
            pass_time.wait(0.01)
        act()

    pass_time = threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def wait_for(text: str, path: Path) -> None:
    """Wait until a file has a text: the controller may write it long after it was told."""
    pass_time = threading.Event()
    while text not in path.read_text():
        pass_time.wait(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_node_in_order(tmp_path: Path, number: signal.Signals) -> None:
    node = Node(tmp_path)
    assert node.run(lambda: os.kill(os.getpid(), number)) == 0
    assert node.leftovers() == []


def test_the_start_is_reported_by_phase(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(interrupt)
    assert [line.split(" up ")[0].strip() for line in node.said] == [
        "controller",
        "engine 0",
        "engine 1",
        "front end",
    ]
    assert "weights 1.5 s" in node.said[1]


def test_the_start_is_reported_by_the_clock_that_is_given(tmp_path: Path) -> None:
    node = Node(tmp_path)
    front, clock = FrontEnd(node.config), ManualClock(12.34)
    supervisor = Supervisor(node.config, [front], node.said.append, elapsed=clock)
    assert supervisor.run(interrupt) == 0
    assert [re.findall(r" up after ([\d.]+) s", line) for line in node.said] == [["12.3"]] * 4


def test_an_engine_that_fails_to_start_ends_the_start_with_its_cause(tmp_path: Path) -> None:
    node = Node(tmp_path, fail="runner-1")
    assert node.run(lambda: pytest.fail("it cannot be ready")) == 1
    assert node.said[-1] == "shoal: engine 1 runner: OSError: out of blocks"
    assert node.leftovers() == []


def test_runners_record_only_in_a_node_with_a_directory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RECORDING_RUNNER", supervisor._RUNNER)
    monkeypatch.setattr(supervisor, "_RUNNER", f"{PARTS}:nowhere")
    node = Node(tmp_path)
    assert node.run(lambda: pytest.fail("there is no such runner")) == 1
    (tmp_path / "again").mkdir()
    node = Node(tmp_path / "again")
    node.config = msgspec.structs.replace(node.config, recording_dir=str(tmp_path))
    assert node.run(interrupt) == 0


@pytest.mark.parametrize("part", ["controller", "front"])
def test_the_node_ends_with_its_controller_or_a_front_end(tmp_path: Path, part: str) -> None:
    node = Node(tmp_path)
    assert node.run(lambda: node.kill(part)) == 1
    name = {"controller": "controller", "front": "front end 0"}[part]
    assert node.said[-1] == f"shoal: {name}: killed by SIGKILL"
    assert node.leftovers() == []


@pytest.mark.parametrize(("part", "twin"), [("scheduler", "runner"), ("runner", "scheduler")])
def test_an_engine_dies_whole_and_the_node_goes_on(tmp_path: Path, part: str, twin: str) -> None:
    node = Node(tmp_path)
    watcher = when(node.pids_dir / "died-0", interrupt)
    assert node.run(lambda: node.kill(f"{part}-0")) == 0
    watcher.join()
    assert node.log.read_text() == f"0: engine 0 {part}: killed by SIGKILL\n"
    assert "engine 0 is lost" in node.said[-1]
    assert node.leftovers() == []


@pytest.mark.parametrize("killed", ["runner-0", "scheduler-0", None])
def test_what_a_process_has_started_ends_with_it(tmp_path: Path, killed: str | None) -> None:
    node = Node(tmp_path, helped=["runner-0"])
    helpers = []

    def act() -> None:
        helpers.append(os.pidfd_open(node.pid("helper-of-runner-0")))
        if killed is None:
            interrupt()
        else:
            node.kill(killed)

    watcher = when(node.pids_dir / "died-0", interrupt) if killed else None
    assert node.run(act) == 0
    if watcher is not None:
        watcher.join()
    (helper,) = helpers
    assert connection.wait([helper], 120.0) == [helper], "it has ended"
    os.close(helper)


@pytest.mark.parametrize("part", ["scheduler", "runner"])
def test_an_engine_with_a_stopped_process_is_given_up(tmp_path: Path, part: str) -> None:
    node = Node(tmp_path)
    watcher = when(node.pids_dir / "died-1", interrupt)
    assert node.run(lambda: os.kill(node.pid(f"{part}-1"), signal.SIGSTOP)) == 0
    watcher.join()
    assert node.log.read_text() == f"1: engine 1 {part}: stopped by a signal\n"
    assert node.leftovers() == []


def test_an_engine_that_was_stopped_for_a_moment_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    looks: list[set[Child]] = []
    look = Supervisor._look_for_stopped

    def look_and_go_on(self: Supervisor) -> None:
        """Let the process go on after the first look that finds it stopped."""
        look(self)
        looks.append(self._stopped)
        if self._stopped:
            os.kill(node.pid("runner-1"), signal.SIGCONT)
        if any(looks) and not self._stopped:
            interrupt()

    monkeypatch.setattr(Supervisor, "_look_for_stopped", look_and_go_on)
    assert node.run(lambda: os.kill(node.pid("runner-1"), signal.SIGSTOP)) == 0
    assert any(looks)
    assert node.log.read_text() == ""
    assert node.leftovers() == []


class Stopped:
    """A node's controller that is stopped for a while: time passes only then, at each look."""

    def __init__(self) -> None:
        self._clock, self._nodes = ManualClock(), list[Node]()

    def __call__(self, node: Node) -> None:
        """Stop a node's controller."""
        os.kill(node.pid("controller"), signal.SIGSTOP)
        self._nodes = [node]

    def go_on(self) -> None:
        """Let it go on."""
        os.kill(self._nodes.pop().pid("controller"), signal.SIGCONT)

    def seconds(self) -> float:
        self._clock.advance(60.0 * len(self._nodes))
        return self._clock()


@pytest.fixture
def stop_controller(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    stopped = Stopped()
    monitor = partial(HeartbeatMonitor, clock=stopped.seconds)
    monkeypatch.setattr(supervisor, "HeartbeatMonitor", monitor)
    return stopped


def test_the_node_ends_with_a_controller_that_hangs(
    tmp_path: Path, stop_controller: Stopped
) -> None:
    node = Node(tmp_path)
    node.config = msgspec.structs.replace(node.config, controller_timeout_seconds=10.0)
    ready = []

    def stop_it() -> None:
        ready.append(node.pid("controller"))
        stop_controller(node)

    assert node.run(stop_it) == 1
    assert ready
    assert node.said[-1] == "shoal: controller: it has not answered for 30 s"
    assert node.leftovers() == []


def test_a_controller_that_hangs_during_the_start_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_controller: Stopped
) -> None:
    node = Node(tmp_path, fail="nobody")  # it never is ready
    node.config = msgspec.structs.replace(node.config, controller_timeout_seconds=10.0)
    report = Supervisor._report_engines

    def report_and_stop_it(self: Supervisor, *arguments: Any) -> None:
        report(self, *arguments)
        stop_controller(node)

    monkeypatch.setattr(Supervisor, "_report_engines", report_and_stop_it)
    assert node.run(lambda: pytest.fail("it cannot be ready")) == 1
    assert node.said[-1] == "shoal: controller: it has not answered for 30 s"
    assert node.leftovers() == []


def test_a_controller_that_hangs_for_a_moment_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_controller: Stopped
) -> None:
    node = Node(tmp_path)
    node.config = msgspec.structs.replace(node.config, controller_timeout_seconds=10.0)
    looks: list[int] = []
    look = HeartbeatMonitor.look

    def look_and_go_on(self: HeartbeatMonitor) -> None:
        """Let it go on after the first look in vain."""
        look(self)
        if node.said[-1:] == ["stopped"]:
            if self._in_vain and not any(looks):
                stop_controller.go_on()
            looks.append(self._in_vain)
            if any(looks) and not self._in_vain:
                interrupt()

    def stop_it() -> None:
        stop_controller(node)
        node.said.append("stopped")

    monkeypatch.setattr(HeartbeatMonitor, "look", look_and_go_on)
    assert node.run(stop_it) == 0
    assert any(looks)
    assert node.said[-1] == "stopped"
    assert node.leftovers() == []


def test_the_controller_can_have_an_engine_killed(tmp_path: Path) -> None:
    node = Node(tmp_path, kill=[1])
    watcher = when(node.pids_dir / "died-1", interrupt)
    assert node.run(node.ask_to_kill) == 0
    watcher.join()
    assert node.log.read_text() == "1: their group broke\n"


def test_the_last_engine_takes_the_node_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path, kill=[0, 1])
    assert node.run(node.ask_to_kill) == 1
    assert node.said[-1] == "shoal: no engine is left: their group broke"
    assert node.leftovers() == []


def test_a_second_signal_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_EXIT_SECONDS", 3600.0)
    monkeypatch.setattr(supervisor, "_HURRY_SECONDS", 0.0)
    node = Node(tmp_path)
    end = Supervisor._end_in_order

    def end_and_signal(self: Supervisor) -> bool:
        timer = threading.Timer(0.1, interrupt)
        timer.start()
        try:
            return end(self)
        finally:
            timer.join()

    monkeypatch.setattr(Supervisor, "_end_in_order", end_and_signal)
    assert node.run(interrupt, stubborn=True) == 1
    assert node.leftovers() == []


def test_the_controller_is_told_how_long_requests_may_go_on(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ending = tmp_path / "ending"

    def end_front() -> None:
        wait_for("\n", ending)
        node.kill("front")

    told = when(ending, end_front)
    front = FrontEnd(node.config, stubborn=True)
    assert Supervisor(node.config, [front], node.said.append, 12.5).run(interrupt) == 0
    told.join()
    assert ending.read_text() == "12.5\n"


def test_an_engine_that_dies_while_requests_end_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    killed = when(tmp_path / "ending", lambda: node.kill("runner-1"))
    released = when(node.pids_dir / "died-1", lambda: node.kill("front"))
    assert node.run(interrupt, stubborn=True) == 0
    killed.join()
    released.join()
    assert node.log.read_text() == "1: engine 1 runner: killed by SIGKILL\n"
    assert "serving goes on" in node.said[-1]
    assert node.leftovers() == []


def test_a_controller_that_dies_while_requests_end_is_a_failure(tmp_path: Path) -> None:
    node = Node(tmp_path)
    killed = when(tmp_path / "ending", lambda: node.kill("controller"))
    assert node.run(interrupt, stubborn=True) == 1
    killed.join()
    assert node.said[-1] == "shoal: controller: killed by SIGKILL"
    assert node.leftovers() == []


def test_a_second_signal_leaves_requests_no_time(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ending = tmp_path / "ending"

    def interrupt_again() -> None:
        interrupt()
        wait_for("3600\n0\n", ending)
        node.kill("front")

    signalled = when(ending, interrupt_again)
    front = FrontEnd(node.config, stubborn=True)
    assert Supervisor(node.config, [front], node.said.append, 3600.0).run(interrupt) == 1
    signalled.join()
    assert node.leftovers() == []


def test_a_process_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_EXIT_SECONDS", 0.0)
    node = Node(tmp_path)
    assert node.run(interrupt, stubborn=True) == 1
    assert node.leftovers() == []


def test_an_engine_that_does_not_end_is_killed_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is only starting may not: whatever it served has ended by then."""
    node = Node(tmp_path)
    others = ("front", "scheduler-0", "runner-0", "scheduler-1")

    def seconds() -> float:
        """Time passes when all have ended but the one that does not."""
        return 0.0 if any(is_alive(node.pid(part)) for part in others) else 1000.0

    def stop_one_and_interrupt() -> None:
        os.kill(node.pid("runner-1"), signal.SIGSTOP)
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=seconds))
        interrupt()

    assert node.run(stop_one_and_interrupt) == 0
    assert node.said[-1] == "shoal: killed what did not end within 120 s: engine 1 runner"
    assert node.leftovers() == []


def test_a_parent_with_threads_does_not_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    try:
        assert choose_context().get_start_method() == "spawn"
    finally:
        done.set()
        thread.join()
