"""A ``shoal serve`` in a process of its own, as a user starts it."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shoal.runtime.engine.agent import stepping, watchdog
from shoal.runtime.node import supervisor
from shoal.server.commands import cli
from tests import preloaded

ADDRESS = re.compile(r"on (http://[^\s\"]+)")
PATIENCE_SECONDS = 60.0
"""How long a process may take to end, or a step although many like it were short."""
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


def shoal(arguments: list[str]) -> int:
    """Be the ``shoal`` command in a process that has vLLM imported, and return its exit code."""
    sys.argv = ["shoal", *arguments]
    # vLLM sets its loggers up when it is imported.
    loggers = logging.getLogger("vllm")
    for filters in (loggers, *loggers.handlers):
        filters.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    # The processes of the node are forked from this one. None is late because the machine is slow.
    for module, name in (
        (supervisor, "_EXIT_SECONDS"),
        *((module, "SHORTEST_SECONDS") for module in (watchdog, stepping)),
    ):
        setattr(module, name, PATIENCE_SECONDS)
    return cli.main(arguments)


def run_shoal(
    arguments: list[str], variables: dict[str, str], main: Callable[[list[str]], int] = shoal
) -> preloaded.Process:
    """Start the ``shoal`` command with these environment variables, and with vLLM imported.

    Args:
        arguments: its arguments.
        variables: all of its environment.
        main: what is it: ``shoal``, or something of a test that changes things first.
    """
    return preloaded.Process(f"{main.__module__}:{main.__name__}", [arguments], variables)


def _run_fresh(arguments: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.server.commands.cli", *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told_of_work(line: str) -> bool:
    """Return whether a line says that waiting requests go to a unit that has become free.

    Whether any do depends on how fast the processes are.
    """
    return line.startswith("controller: ") and line.endswith(", which has room for them")


async def until(http: httpx.AsyncClient, happens: Callable[[Any], bool]) -> None:
    """Poll the node's view, which the test's time limit bounds."""
    while not happens((await http.get("/admin/layout")).json()):
        await asyncio.sleep(0.01)


@contextmanager
def served_node(cache: Path, *arguments: str, **options: Any) -> Iterator["ServedNode"]:
    """Run a server for as long as the block lasts, and kill it then if it has not ended."""
    node = ServedNode(cache, *arguments, **options)
    assert node.url, "\n".join(node.lines)
    with node.process:
        try:
            yield node
        finally:
            node.process.kill()


class ServedNode:
    """A running server, over fake engines unless told otherwise.

    Unless it is ``fresh``, as a user's is, its process begins with vLLM imported: what vLLM reads
    from the environment as it is imported is then what the tests have there.
    ``lines`` is what it has printed until it was ready: up to one with ``last_line``, which a node
    of one engine has to name, for it offers no switch. ``main``: see ``run_shoal``.
    """

    def __init__(
        self,
        cache: Path,
        *arguments: str,
        real: bool = False,
        fresh: bool = False,
        last_line: str = "switch:",
        main: Callable[[list[str]], int] = shoal,
        **environment: str,
    ) -> None:
        command = ["serve", "--port", "0", *([] if real else ["--fake-engine"]), *arguments]
        variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache)} | environment
        self.process = (
            _run_fresh(command, variables) if fresh else run_shoal(command, variables, main)
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
        output, _ = self.process.communicate(timeout=240)
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
