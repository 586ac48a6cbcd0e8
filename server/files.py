"""Writes the files that a command's user asked for."""

from pathlib import Path

from shoal.server.errors import UserError


def write_file(path: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
