"""Modules and functions are short enough to be read in one go, but for those that are named here.

Lines are those that a reader sees: of a function from its first decorator to its end, with its
docstring, its comments and its empty lines.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
PACKAGES = (*PRODUCT, "grafana", "deploy")

MODULE_LINES = 450
FUNCTION_LINES = 60
MOST_LONG_FUNCTIONS = 3

LONG_FUNCTIONS = frozenset(
    {
        "runtime/engine/kernels/partitioned_linear_kernel.py: _matrix_kernel",
    }
)
"""Functions that stay long: cut apart they would be harder to read."""


_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Where functions are. Most nodes of a tree are others."""


def too_long(root: Path) -> set[str]:
    """Return the modules and functions below ``root`` that are too long."""
    found: set[str] = set()
    for path in sources(root, PACKAGES):
        name, source = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        if len(source.splitlines()) > MODULE_LINES:
            found.add(name)
        lengths = _functions(ast.parse(source, name))
        found |= {f"{name}: {inner}" for inner, lines in lengths if lines > FUNCTION_LINES}
    return found


def _functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """Yield every function in a tree, by its qualified name, with its lines."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".removeprefix(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield name, (child.end_lineno or first) - first + 1
        if isinstance(child, _BLOCKS):
            yield from _functions(child, name)


def test_modules_and_functions_are_short_but_those_that_are_named() -> None:
    found = too_long(ROOT)
    named = LONG_FUNCTIONS
    assert found - named == set(), f"over {FUNCTION_LINES} lines, or {MODULE_LINES} of a module"
    assert named - found == set(), "they are short by now: take them off the list"


def test_few_functions_stay_long() -> None:
    assert len(LONG_FUNCTIONS) <= MOST_LONG_FUNCTIONS


def body(lines: int, indent: str = "    ") -> str:
    return f"{indent}x = 1\n" * lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param("def f():\n" + body(59), set(), id="short"),
        pytest.param("def f():\n" + body(60), {": f"}, id="long"),
        pytest.param("async def f():\n" + body(60), {": f"}, id="coroutine"),
        pytest.param("@a(\n    1\n)\ndef f():\n" + body(57), {": f"}, id="decorator"),
        pytest.param('def f():\n    """One.\n\n    """\n' + body(57), {": f"}, id="docstring"),
        pytest.param("class C:\n    def f(self):\n" + body(60, " " * 8), {": C.f"}, id="method"),
        pytest.param(
            "def f():\n    def g():\n" + body(60, " " * 8), {": f", ": f.g"}, id="within-another"
        ),
        pytest.param("if a:\n    def f():\n" + body(60, " " * 8), {": f"}, id="condition"),
        pytest.param(
            "try:\n    a\nexcept b:\n    def f():\n" + body(60, " " * 8), {": f"}, id="handler"
        ),
        pytest.param("x = 1\n" * 450, set(), id="short-module"),
        pytest.param("x = 1\n" * 451, {""}, id="long-module"),
    ],
)
def test_what_is_too_long_is_found(tmp_path: Path, source: str, found: set[str]) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "a.py").write_text(source)
    assert too_long(tmp_path) == {f"server/a.py{name}" for name in found}
