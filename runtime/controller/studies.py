"""Work of the policy that takes long, beside the controller's own.

To judge the layouts of a node of eight engines takes about 10 ms, and 0.1 s with a look ahead, in
which the controller would send no request to a unit.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future

log = logging.getLogger("shoal.controller")


class Studies:
    """Does one study at a time (``Plan.study``), in another thread.

    Args:
        executor: has that thread; None: policies are to do without studies.
        failed: called for each study that has raised.
    """

    def __init__(self, executor: Executor | None, failed: Callable[[], None]) -> None:
        self._executor = executor
        self._failed = failed
        self._running: Future[object] | None = None
        self._findings: object = None

    @property
    def can_study(self) -> bool:
        """Whether there is a thread for studies."""
        return self._executor is not None

    @property
    def is_running(self) -> bool:
        """Whether a study goes on, or has findings that nobody has asked for."""
        return self._running is not None

    def begin(self, study: Callable[[], object]) -> None:
        """Do a study, in place of an earlier one, whose findings nobody needs any more."""
        assert self._executor is not None, "there is no thread for studies"
        self.forget()
        self._running = self._executor.submit(study)

    def findings(self) -> object:
        """Return what the latest study has found; None while it goes on, or if it has raised."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            if (error := running.exception()) is None:
                self._findings = running.result()
            else:
                log.error("a study of the policy failed", exc_info=error)
                self._failed()
        return self._findings

    def forget(self) -> None:
        """Drop the latest study: the policy that wanted it is another one."""
        if self._running is not None:
            self._running.cancel()
        self._running, self._findings = None, None
