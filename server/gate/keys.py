"""API keys, and what their holders may ask for; ``key_ring.py`` reads them from files."""

import hashlib

import msgspec

DIGEST_BYTES = hashlib.sha256().digest_size


class ApiKey(msgspec.Struct, frozen=True):
    """One key, without its text: from ``--api-key`` (no limits), or from a file."""

    digest: bytes
    """SHA-256 of its text."""
    name: str | None = None
    """The holder's name in messages and counts."""
    min_priority: int | None = None
    """The most urgent priority that its requests can have; None: any."""
    max_waiting: int | None = None
    """Its requests that may wait in the task pool; None, here and below: any number."""
    max_held_bytes: int | None = None
    """Bytes that its requests on the node may have together."""
    max_concurrent: int | None = None
    """Its POSTs that may be in progress."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and of answers."""
    max_batches: int | None = None
    """Its batches that may be unfinished; None, here and below: as many as the node allows."""
    max_file_bytes: int | None = None
    """Bytes that its files may have together."""

    @property
    def tenant(self) -> str:
        """What identifies its holder: the name, or else the digest."""
        return self.digest.hex() if self.name is None else self.name


def plain_key(text: str) -> ApiKey:
    """Return the key with this text, without a name or limits."""
    return ApiKey(digest_of(text))


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a key's text."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
