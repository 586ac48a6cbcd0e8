"""How many front ends a node has if ``--api-server-count`` does not say so."""

import os
from pathlib import Path

CORES_OF_TWO = 8
"""Cores for each engine from which on there are two front ends for it. These and its own two
processes keep four of them busy, and the controller needs a core, too."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of all cores that a container may use in a period, and that period (cgroup v2)."""


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return how many cores this process may use: of the machine, or less in a container."""
    cores = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if most == "max" else min(cores, int(most) // int(period))


def front_ends(engines: int, *, on_cpu: bool, cores: int | None = None) -> int:
    """Return the default number of front ends.

    A front end takes 0.1 to 0.15 ms of its core for each token that it streams. ``vllm serve`` has
    one for each engine of DP. On two H200s that was not enough: in bursts each used all of a core.

    Args:
        engines: engines of the node.
        on_cpu: whether they run on a CPU, and so need the cores themselves.
        cores: cores that the node may use; None: ``usable_cores``.
    """
    if on_cpu:
        return 1
    cores = usable_cores() if cores is None else cores
    return 2 * engines if cores >= CORES_OF_TWO * engines else engines
