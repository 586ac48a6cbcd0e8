"""Runs a server in a process group of its own, and ends all processes of that group."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.loadgen.bench.token_client import Client

EXIT_SECONDS = 20.0
"""How long a server may take to end in order, and then the rest of its group to vanish."""
_POLL_SECONDS = 0.05


class ServerFailedError(RuntimeError):
    """A server ended, or never took requests; the message is one line."""


def free_port() -> int:
    """Return a TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A running server.

    Args:
        command: what to run.
        log: the file to which its output is appended.
        environment: its environment.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self.started = time.monotonic()
        with log.open("ab") as output:
            # Not a new session, so that ending the benchmark's session ends the server too.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id of the server's main process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Everything that this process has printed so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").replace("\r", "\n")

    async def wait_until_ready(self, client: Client, path: str) -> float:
        """Wait until ``path`` answers with 200, and return the seconds that the start took.

        Raises:
            ServerFailedError: the process has ended.
        """
        while not await client.is_up(path):
            self.check_alive()
            await asyncio.sleep(_POLL_SECONDS)
        return time.monotonic() - self.started

    def check_alive(self) -> None:
        """Raise ``ServerFailedError`` if the server's main process has ended."""
        if (code := self._process.poll()) is not None:
            lines = [line.strip() for line in self.output.splitlines() if line.strip()]
            last = lines[-1][:300] if lines else "it printed nothing"
            raise ServerFailedError(f"the server ended with {code}, see {self.log}: {last}")

    def stop(self) -> None:
        """End the server, in order if it does so in time, and every process of its group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + EXIT_SECONDS
        while self._signal_group(0) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _signal_group(self, number: int) -> bool:
        """Send a signal to the rest of the group, and return whether any process is left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True
