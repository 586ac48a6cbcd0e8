"""The page on the architecture names every module there is, and no other."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"

_ROW = re.compile(r"^\| `([\w/]+)/` \|[^|]*\|(.*)\|$", re.MULTILINE)
_ITEM = re.compile(r"(?:`\w+`, )*`\w+`(?=: )")
"""What a sentence is about: one module, or several of which it says the same."""


def named(page: str) -> list[str]:
    """Return the modules that the table of a page names, as paths without their ending."""
    return [
        f"{folder}/{module}"
        for folder, cell in _ROW.findall(page)
        for item in _ITEM.findall(cell)
        for module in re.findall(r"\w+", item)
        if folder.partition("/")[0] in PRODUCT
    ]


def problems(page: str, root: Path) -> list[str]:
    """Return how a page's modules differ from those below ``root``."""
    found = named(page)
    there = {
        path.relative_to(root).with_suffix("").as_posix()
        for path in sources(root)
        if path.name != "__init__.py"
    }
    return [
        *(f"{module} is not named" for module in sorted(there - set(found))),
        *(f"{module} is not there" for module in sorted(set(found) - there)),
        *(f"{module} is named twice" for module in sorted(set(found)) if found.count(module) > 1),
    ]


def test_every_module_has_its_sentence() -> None:
    assert problems(PAGE.read_text(), ROOT) == []
    assert {"runtime/clock", "server/bench/rates", "loadgen/shapes"} <= set(named(PAGE.read_text()))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        pytest.param({"runtime": "`a`: x"}, "runtime/engine/b is not named", id="missing"),
        pytest.param(
            {"runtime": "`a`: x. `b`: y"}, "runtime/engine/b is not named", id="another-folder"
        ),
        pytest.param(
            {"runtime": "`a`: as `b`", "runtime/engine": "of `b`"},
            "runtime/engine/b is not named",
            id="mentioned-only",
        ),
        pytest.param(
            {"runtime": "`a`, `gone`: x", "runtime/engine": "`b`: y"},
            "runtime/gone is not there",
            id="gone",
        ),
        pytest.param(
            {"runtime": "`a`: x. `a`: y", "runtime/engine": "`b`: z"},
            "runtime/a is named twice",
            id="twice",
        ),
        pytest.param({"runtime": "`a`: x", "runtime/engine": "`b`: y"}, None, id="right"),
    ],
)
def test_a_difference_is_seen(tmp_path: Path, rows: Mapping[str, str], problem: str | None) -> None:
    for name in ("runtime/a.py", "runtime/__init__.py", "runtime/engine/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    page = "\n".join(f"| `{folder}/` | for | {cell} |" for folder, cell in rows.items())
    seen = problems(page, tmp_path)
    assert problem in seen if problem else seen == []
