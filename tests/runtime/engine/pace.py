"""Runners that do not run away from their test, however slow the test's process is.

A test asks for something while requests run, such as a switch. If its process got no time just
then, the requests would have ended first. So a runner that has run a few steps since the test's
last turn waits for the next one. It hardly ever has to: each step's outputs bring about a turn.
A test that waits for something else than some engines' steps lets them have no turns meanwhile.
"""

import mmap
import time
from collections.abc import Iterable
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
        _file(config).write_bytes(bytes(_BYTES * config.engines))
        self._counts = _mapped(config)
        self._count = 0

    def count(self, engines: Iterable[int]) -> None:
        """Count a turn, in which the runners of these engines may go on."""
        self._count += 1
        for engine in engines:
            self._counts[engine] = self._count


class Pace:
    """Keeps an engine's runner from going ahead of the test."""

    def __init__(self, config: NodeConfig, engine: int) -> None:
        self._counts = _mapped(config)
        self._engine = engine
        self._turn = -1
        self._steps = 0
        """Steps in this turn."""

    def keep(self) -> None:
        """Wait until the next step may begin."""
        while self._now == self._turn and self._steps >= STEPS:
            time.sleep(_POLL_SECONDS)
        if self._now != self._turn:
            self._turn, self._steps = self._now, 0
        self._steps += 1

    @property
    def _now(self) -> int:
        return self._counts[self._engine]


def _mapped(config: NodeConfig) -> "memoryview[int]":
    """Return the last turn of each engine."""
    with _file(config).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _BYTES * config.engines)).cast("Q")
