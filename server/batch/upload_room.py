"""Room for files while they are uploaded, so that uploads at the same time cannot share one place.

An upload's room is kept in the store, which all front ends use. The lock on its content says that
it goes on: the kernel takes the lock back when its front end dies, however that happens.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from shoal.server.batch.batch_store import BatchStore, NoRoomError

FORM_BYTES = 32 << 10
"""What a form may have beside its file, at most: its fields and their heads."""
STEPS = (64 << 20, 1 << 20, 64 << 10, 0)
"""How much more than an upload has got is kept for it, where its length is not known: the first of
these for which there is room."""


class UploadRoom:
    """The place of one upload, for as long as a context lasts. What is then still there is removed.

    Args:
        store: where its room is kept.
        file_id: the file.
        owner: whose it is.
        most_bytes: what the owner's files may have together.
        declared: bytes of the whole form, as its head says; None: it says nothing.

    Attributes:
        file: where its content goes.

    Raises:
        NoRoomError: on entry and in ``cover``: the owner's files would have more.
        OSError: on entry and in ``cover``: the disk has no room, or cannot be written.
    """

    file: IO[bytes]

    def __init__(
        self, store: BatchStore, file_id: str, owner: str, most_bytes: int, declared: int | None
    ) -> None:
        self._store = store
        self._file_id = file_id
        self._owner = owner
        self._most_bytes = most_bytes
        self._declared = declared
        self._kept = 0

    async def __aenter__(self) -> Self:
        """Keep room for what was declared."""
        self.file = await asyncio.to_thread(_locked, self._store.incoming(self._file_id))
        try:
            await self.cover((self._declared or 0) - FORM_BYTES)
        except BaseException:
            await asyncio.to_thread(self._end)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give back the room that the store has not taken for the file."""
        await asyncio.to_thread(self._end)

    async def cover(self, size: int) -> None:
        """Keep room for at least so many bytes of the file."""
        if size > self._kept:
            await asyncio.to_thread(self._keep, size)

    def _keep(self, size: int) -> None:
        for step in STEPS:
            wanted = size + step if self._declared is None else min(size + step, self._declared)
            try:
                self._store.reserve(self._file_id, self._owner, max(size, wanted), self._most_bytes)
            except (NoRoomError, OSError) as error:
                is_full = isinstance(error, NoRoomError) or error.errno == errno.ENOSPC
                if step and is_full:
                    continue
                raise
            self._kept = max(size, wanted)
            return

    def _end(self) -> None:
        # Whatever cannot be removed now is found to be dead later, as its lock is gone.
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self._store.release(self._file_id)


def _locked(path: Path) -> IO[bytes]:
    """Return a new file that nobody else can lock."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fdopen(descriptor, "wb")
