"""API keys: who holds them, what their holders may ask for, and the file they come from."""

import hashlib
import logging
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.runtime.clock import Clock, monotonic
from shoal.server.errors import UserError, one_line

log = logging.getLogger("shoal.keys")

CHECK_SECONDS = 1.0
"""How long a change of the file may go unseen."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class ApiKey(msgspec.Struct, frozen=True):
    """One key, without its text: of ``--api-key`` (no limits), or of a file."""

    digest: bytes
    """SHA-256 of its text."""
    name: str | None = None
    """What the holder is called in messages and counts."""
    min_priority: int | None = None
    """The most urgent priority that its requests get; None: any."""
    max_waiting: int | None = None
    """Requests of it that may wait in the task pool; None, as below: any number."""
    max_concurrent: int | None = None
    """HTTP requests of it that may be in progress."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and of answers."""

    @property
    def tenant(self) -> str:
        """What tells its holder from others: the name, or else the digest."""
        return self.digest.hex() if self.name is None else self.name


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object of a file of keys: ``key`` or its ``sha256`` in hexadecimal, and ``ApiKey``'s."""

    name: str
    key: str | None = None
    sha256: str | None = None
    min_priority: int | None = None
    max_waiting: int | None = None
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


_LIMITS = ("max_waiting", "max_concurrent", "requests_per_minute", "tokens_per_minute")
_SHARED_FIELDS = ("name", "min_priority", *_LIMITS)


def plain_key(text: str) -> ApiKey:
    """Return the key with this text, without a name or limits."""
    return ApiKey(digest_of(text))


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a key's text."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of API keys: a JSON list of objects with the fields of ``KeyEntry``.

    Raises:
        UserError: there is no such file, or it is not valid; one line.
    """
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[KeyEntry])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    problem = _problem(entries)
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    keys = tuple(_key_of(entry) for entry in entries)
    if any(len(key.digest) != _DIGEST_BYTES for key in keys):
        raise UserError(f"{path}: sha256 must be {2 * _DIGEST_BYTES} hexadecimal digits")
    return keys


def _problem(entries: Sequence[KeyEntry]) -> str | None:
    if not entries:
        return "it holds no key"
    names = {entry.name for entry in entries}
    if "" in names or len(names) < len(entries):
        return "every key needs a name of its own"
    for entry in entries:
        if (entry.key is None) == (entry.sha256 is None):
            return f"{entry.name}: it takes either key or sha256"
        if entry.key == "":
            return f"{entry.name}: the key is empty"
        for limit in _LIMITS:
            value = getattr(entry, limit)
            if value is not None and value < 1:
                return f"{entry.name}: {limit} must be at least 1"
    return None


def _key_of(entry: KeyEntry) -> ApiKey:
    if entry.key is not None:
        digest = digest_of(entry.key)
    else:
        try:
            digest = bytes.fromhex(entry.sha256 or "")
        except ValueError:
            digest = b""  # the caller says what is wrong
    return ApiKey(digest, **{name: getattr(entry, name) for name in _SHARED_FIELDS})


class KeyRing:
    """The valid keys: fixed ones, and those of a file that is read again when it changes.

    A file that has become unreadable or wrong changes nothing but for a line in the log: the keys
    that it held stay valid until it is right again. The file is looked at when a key is asked for,
    so a ring that no one uses costs nothing.

    Args:
        fixed: keys that stay.
        file: where the others are.
        clock: monotonic seconds.

    Raises:
        UserError: the file is wrong at the start.
    """

    def __init__(
        self, fixed: Sequence[ApiKey], file: Path | None = None, clock: Clock = monotonic
    ) -> None:
        self._fixed = tuple(fixed)
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._seen = self._signature()
        self._keys = self._fixed if file is None else (*self._fixed, *_read(file))

    def find(self, offered: str) -> ApiKey | None:
        """Return the key that ``offered`` is, if any.

        Digests have one length, and every key is compared: the time tells nothing about a key.
        """
        self._refresh()
        digest = digest_of(offered)
        matches = [key for key in self._keys if secrets.compare_digest(digest, key.digest)]
        return matches[0] if matches else None

    def _refresh(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked < CHECK_SECONDS:
            return
        self._looked = now
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = (*self._fixed, *_read(self._file))
        except UserError as error:
            log.warning("the API keys stay as they were: %s", error)
        else:
            log.info("read the API keys of %s again", self._file)

    def _signature(self) -> tuple[int, ...] | None:
        """Return what changes when the file is written or replaced; None if it is not there."""
        if self._file is None:
            return None
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: Path) -> tuple[ApiKey, ...]:
    keys = read_api_keys(path)
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("%s holds API keys and can be read by every user: chmod o-r it", path)
    return keys
