"""Metrics that several front ends add to: prometheus_client's multi-process mode."""

import os
from pathlib import Path

from prometheus_client import values


class _ProcessId:
    """An ``os.getpid`` that asks the kernel only once in each process.

    prometheus_client calls it for every change of a value, so a front end would make several system
    calls for each output token.
    """

    def __init__(self) -> None:
        self._ask()
        os.register_at_fork(after_in_child=self._ask)

    def _ask(self) -> None:
        self._pid = os.getpid()

    def __call__(self) -> int:
        return self._pid


def share_metrics(directory: Path) -> None:
    """From now on, keep the values of metrics in files that all front ends share.

    prometheus_client chooses the mode when it is imported, which in a forked process has already
    happened. No metric may exist yet.

    Args:
        directory: the directory of the files; made if it does not exist.

    Raises:
        OSError: the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(_ProcessId())  # type: ignore[no-untyped-call]
