"""Files of JSON or YAML that operators write.

Messages about errors in a file never repeat its values, because a value may be a secret.
"""

import json
import logging
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.server.errors import UserError, shown_name

log = logging.getLogger("shoal.documents")


class Document(NamedTuple):
    """The content of a file."""

    content: Any
    problems: list[str]
    """A line for each name that an object has more than once: only its last value is kept."""


def read_json(path: Path) -> Document:
    """Return what a file of JSON says.

    Raises:
        UserError: the file cannot be read, or is not JSON; one line.
    """
    problems: list[str] = []

    def made_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        problems.extend(_repeated(name for name, _ in pairs))
        return dict(pairs)

    try:
        return Document(json.loads(_read(path), object_pairs_hook=made_of), problems)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: {where}: it is not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: it is not valid JSON: it is not UTF-8") from None


def read_yaml(path: Path) -> Document:
    """Return what a file of YAML says.

    Raises:
        UserError: the file cannot be read, or is not YAML; one line.
    """
    import yaml

    problems: list[str] = []

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            problems.extend(_repeated(str(key.value) for key, _ in node.value))
            return node

    try:
        return Document(yaml.load(_read(path), Loader), problems)
    except (yaml.YAMLError, ValueError) as error:  # their messages show what stands there
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{path}: {where}it is not valid YAML") from None


def warn_if_exposed(path: Path, what: str) -> None:
    """Log a warning if a file with secrets can be read by every user of the machine."""
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("%s holds %s and can be read by every user: chmod o-r it", path, what)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _repeated(names: Iterable[str]) -> list[str]:
    return [f"{shown_name(name)}: it is given twice" for name, n in Counter(names).items() if n > 1]
