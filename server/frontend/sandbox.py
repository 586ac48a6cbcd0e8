"""Works on untrusted input in a forked process with limits, which can be killed.

The kernel enforces the limits, so nothing has to watch the process: when it has used up its CPU
seconds or asks for too much memory, it ends, and its end of the connection closes.
"""

import asyncio
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.server.errors import one_line

Work = Callable[[bytes], None]
"""Does a job. Raises ``ValueError`` with one line if the job is wrong."""

_ACCEPTED = b"accepted"
_REFUSED = b"refused "
_NO_PROCESS = b"no process"
_CHUNK = 1 << 16
_PATIENCE = 4
"""Wall seconds that a job may take per CPU second: it shares the CPUs."""
_MESSAGE_BYTES = 4096


class RefusedError(ValueError):
    """A job was wrong, or exceeded its limits; the message is one line."""


class KilledError(RefusedError):
    """A job exceeded its limits and was killed."""


class Sandbox:
    """A process that forks another one for every job. A context manager that ends it.

    It is itself a fork of the process that makes it, with all modules imported there. Make it while
    that process has only one thread.

    Args:
        work: does a job.
        prepare: called once, in the sandbox, when the first job comes.
        memory_bytes: memory that one job may use, beyond what is used after ``prepare``.
    """

    def __init__(
        self,
        work: Work,
        prepare: Callable[[], None] = lambda: None,
        *,
        memory_bytes: int,
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                _serve(theirs, work, prepare, memory_bytes)
                code = 0
            except Exception:  # noqa: BLE001 - told where the process's own errors are told
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._control.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    async def run(self, job: bytes, cpu_seconds: int) -> None:
        """Have a job done; jobs run side by side.

        Args:
            job: the job.
            cpu_seconds: CPU time that the job may take, in whole seconds.

        Raises:
            RefusedError: the job is wrong.
            KilledError: the job exceeded its limits and was killed.
            OSError: the sandbox is gone, or the kernel gives it no process for the job.
        """
        near, far = socket.socketpair()
        with near:
            with far:
                socket.send_fds(self._control, [b"%d" % cpu_seconds], [far.fileno()])
            answer = await _exchange(near, job)
        if answer.startswith(_REFUSED):
            raise RefusedError(answer.removeprefix(_REFUSED).decode(errors="replace"))
        if answer == _NO_PROCESS:
            raise OSError("the sandbox gets no process for the job")
        if answer != _ACCEPTED:
            raise KilledError(f"it took more than {cpu_seconds} s, or too much memory")


class _Limits:
    """What a job may use."""

    def __init__(self, cpu_seconds: int, memory_bytes: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes

    def apply(self) -> None:
        """Apply the limits to this process. A job that only waits is killed in the end, too."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        memory = pages * resource.getpagesize() + self._memory_bytes
        for limit, value in (
            (resource.RLIMIT_CPU, self._cpu_seconds),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        signal.alarm(_PATIENCE * self._cpu_seconds)


async def _exchange(near: socket.socket, job: bytes) -> bytes:
    """Send a job, and return everything that the other side answers until it closes."""
    loop = asyncio.get_running_loop()
    near.setblocking(False)
    answer = b""
    with suppress(ConnectionError):
        await loop.sock_sendall(near, job)
        near.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):  # it was killed: the answer says so by its absence
        while chunk := await loop.sock_recv(near, _CHUNK):
            answer += chunk
    return answer


# --- in the sandbox ---


def _serve(
    control: socket.socket, work: Work, prepare: Callable[[], None], memory_bytes: int
) -> None:
    """Fork a process for every job, until the other side has closed the control connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process that made it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    prepared = False
    while True:
        cpu_seconds, connections, _, _ = socket.recv_fds(control, 16, 1)
        if not connections:
            return
        if not prepared:
            prepare()
            prepared = True
        with socket.socket(fileno=connections[0]) as connection:
            try:
                is_child = os.fork() == 0
            except OSError:  # as where a container may have no more processes
                connection.sendall(_NO_PROCESS)
                continue
            if is_child:
                control.close()
                limits = _Limits(int(cpu_seconds), memory_bytes)
                connection.sendall(_answer(connection, work, limits))
                os._exit(0)


def _answer(connection: socket.socket, work: Work, limits: _Limits) -> bytes:
    limits.apply()
    job = b""
    while chunk := connection.recv(_CHUNK):
        job += chunk
    try:
        work(job)
    except Exception as error:  # noqa: BLE001 - whatever it is, the job is refused for it
        return _REFUSED + one_line(error).encode()[:_MESSAGE_BYTES]
    return _ACCEPTED
