"""A ``shoal serve`` in a process of its own, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

ADDRESS = re.compile(r"on (http://[^\s\"]+)")
ADMIN_ADDRESS = re.compile(r"admin API on (http://[^\s\"]+)")


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children, in the order of their starts."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def key_file(path: Path, *keys: str | dict[str, Any]) -> Path:
    """Write a file of API keys, given by their text (which is their name, too) or whole."""
    entries = [{"key": key, "name": key} if isinstance(key, str) else key for key in keys]
    path.write_text(json.dumps(entries))
    path.chmod(0o600)
    return path


class ServedNode:
    """A running server, over fake engines unless told otherwise.

    ``lines`` is what it has printed until it was ready: up to one with ``last_line``, which a node
    of one engine has to name, for it offers no switch.
    """

    def __init__(
        self,
        cache: Path,
        *arguments: str,
        real: bool = False,
        last_line: str = "switch:",
        **environment: str,
    ) -> None:
        command = [sys.executable, "-m", "server.cli", "serve", "--port", "0"]
        if not real:
            command.append("--fake-engine")
        self.process = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.temporary = cache
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if last_line in line:
                break
        found = ADDRESS.search("\n".join(self.lines))
        self.url = found.group(1) if found else ""
        found = ADMIN_ADDRESS.search("\n".join(self.lines))
        self.admin_url = found.group(1) if found else ""
        # Its temporary files are in the cache directory, so this one is its own.
        self.runtime_dir = next(cache.glob("shoal-*"), Path("none"))
        self.children = children_of(self.process.pid) if self.url else []

    def client(self, **options: Any) -> httpx.Client:
        """Return a client of both APIs: paths under ``/admin`` go to the admin API's port."""
        hooks = {"request": [self._redirect]}
        return httpx.Client(base_url=self.url, event_hooks=hooks, **{"timeout": 120, **options})

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        """Return the asynchronous kind of ``client``."""

        async def redirect(request: httpx.Request) -> None:
            self._redirect(request)

        hooks = {"request": [redirect]}
        return httpx.AsyncClient(
            base_url=self.url, event_hooks=hooks, **{"timeout": 120, **options}
        )

    def _redirect(self, request: httpx.Request) -> None:
        if request.url.path.startswith("/admin/"):
            request.url = httpx.URL(self.admin_url).join(request.url.raw_path.decode())

    def kill(self, part: str) -> None:
        """Kill the child process that is this part of the node, known by the order of starts."""
        order = ["engine 0", "engine 1", "controller", "front end 0", "front end 1"]
        os.kill(self.children[order.index(part)], signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGINT) -> list[str]:
        """Send a signal to the process group's leader, and return what it still printed."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> list[str]:
        """Wait for the end, and return what was printed since the server was ready."""
        output, _ = self.process.communicate(timeout=60)
        return list(output.splitlines())

    def leftovers(self) -> list[str]:
        """Return processes, runtime directories and shared memory that outlived the server."""
        alive = [f"pid {child}" for child in self.children if Path(f"/proc/{child}").exists()]
        files = [
            path.name
            for path in self.temporary.iterdir()
            if path.name.startswith("shoal-") or path.is_socket()
        ]
        segments = [path.name for path in Path("/dev/shm").glob(f"*{self.runtime_dir.name}*")]
        return alive + files + segments
