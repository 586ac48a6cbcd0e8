"""Servers of benchmarks whose processes begin with vLLM imported: each took 15 s of a core."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

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
