"""Writes the page that lists all modules, from the first sentences of their docstrings.

python -m tests.module_page
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "modules.md"
PACKAGES = (*PRODUCT, "grafana")

_HEAD = """\
# Modules

`python -m tests.module_page` writes this page from the docstrings of the modules.
[architecture.md](../architecture.md) says what
the folders are for, and who may import whom. No two modules have the same name.
"""


def page(root: Path = ROOT) -> str:
    """Return the page: a table for each folder, in which a module has a line."""
    parts = [_HEAD]
    for folder, modules in groupby(sorted(sources(root, PACKAGES), key=_place), lambda m: m.parent):
        parts.append("\n".join(_section(folder.relative_to(root), modules)))
    return "\n".join(parts)


def _place(module: Path) -> tuple[tuple[str, ...], str]:
    return module.parent.parts, module.stem


def _section(folder: Path, modules: Iterator[Path]) -> Iterator[str]:
    yield f"## `{folder.as_posix()}/`\n"
    rows = []
    for module in modules:
        said = first_paragraph(module)
        if module.stem == "__init__":
            yield f"{said}\n"
        else:
            path = (folder / module.name).as_posix()
            rows.append(f"| [{module.stem}](../../{path}) | {said} |")
    if rows:
        yield from ("| module | |", "|---|---|", *rows, "")


def first_paragraph(module: Path) -> str:
    """Return the first paragraph of a module's docstring, as Markdown in one line."""
    said = (ast.get_docstring(ast.parse(module.read_text("utf-8"))) or "").partition("\n\n")[0]
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(said.split())).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
