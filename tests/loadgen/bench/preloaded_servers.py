"""What benchmarks start, in processes that begin with vLLM imported: each took 15 s of a core."""

import asyncio
import logging
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shoal.loadgen.bench import vllm_client
from shoal.server.commands import cli
from tests import preloaded

MODULE = "shoal.server.commands.cli"


class Started(preloaded.Process):
    """Stands in for ``subprocess.Popen`` where ``ServerProcess`` starts a command of Shoal's.

    Args:
        command: Python, ``-m``, the module of the command line, and its arguments.
        stdout: the file that takes its output and errors.
        env: its environment.
        options: those that ``ServerProcess`` gives each time.
    """

    def __init__(
        self, command: Sequence[str], stdout: IO[bytes], env: Mapping[str, str], **options: Any
    ) -> None:
        assert options == {
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
            "process_group": 0,
        }
        assert command[2] == MODULE, command
        super().__init__(f"{__name__}:serve", [list(command[3:]), stdout.name], env)
        self.stdout.close()


def serve(arguments: list[str], log: str) -> int:
    """Be the command, in a process group of its own, with its output in a file."""
    os.setpgid(0, 0)
    sys.argv = ["shoal", *arguments]
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    # vLLM sets its loggers up when it is imported.
    loggers = logging.getLogger("vllm")
    for filters in (loggers, *loggers.handlers):
        filters.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    return cli.main(arguments)


class StartedClient:
    """Stands in for what asyncio starts where ``VllmClient`` starts its child.

    Args:
        process: the child.
        stdin: what the child reads.
        stdout: what it answers.
    """

    def __init__(
        self,
        process: preloaded.Process,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
    ) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        self.stdin.close()
        return await asyncio.to_thread(self._process.wait)


async def start_client(
    *command: str, stdin: int, stdout: int, stderr: IO[bytes], limit: int
) -> StartedClient:
    """Stand in for ``asyncio.create_subprocess_exec`` where ``VllmClient`` starts its child."""
    assert command == (sys.executable, "-m", vllm_client.__name__)
    assert stdin == stdout == asyncio.subprocess.PIPE
    ends = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "client"
        server = await asyncio.start_unix_server(
            lambda *pair: ends.set_result(pair), path, limit=limit
        )
        words = [str(path), str(stderr.name)]
        process = preloaded.Process(f"{__name__}:be_client", words, os.environ)
        process.stdout.close()
        reader, writer = await ends
        server.close()
    return StartedClient(process, writer, reader)


def be_client(path: str, log: str) -> int:
    """Be the child of ``VllmClient``, which is at the other end of a socket."""
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        for stream in (0, 1):
            os.dup2(end.fileno(), stream)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    runpy.run_module(vllm_client.__name__, run_name="__main__")
    return 0
