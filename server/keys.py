"""API keys, and what their holders may ask of the task pool."""

import argparse
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from server.errors import one_line


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key of ``--api-key`` (no limits) or of the file of ``--api-key-file``."""

    key: str
    name: str | None = None
    """What the holder is called in messages and counts."""
    min_priority: int | None = None
    """The most urgent priority that its requests get; None: any."""
    max_waiting: int | None = None
    """Requests of it that may wait in the task pool; None: any number."""


def read_api_keys(path: str) -> tuple[ApiKey, ...]:
    """Read a file of API keys: a JSON list of objects with the fields of ``ApiKey``.

    Raises:
        argparse.ArgumentTypeError: there is no such file, or it is not valid; one line.
    """
    try:
        keys = msgspec.json.decode(Path(path).read_bytes(), type=list[ApiKey])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {one_line(error)}") from None
    names = [key.name for key in keys]
    problem = None
    if not keys or not all(key.key for key in keys):
        problem = "a key is empty" if keys else "it holds no key"
    elif None in names or len(set(names)) < len(names):
        problem = "every key needs a name of its own"
    elif any(key.max_waiting is not None and key.max_waiting < 1 for key in keys):
        problem = "max_waiting must be at least 1"
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{path}: {problem}")
    return tuple(keys)


class KeyRing:
    """The valid keys."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(_digest(key.key), key) for key in keys]

    def find(self, offered: str) -> ApiKey | None:
        """Return the key that ``offered`` is, if any.

        Digests have one length, and every key is compared: the time tells nothing about a key.
        """
        digest = _digest(offered)
        matches = [key for known, key in self._keys if secrets.compare_digest(digest, known)]
        return matches[0] if matches else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
