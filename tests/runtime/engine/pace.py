"""Runners that do not run away from their test, however slow the test's process is.

A test asks for something while requests run, such as a switch. If its process got no time just
then, the requests would have ended first. So a runner that has run a few steps since the test's
last turn waits for the next one. It hardly ever has to: each step's outputs bring about a turn.
"""

import mmap
import time
from pathlib import Path

from shoal.runtime.config import NodeConfig

STEPS = 4
"""Steps of an engine, or of a group, in one turn of the test."""
_BYTES = 8
_POLL_SECONDS = 0.001


def _file(config: NodeConfig) -> Path:
    return Path(config.runtime_dir) / "turns"


class Turns:
    """The turns of a node's test, which its runners see.

    Args:
        config: of the node, whose directory exists.
    """

    def __init__(self, config: NodeConfig) -> None:
        _file(config).write_bytes(bytes(_BYTES))
        self._memory = _mapped(config)
        self._count = 0

    def count(self) -> None:
        """Count a turn."""
        self._count += 1
        self._memory[:] = self._count.to_bytes(_BYTES, "little")


class Pace:
    """Keeps a runner from going ahead of the test."""

    def __init__(self, config: NodeConfig) -> None:
        self._memory = _mapped(config)
        self._turn = b""
        self._steps = 0
        """Steps in this turn."""

    def keep(self) -> None:
        """Wait until the next step may begin."""
        while self._memory[:] == self._turn and self._steps >= STEPS:
            time.sleep(_POLL_SECONDS)
        if self._memory[:] != self._turn:
            self._turn, self._steps = self._memory[:], 0
        self._steps += 1


def _mapped(config: NodeConfig) -> mmap.mmap:
    with _file(config).open("r+b") as file:
        return mmap.mmap(file.fileno(), _BYTES)
