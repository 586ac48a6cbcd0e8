"""A child process of the node: how it starts, what it tells its parent, how it ends.

Children ignore SIGINT, because a terminal sends it to all of them and the supervisor decides. They
end on SIGTERM by ``SystemExit``, so that their clean-up runs. The kernel kills them if the
supervisor dies. Each child leads a process group: when it has ended, in whatever way, all processes
that it has started itself, such as a compiler, are killed.
"""

import atexit
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from shoal.runtime.logs import LogFormat, configure_logging

DEBUG_VARIABLE = "SHOAL_DEBUG"
"""Environment variable that makes a failing child print its traceback."""

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HELPER_SECONDS = 2.0

READY = ""
"""What a child reports when it can work. Any other report is the cause of its end."""

Target = Callable[[Callable[[], None]], None]
"""What a child runs. Its argument is a function to call when it is ready. It is picklable."""


def choose_context() -> BaseContext:
    """Return how children start: by fork if that is safe, otherwise by spawn.

    A fork shares what the parent has imported, which saves seconds per process. It is safe while
    the parent has a single thread and CUDA is not initialised.
    """
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    single = len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208 - threads of any library
    return multiprocessing.get_context("fork" if single and not uses_cuda else "spawn")


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM, so that neither reaches a child that is not yet set up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A process of the node. It starts at once; ``signals_held`` must be in effect.

    Args:
        context: see ``choose_context``.
        name: name for the user, such as ``engine 1 runner``.
        target: what the process runs.
        engine: the engine that it belongs to, if any.
        log_format: how it writes its log.
    """

    def __init__(
        self,
        context: BaseContext,
        name: str,
        target: Target,
        engine: int | None = None,
        *,
        log_format: LogFormat = LogFormat.TEXT,
    ) -> None:
        self.name = name
        self.engine = engine
        self.is_ready = False
        self._reported: str | None = None
        self.reports, writer = context.Pipe(duplex=False)
        if context.get_start_method() == "spawn":
            # With the first process that it spawns, multiprocessing starts a helper process and
            # then unblocks SIGINT and SIGTERM, even if they were held before.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # multiprocessing declares the type of ``Process`` only for each context class.
        make: Any = context
        self._process: multiprocessing.process.BaseProcess = make.Process(
            target=_child_main,
            args=(name, log_format, target, writer, os.getpid()),
            name=f"shoal {name}",
        )
        self._process.start()
        # Before each start multiprocessing collects exit codes of known children: see ``is_alive``.
        known: Any = multiprocessing.process
        known._children.discard(self._process)
        writer.close()

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs. If it has ended, the rest of its process group is killed."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return self._process.is_alive()
        if ended is None:
            return True  # its exit code must not be collected: it may have ended just now
        # This comes before the exit code is collected: after that the id may be another process's.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.is_alive()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, so that it lives but does nothing."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        # The process name before the state, in parentheses, may hold anything.
        return status.rpartition(") ")[2].startswith("T")

    def read_report(self) -> None:
        """Take what the process has reported, without blocking."""
        try:
            while self.reports.poll():
                # Reports are no pickles, because front ends, which talk to strangers, send them.
                report = self.reports.recv_bytes().decode()
                if report == READY:
                    self.is_ready = True
                else:
                    self._reported = report
        except EOFError:
            return  # the process has ended, or closed its side

    @property
    def cause(self) -> str:
        """Why the process ended, in a few words."""
        self.read_report()
        if self._reported is not None:
            return self._reported
        code = self._process.exitcode
        if code is not None and code < 0:
            # Most real-time signals have no name.
            names = {each.value: each.name for each in signal.Signals}
            return f"killed by {names.get(-code, f'signal {-code}')}"
        return f"ended with exit code {code}"

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.is_alive:
            self._process.terminate()

    def kill(self) -> None:
        """End the process at once."""
        if self.is_alive:
            self._process.kill()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the process to end, and return whether it has."""
        if wait([self.sentinel], timeout):
            # The process closes its end of the sentinel a moment before it has ended.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return not self.is_alive


def end_helper() -> None:
    """End the helper process that ``multiprocessing`` starts with spawned children, if any.

    It would end by itself, but only after this process, and so be an orphan for a moment.
    """
    tracker: Any = resource_tracker._resource_tracker
    # It ends when no process has its pipe open; one that a killed child has left behind may.
    ending = threading.Thread(target=tracker._stop, daemon=True)
    ending.start()
    ending.join(_HELPER_SECONDS)


def named_target(path: str, *args: object) -> Target:
    """Return a target that imports ``module:function`` in the child and calls it with ``args``."""
    return NamedTarget(path, args)


class NamedTarget:
    """A target that is given by name, so that only the process that runs it imports its module."""

    def __init__(self, path: str, args: tuple[object, ...]) -> None:
        self._path = path
        self._args = args

    def __call__(self, ready: Callable[[], None]) -> None:
        """Import and run the function, which reports by its own protocol when it is ready."""
        del ready
        module, _, function = self._path.partition(":")
        getattr(importlib.import_module(module), function)(*self._args)


def exit_without_teardown(code: int) -> None:
    """Make the interpreter exit with ``code`` and without tearing down its modules.

    Tearing down vLLM's modules takes seconds, and Triton's then report leaks to the user. A forked
    process exits like this in any case.
    """

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)


def _child_main(
    name: str, log_format: LogFormat, target: Target, reports: Connection, parent: int
) -> None:
    _die_with(parent)
    os.setpgid(0, 0)
    Path("/proc/self/comm").write_text(name)  # for `ps` and `top`; the kernel keeps 15 characters
    configure_logging(name, log_format)
    # With the start method "spawn", semaphores of libraries have names, and stay behind if this
    # process is killed. With "fork" they have no names from the beginning.
    multiprocessing.set_start_method("fork", force=True)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_in_order)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    code = 1
    try:
        target(lambda: reports.send_bytes(READY.encode()))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:  # noqa: BLE001 - the parent shows it, whatever it is
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        cause = " ".join(str(error).split())
        text = f"{type(error).__name__}: {cause}" if cause else type(error).__name__
        reports.send_bytes(text.encode(errors="replace"))
    exit_without_teardown(code)
    sys.exit(code)


def _exit_in_order(number: int, frame: object) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    assert threading.current_thread() is threading.main_thread()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)  # the parent had already ended
