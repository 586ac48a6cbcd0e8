"""API keys, and what their holders may ask for; a file of them is read in ``key_ring.py``."""

import hashlib

import msgspec

DIGEST_BYTES = hashlib.sha256().digest_size


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


def plain_key(text: str) -> ApiKey:
    """Return the key with this text, without a name or limits."""
    return ApiKey(digest_of(text))


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a key's text."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
