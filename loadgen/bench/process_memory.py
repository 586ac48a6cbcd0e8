"""Resident memory of a process tree over time, from ``/proc``."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

MIB = 1 << 20
PARTS = 6
"""Parts of a curve whose slopes are compared."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Growth(msgspec.Struct, frozen=True):
    """The memory of one process."""

    process: str
    """Its name, as ``ps -o comm`` shows it."""
    peak_mib: float
    first_mib: float
    last_mib: float
    slope_mib_per_minute: float
    """``slope`` of the second half of the samples."""
    pid: int


class MemoryLog:
    """Samples of every process of a tree.

    Args:
        root: process id of the tree's root.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._samples: dict[int, list[tuple[float, float]]] = {}
        """By process id: seconds and resident MiB."""
        self._names: dict[int, str] = {}

    def sample(self, at: float) -> None:
        """Note the memory of every process now."""
        for pid in tree(self._root):
            found = name_and_mib(pid)
            if found is not None:
                self._names[pid], mib = found
                self._samples.setdefault(pid, []).append((at, mib))

    def growth(self) -> list[Growth]:
        """Return how much memory each process had, parents first."""
        found = []
        for pid, samples in self._samples.items():
            values = [mib for _, mib in samples]
            growth = 60 * slope(samples[len(samples) // 2 :])
            name = self._names[pid]
            found.append(Growth(name, max(values), values[0], values[-1], growth, pid))
        return found


def tree(root: int) -> Iterator[int]:
    """Yield a process and all its descendants, parents first."""
    yield root
    try:
        threads = list(Path(f"/proc/{root}/task").iterdir())
        children = [int(pid) for t in threads for pid in (t / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return  # it has just ended
    for child in sorted(children):
        yield from tree(child)


def name_and_mib(pid: int) -> tuple[str, float] | None:
    """Return a process's name and resident memory, shared pages included; None if it has ended."""
    directory = Path(f"/proc/{pid}")
    try:
        name = (directory / "comm").read_text().strip()
        pages = int((directory / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return name, pages * _PAGE_BYTES / MIB


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median of the slopes of ``PARTS`` successive parts of a curve; 0 if it has none.

    So a step is no slope, and what goes on is. A process's memory makes a step when a request is
    larger, or more requests run at once, than ever before: its allocator keeps some of it.
    """
    ends = [points[part * (len(points) - 1) // PARTS] for part in range(PARTS + 1) if points]
    pairs = [(one, other) for one, other in pairwise(ends) if other[0] > one[0]]
    slopes = [(other[1] - one[1]) / (other[0] - one[0]) for one, other in pairs]
    return median(slopes) if slopes else 0.0
