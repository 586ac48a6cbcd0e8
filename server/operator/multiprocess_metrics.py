"""Metrics that several front ends add to: prometheus_client's multi-process mode."""

import os
from pathlib import Path

from prometheus_client import values


class _ProcessId:
    """``os.getpid`` that asks the kernel once in every process.

    prometheus_client asks for it with every number that it adds, so a front end would make several
    system calls for each output token.
    """

    def __init__(self) -> None:
        self._ask()
        os.register_at_fork(after_in_child=self._ask)

    def _ask(self) -> None:
        self._pid = os.getpid()

    def __call__(self) -> int:
        return self._pid


def share_metrics(directory: Path) -> None:
    """Keep the values of metrics in files that all front ends share, from now on.

    prometheus_client chooses at import, which a forked process has behind it; no metric may exist
    yet.

    Args:
        directory: where the files are; made if it is not there.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(_ProcessId())  # type: ignore[no-untyped-call]
