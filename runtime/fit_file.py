"""The file that keeps the result of a fit: how measured steps differ from the roofline."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.policies.cost.correction import Correction


class FitFileError(ValueError):
    """The file cannot be used; the message is one line."""


class _Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: dict[str, str]
    corrections: tuple[Correction, ...]


def path_of(directory: Path, key: Mapping[str, str]) -> Path:
    """Return where a fit is kept.

    Args:
        directory: has the files of all fits.
        key: what the fit depends on.
    """
    text = msgspec.json.encode(sorted(key.items()))
    return directory / f"fit-{hashlib.sha256(text).hexdigest()[:16]}.json"


def read_fit(path: Path, key: Mapping[str, str] | None = None) -> tuple[Correction, ...] | None:
    """Return the corrections that a file keeps; None if there is no file.

    Args:
        path: the file.
        key: what they must depend on; None: on anything.

    Raises:
        FitFileError: the file is damaged, or of something else.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Fit)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FitFileError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FitFileError(f"{path}: {error}") from error
    if key is not None and found.key != key:
        raise FitFileError(f"{path}: it was made for something else")
    if not all(correction.alike for correction in found.corrections):
        # Such files decode, because fields that are unknown by now are left out.
        raise FitFileError(f"{path}: an earlier build made it, which did not keep the lengths")
    return found.corrections


def write_fit(path: Path, key: Mapping[str, str], corrections: tuple[Correction, ...]) -> None:
    """Keep corrections; a reader sees the old file or the new one.

    Raises:
        FitFileError: the file cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(msgspec.json.encode(_Fit(dict(key), corrections)))
        beside.replace(path)
    except OSError as error:
        raise FitFileError(f"{path}: {error.strerror}") from error
