"""Writes the page that lists all modules, from the first sentences of their docstrings.

python -m tests.module_page
"""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "modules.md"
PACKAGES = (*PRODUCT, "grafana")

_HEAD = """\
# Modules

`python -m tests.module_page` writes this page from the docstrings of the modules.
[architecture.md](../architecture.md) says how they work together, and who may import whom. No two
modules have the same name.
"""


def page(root: Path = ROOT) -> str:
    """Return the page: a table of all folders, and one for each, in which a module has a line."""
    said = {module: first_paragraph(module) for module in sources(root, PACKAGES)}
    names, parts = [], []
    for folder, modules in groupby(sorted(said, key=_place), lambda module: module.parent):
        path = folder.relative_to(root).as_posix()
        what = said.get(folder / "__init__.py", "")
        names.append(f"| [`{path}/`](#{path.replace('/', '')}) | {what} |")
        parts.append("\n".join(_section(path, what, {m.stem: said[m] for m in modules})))
    return "\n".join([_HEAD, "| folder | for |", "|---|---|", *names, "", *parts])


def _place(module: Path) -> tuple[tuple[str, ...], str]:
    return module.parent.parts, module.stem


def _section(folder: str, what: str, modules: Mapping[str, str]) -> Iterator[str]:
    yield f"## `{folder}/`\n"
    if what:
        yield f"{what}\n"
    rows = [
        f"| [{name}](../../{folder}/{name}.py) | {said} |"
        for name, said in modules.items()
        if name != "__init__"
    ]
    if rows:
        yield from ("| module | |", "|---|---|", *rows, "")


def first_paragraph(module: Path) -> str:
    """Return the first paragraph of a module's docstring, as Markdown in one line."""
    said = (ast.get_docstring(ast.parse(module.read_text("utf-8"))) or "").partition("\n\n")[0]
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(said.split())).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
