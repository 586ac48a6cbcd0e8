"""The file of API keys, and the keys that are valid as the file changes."""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from shoal.runtime.clock import Clock, monotonic
from shoal.server.documents import read_json, warn_if_exposed
from shoal.server.errors import UserError, field_errors
from shoal.server.gate.keys import DIGEST_BYTES, ApiKey, digest_of

log = logging.getLogger("shoal.keys")

CHECK_SECONDS = 1.0
"""How long a change of the file may go unnoticed."""


def _hexadecimal(text: str) -> str:
    try:
        if len(bytes.fromhex(text)) == DIGEST_BYTES:
            return text
    except ValueError:
        pass
    raise ValueError(f"it must be {2 * DIGEST_BYTES} hexadecimal digits")


class KeyEntry(BaseModel):
    """One object of a file of keys: ``key`` or its ``sha256``, and the fields of ``ApiKey``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, AfterValidator(_hexadecimal)] | None = None
    min_priority: int | None = None
    max_waiting: PositiveInt | None = None
    max_held_bytes: PositiveInt | None = None
    max_concurrent: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    max_batches: PositiveInt | None = None
    max_file_bytes: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("it takes either key or sha256")
        return self

    def api_key(self) -> ApiKey:
        """Return the key, without its text."""
        digest = bytes.fromhex(self.sha256 or "") if self.key is None else digest_of(self.key)
        return ApiKey(digest, **self.model_dump(exclude={"key", "sha256"}))


def _with_names_of_their_own(entries: list[KeyEntry]) -> list[KeyEntry]:
    if not entries:
        raise ValueError("it holds no key")
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("every key needs a name of its own")
    return entries


_ENTRIES = TypeAdapter(Annotated[list[KeyEntry], AfterValidator(_with_names_of_their_own)])


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of API keys: a JSON list of objects with the fields of ``KeyEntry``.

    Raises:
        UserError: the file is missing or not valid. The message has one line for each wrong field,
            which names the field by its place (``[1].max_waiting``) and repeats no value.
    """
    content, problems = read_json(path)
    try:
        entries = _ENTRIES.validate_python(content)
    except ValidationError as error:
        found = field_errors(error.errors(include_input=False, include_url=False))
        problems += [f"{field}: {reason}" if field else reason for field, reason in found]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return tuple(entry.api_key() for entry in entries)


class KeyRing:
    """The valid keys: fixed keys, and those of a file that is read again when it changes.

    If the file becomes unreadable or wrong, a line is logged, and the keys that it held stay valid
    until it is right again. The file is checked when a key is looked up, so a ring that no one uses
    costs nothing.

    Args:
        fixed: the keys that never change.
        file: the file of the other keys.
        clock: monotonic seconds.

    Raises:
        UserError: the file is not valid at the start.
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
        """Return the valid key whose text is ``offered``; None if there is none.

        All digests have the same length, and every key is compared, so the time that this takes
        reveals nothing about a key.
        """
        self._refresh()
        digest = digest_of(offered)
        matches = [key for key in self._keys if secrets.compare_digest(digest, key.digest)]
        return matches[0] if matches else None

    def of_tenant(self, tenant: str) -> ApiKey | None:
        """Return a valid key of this tenant; None if there is none."""
        self._refresh()
        return next((key for key in self._keys if key.tenant == tenant), None)

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
            log.warning("the API keys stay as they were: %s", "; ".join(str(error).splitlines()))
        else:
            log.info("read the API keys of %s again", self._file)

    def _signature(self) -> tuple[int, ...] | None:
        """Return values that change with the file, its owner or its mode; None if there is none."""
        if self._file is None:
            return None
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _read(path: Path) -> tuple[ApiKey, ...]:
    keys = read_api_keys(path)
    warn_if_exposed(path, "API keys")
    return keys
