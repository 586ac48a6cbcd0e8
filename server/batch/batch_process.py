"""The batch worker's process: one for the node, whatever the number of its front ends."""

import asyncio
import fcntl
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from shoal.server.batch.batch_options import DAY_SECONDS, BatchLimits
from shoal.server.batch.batch_store import BatchStore
from shoal.server.batch.batch_worker import BatchWorker, WorkerLimits
from shoal.server.batch.line_sender import LineSender, NoAnswerError
from shoal.server.batch.worker_door import OWNER_HEADER, RUNNING_PATH, door_path
from shoal.server.gate.priority_and_deadline import PRIORITY_HEADER, PRIORITY_LIMIT

log = logging.getLogger("shoal.batch")

_BASE_URL = "http://front-end"


@dataclass(frozen=True)
class BatchProcess:
    """What ``shoal.runtime.node.child_process.Child`` runs. Picklable.

    Attributes:
        directory: of the store.
        runtime_dir: the node's private directory.
        front_ends: how many there are.
        models: the names that the node serves.
        limits: what batches may have.
        line_bytes: bytes of the longest line of a batch.
        most_waiting: requests that may wait in the node's task pool.
    """

    directory: Path
    runtime_dir: str
    front_ends: int
    models: Sequence[str]
    limits: BatchLimits
    line_bytes: int
    most_waiting: int

    def __call__(self, ready: Callable[[], None]) -> None:
        """Work until SIGTERM."""
        ready()
        store = BatchStore(self.directory)
        with (self.directory / "worker.lock").open("wb") as lock:
            _take(lock.fileno(), self.directory)
            asyncio.run(self._work(store))

    async def _work(self, store: BatchStore) -> None:
        doors = [str(door_path(self.runtime_dir, index)) for index in range(self.front_ends)]
        # The least urgent priority that there is: people's requests come first.
        headers = {PRIORITY_HEADER: str(PRIORITY_LIMIT)}
        async with LineSender(_BASE_URL, doors, headers, OWNER_HEADER) as sender:

            async def running() -> int:
                answer = await sender.get(RUNNING_PATH)
                if answer.status != HTTPStatus.OK:
                    raise NoAnswerError(answer.body.decode(errors="replace"))
                return int(answer.body)

            limits = WorkerLimits(
                models=frozenset(self.models),
                most_lines=self.limits.lines,
                line_bytes=self.line_bytes,
                most_waiting=max(1, self.most_waiting // 4),
                keep_seconds=self.limits.keep_days * DAY_SECONDS,
            )
            await BatchWorker(store, sender.send, running, limits).work()


def _take(lock: int, directory: Path) -> None:
    """Wait until no other worker uses the store: two would answer its lines twice."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another node works off the batches in %s: waiting for its end", directory)
        fcntl.flock(lock, fcntl.LOCK_EX)
