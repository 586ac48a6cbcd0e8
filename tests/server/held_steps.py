"""A ``shoal`` whose fake engines end no step while a test holds them, however long that takes.

A test asks for something while a request runs. If the test's process got no time just then, the
request would have ended first. A hold of more than a minute counts as a hung engine.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.runtime.clock import monotonic
from tests.server.node import shoal

VARIABLE = "SHOAL_TEST_HELD_STEPS"
"""Names the file that holds the steps for as long as it exists."""


class _HeldClock:
    """Seconds that do not pass while a file exists."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lost = 0.0
        self._last = monotonic()

    def __call__(self) -> float:
        now = monotonic() - self._lost
        if self._file.exists():
            self._lost += now - self._last
        else:
            self._last = now
        return self._last


def holdable_shoal(arguments: list[str]) -> int:
    """Be the ``shoal`` command."""
    from shoal.runtime.engine.fake.fake_backend import FakeBackend  # before engines are forked

    defaults = FakeBackend.__init__.__kwdefaults__
    assert defaults is not None
    defaults["clock"] = _HeldClock(Path(os.environ[VARIABLE]))
    return shoal(arguments)


@contextmanager
def held_steps(file: Path) -> Iterator[None]:
    """Let no step end within the block: a request that has not ended by then does not."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()
