"""The store of files and batches: one directory with a SQLite database and the files' contents.

Several processes use it at once: front ends, and the worker. Every change is one short transaction
(SQLite in WAL mode, synchronised to the disk), so a process may be killed at any moment.
"""

import errno
import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shoal.server.batch.batch_objects import UNFINISHED, Batch, StoredFile

_BUSY_SECONDS = 30.0
"""How long a transaction waits for another one."""
_STALE_SECONDS = 3600.0
"""An upload that has got nothing for so long has ended: its client would have been cut off."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
  purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
  status TEXT NOT NULL, input TEXT NOT NULL, ended_at INTEGER, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_in ON batches (status, number);
CREATE TABLE IF NOT EXISTS uploads (
  id TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL, bytes INTEGER NOT NULL);
"""
_FILES, _INCOMING = "files", "incoming"
_IS_UNFINISHED = f"status IN ({', '.join(repr(status.value) for status in UNFINISHED)})"

_encode = msgspec.json.encode
_file = msgspec.json.Decoder(StoredFile)
_batch = msgspec.json.Decoder(Batch)


class NoRoomError(Exception):
    """An owner has as much as may be kept; the message says what."""


class InUseError(Exception):
    """A file cannot be deleted, because a batch reads or writes it."""


class BatchStore:
    """The store in one directory, which is made if it is not there. Safe to use from threads.

    Args:
        directory: private to the server's user.

    Raises:
        OSError: the directory cannot be made or written.
        sqlite3.Error: the database cannot be used.

    Whatever changes something raises ``OSError`` if that cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in (_FILES, _INCOMING):
            (directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._local = threading.local()
        self._db.executescript(_SCHEMA)

    @property
    def _db(self) -> sqlite3.Connection:
        """This thread's connection."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            path = self._directory / "batches.sqlite3"
            path.touch(mode=0o600)
            db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            self._local.db = db
        return db

    def close(self) -> None:
        """Close this thread's connection."""
        self._db.close()
        del self._local.db

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Do what follows in one transaction.

        Raises:
            OSError: it cannot be written, as with any other file.
        """
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:  # after some errors SQLite has undone all itself
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
                raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error)) from error
            raise

    @property
    def version(self) -> int:
        """A number that changes when another process or thread has changed something."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # --- contents -----------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Return where the content of a file lies."""
        return self._directory / _FILES / file_id

    def incoming(self, file_id: str) -> Path:
        """Return where the content of a file lies while it is uploaded."""
        return self._directory / _INCOMING / file_id

    # --- uploads ------------------------------------------------------------------------------

    def reserve(self, file_id: str, owner: str, size: int, most_bytes: int) -> None:
        """Keep room for a file that is being uploaded, in place of what was kept for it before.

        Args:
            file_id: the file; its content under ``incoming`` is locked by whoever writes it.
            owner: whose it is.
            size: the bytes that it may get.
            most_bytes: what the owner's files may have together.

        Raises:
            NoRoomError: they would have more.
        """
        with self._changing() as db:
            db.execute("DELETE FROM uploads WHERE id = ?", (file_id,))
            if self._bytes_of(owner) + size > most_bytes:
                self._forget_dead_uploads()
                if self._bytes_of(owner) + size > most_bytes:
                    raise NoRoomError(_too_many(most_bytes))
            values = (file_id, owner, size)
            db.execute("INSERT INTO uploads (id, owner, bytes) VALUES (?, ?, ?)", values)
            self._check_disk()

    def _check_disk(self) -> None:
        """Raise ``OSError`` if the disk has no room for all that is being uploaded."""
        free = shutil.disk_usage(self._directory).free
        kept = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM uploads").fetchone()[0]
        if free >= kept:
            return
        self._forget_dead_uploads()
        rows = self._db.execute("SELECT id, bytes FROM uploads").fetchall()
        missing = sum(max(0, size - _size_of(self.incoming(name))) for name, size in rows)
        if free < missing:
            raise OSError(errno.ENOSPC, "the disk has no room for the files that are uploaded")

    def _forget_dead_uploads(self) -> None:
        """Remove the uploads whose front ends have died."""
        for (name,) in self._db.execute("SELECT id FROM uploads").fetchall():
            if not _is_locked(self.incoming(name)):
                self._db.execute("DELETE FROM uploads WHERE id = ?", (name,))
                self.incoming(name).unlink(missing_ok=True)

    def release(self, file_id: str) -> None:
        """Forget an upload, and remove what it has left under ``incoming``."""
        self.incoming(file_id).unlink(missing_ok=True)
        with self._changing() as db:
            db.execute("DELETE FROM uploads WHERE id = ?", (file_id,))

    # --- files --------------------------------------------------------------------------------

    def take_in(self, file: StoredFile, most_bytes: int) -> None:
        """Add a file whose content has arrived under ``incoming``.

        Args:
            file: the file.
            most_bytes: what the owner's files may have together.

        Raises:
            NoRoomError: they would have more.
        """
        with self._changing() as db:
            db.execute("DELETE FROM uploads WHERE id = ?", (file.id,))
            if self._bytes_of(file.owner) + file.bytes > most_bytes:
                raise NoRoomError(_too_many(most_bytes))
            self.incoming(file.id).rename(self.path(file.id))
            sync_directory(self.path(file.id).parent)
            _insert_file(db, file)

    def _bytes_of(self, owner: str) -> int:
        """Return the bytes of an owner's files, and of those that are being uploaded."""
        sql = "SELECT coalesce(sum(bytes), 0) FROM {} WHERE owner = ?"
        tables = (sql.format(table) for table in ("files", "uploads"))
        return sum(int(self._db.execute(each, (owner,)).fetchone()[0]) for each in tables)

    def file(self, owner: str, file_id: str, now: float) -> StoredFile | None:
        """Return an owner's file; None if there is none, or if it has expired."""
        sql = "SELECT record FROM files WHERE id = ? AND owner = ?"
        row = self._db.execute(sql, (file_id, owner)).fetchone()
        file = None if row is None else _file.decode(row[0])
        return None if file is None or _has_expired(file, now) else file

    def files(
        self,
        owner: str,
        now: float,
        *,
        limit: int,
        after: str | None = None,
        purpose: str | None = None,
        ascending: bool = False,
    ) -> list[StoredFile]:
        """Return an owner's files in the order of creation, from the one behind ``after`` on.

        Raises:
            KeyError: the owner has no file ``after``.
        """
        sql = "SELECT record FROM files WHERE owner = ? AND coalesce(expires_at, ?) >= ?"
        values: list[str | float] = [owner, now, now]
        if purpose is not None:
            sql, values = f"{sql} AND purpose = ?", [*values, purpose]
        rows = self._page("files", sql, values, owner, after, limit, ascending=ascending)
        return [_file.decode(row) for row in rows]

    def _page(
        self,
        table: str,
        sql: str,
        values: Sequence[str | float],
        owner: str,
        after: str | None,
        limit: int,
        *,
        ascending: bool = False,
    ) -> list[bytes]:
        order, beyond = ("ASC", ">") if ascending else ("DESC", "<")
        if after is not None:
            found = self._db.execute(
                f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, owner)
            ).fetchone()
            if found is None:
                raise KeyError(after)
            sql, values = f"{sql} AND number {beyond} ?", [*values, found[0]]
        rows = self._db.execute(f"{sql} ORDER BY number {order} LIMIT ?", [*values, limit])
        return [row[0] for row in rows]

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file, and return whether the owner had it.

        Raises:
            InUseError: a batch that is not finished reads it.
        """
        with self._changing() as db:
            sql = "DELETE FROM files WHERE id = ? AND owner = ?"
            if not db.execute(sql, (file_id, owner)).rowcount:
                return False
            sql = f"SELECT id FROM batches WHERE input = ? AND {_IS_UNFINISHED}"
            user = db.execute(sql, (file_id,)).fetchone()
            if user is not None:
                raise InUseError(f"{user[0]} reads this file: cancel it, or wait for its end")
        self.path(file_id).unlink(missing_ok=True)
        return True

    # --- batches ------------------------------------------------------------------------------

    def add_batch(self, batch: Batch, most: int) -> None:
        """Add a batch.

        Args:
            batch: the batch.
            most: how many unfinished batches its owner may have.

        Raises:
            NoRoomError: the owner has as many.
            KeyError: its input file is gone.
        """
        with self._changing() as db:
            sql = f"SELECT count(*) FROM batches WHERE owner = ? AND {_IS_UNFINISHED}"
            if db.execute(sql, (batch.owner,)).fetchone()[0] >= most:
                raise NoRoomError(f"you may have {most} unfinished batches, and have as many")
            sql = "SELECT 1 FROM files WHERE id = ? AND owner = ?"
            if db.execute(sql, (batch.input_file_id, batch.owner)).fetchone() is None:
                raise KeyError(batch.input_file_id)
            sql = "INSERT INTO batches (id, owner, status, input, record) VALUES (?, ?, ?, ?, ?)"
            values = (batch.id, batch.owner, batch.status, batch.input_file_id, _encode(batch))
            db.execute(sql, values)

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """Return an owner's batch; None if there is none."""
        sql = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        row = self._db.execute(sql, (batch_id, owner)).fetchone()
        return None if row is None else _batch.decode(row[0])

    def batches(self, owner: str, *, limit: int, after: str | None = None) -> list[Batch]:
        """Return an owner's batches, the latest first, from the one behind ``after`` on.

        Raises:
            KeyError: the owner has no batch ``after``.
        """
        sql = "SELECT record FROM batches WHERE owner = ?"
        return [
            _batch.decode(row) for row in self._page("batches", sql, [owner], owner, after, limit)
        ]

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all owners, the oldest first."""
        sql = f"SELECT record FROM batches WHERE {_IS_UNFINISHED} ORDER BY number"
        return [_batch.decode(row[0]) for row in self._db.execute(sql)]

    def change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """Change a batch in one transaction, and return it.

        Args:
            batch_id: the batch.
            change: returns the new batch; a batch that is unchanged is not written.

        Raises:
            KeyError: there is no such batch.
        """
        with self._changing() as db:
            return _change(db, batch_id, change)

    def finish(
        self, batch_id: str, change: Callable[[Batch], Batch], files: Sequence[StoredFile]
    ) -> Batch:
        """Make a batch's output files exist, and change it, in one transaction."""
        with self._changing() as db:
            for file in files:
                _insert_file(db, file)
            return _change(db, batch_id, change)

    # --- retention ----------------------------------------------------------------------------

    def sweep(self, now: float, keep_seconds: float) -> int:
        """Delete files that have expired, and batches that ended long ago; return how many.

        A file that an unfinished batch reads is kept until the batch has ended.
        """
        with self._changing() as db:
            sql = (
                "SELECT id FROM files WHERE expires_at < ? AND id NOT IN "
                f"(SELECT input FROM batches WHERE {_IS_UNFINISHED})"
            )
            expired = [row[0] for row in db.execute(sql, (now,))]
            db.executemany("DELETE FROM files WHERE id = ?", [(name,) for name in expired])
            sql = "DELETE FROM batches WHERE ended_at < ?"
            old = db.execute(sql, (now - keep_seconds,)).rowcount
        for name in expired:
            self.path(name).unlink(missing_ok=True)
        return len(expired) + old

    def remove_strays(self, now: float) -> None:
        """Remove contents that belong to nothing, as killed processes have left them."""
        for path in (self._directory / _INCOMING).iterdir():
            with suppress(FileNotFoundError):  # its upload has just ended
                if path.stat().st_mtime < now - _STALE_SECONDS:
                    path.unlink()
        with self._changing() as db:
            self._forget_dead_uploads()
            known = {row[0] for row in db.execute("SELECT id FROM files")}
            batches = self.unfinished()
            known |= {name for batch in batches for name in (batch.answers_id, batch.failures_id)}
            for path in (self._directory / _FILES).iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Have the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _too_many(most_bytes: int) -> str:
    return f"your files would have more than {most_bytes} bytes together"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_locked(path: Path) -> bool:
    """Return whether a living process has a lock on a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _has_expired(file: StoredFile, now: float) -> bool:
    return file.expires_at is not None and file.expires_at < now


def _insert_file(db: sqlite3.Connection, file: StoredFile) -> None:
    db.execute(
        "INSERT INTO files (id, owner, purpose, bytes, expires_at, record) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, file.owner, file.purpose, file.bytes, file.expires_at, _encode(file)),
    )


def _change(db: sqlite3.Connection, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
    row = db.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise KeyError(batch_id)
    before = _batch.decode(row[0])
    after = change(before)
    if after != before:
        ends = (after.completed_at, after.failed_at, after.expired_at, after.cancelled_at)
        ended = next((at for at in ends if at is not None), None)
        sql = "UPDATE batches SET status = ?, ended_at = ?, record = ? WHERE id = ?"
        db.execute(sql, (after.status, ended, _encode(after), batch_id))
    return after
