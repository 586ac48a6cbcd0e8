"""Resident memory of a process tree over time, from ``/proc``."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

MIB = 1 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Growth(msgspec.Struct, frozen=True):
    """The memory of one process."""

    process: str
    """Its name, as ``ps -o comm`` shows it."""
    peak_mib: float
    first_mib: float
    last_mib: float
    slope_mib_per_minute: float
    """Slope of the least-squares line through the second half of the samples."""
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


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through points; 0 if there is no such line."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / max(1, count)
    mean_y = sum(y for _, y in points) / max(1, count)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
