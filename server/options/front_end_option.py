"""How many front ends a node has if ``--api-server-count`` does not say so."""

import os

CORES_OF_TWO = 8
"""Cores for each engine from which on there are two front ends for it. These and its own two
processes keep four of them busy, and the controller needs a core, too."""


def front_ends(engines: int, *, on_cpu: bool, cores: int = len(os.sched_getaffinity(0))) -> int:
    """Return the default number of front ends.

    A front end takes 0.1 to 0.15 ms of its core for each token that it streams. ``vllm serve`` has
    one for each engine of DP. On two H200s that was not enough: in bursts each used all of a core.

    Args:
        engines: engines of the node.
        on_cpu: whether they run on a CPU, and so need the cores themselves.
        cores: cores that the node may use.
    """
    if on_cpu:
        return 1
    return 2 * engines if cores >= CORES_OF_TWO * engines else engines
