"""The processes of a node under torment: what they are, and whether they end with it."""

import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from shoal.loadgen.bench.process_memory import name_and_mib

_NAME_LENGTH = 80


class Life(msgspec.Struct, frozen=True):
    """One process, which its id alone does not tell from a later one."""

    pid: int
    name: str
    started: int
    """Clock ticks since the machine's start."""

    is_dead: bool = False
    """Whether all of its threads have ended, though its parent does not know yet."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended. If its parent had ended before, init may take a second to know."""
        now = life_of(self.pid)
        return now is None or now.started != self.started or now.is_dead


def life_of(pid: int) -> Life | None:
    """Return what a process is; None if it has ended."""
    known = name_and_mib(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if known is None:
        return None
    # The first thread may have ended before others, which go on.
    is_dead = stat[0] in "ZX" and int(stat[17]) <= 1
    return Life(pid, f"{known[0]} ({' '.join(words)[:_NAME_LENGTH]})", int(stat[19]), is_dead)


def await_ends(lives: Collection[Life], seconds: float) -> tuple[set[str], set[str]]:
    """Wait until processes have ended.

    Args:
        lives: those.
        seconds: how long they may take.

    Returns:
        The names of those that had not when this was called, and of those that have not now.
    """
    deadline = time.monotonic() + seconds
    late = left = {life for life in lives if not life.is_over}
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = {life for life in left if not life.is_over}
    return {life.name for life in late}, {life.name for life in left}


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal, and return whether there still was somebody to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def lineage(pid: int) -> str:
    """Return the name of a process and that of its parent."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    names = [known[0] for known in map(name_and_mib, (parent, pid)) if known]
    return " > ".join(names)


def is_tracker(pid: int) -> bool:
    """Return whether ``multiprocessing`` has started a process, with the first restart."""
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
