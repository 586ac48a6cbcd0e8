"""Pages name every folder and module that there is, and the index of the pages leads to each."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import module_page
from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TOPS = (*PRODUCT, "grafana")

INDEX = "README.md"
"""The page of ``docs`` that leads to the others."""
PARTS = ("Use", "Operate", "Extend", "Internals")

_LINK = re.compile(r"\]\(([^)#\s]+\.md)[)#]")
_ROW = re.compile(r"^\| (`[\w/`, ]+/`) \| (.+) \|$", re.MULTILINE)
_FOLDER = re.compile(r"`([\w/]+)/`")
_WAY = "## A request's way"
"""The section of the architecture that names modules without their folders."""
_NAME = re.compile(r"`([a-z_]+)`")
_PATH = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w/]*\w)/?(?:\.py)?`")


def problems(page: str, root: Path) -> list[str]:
    """Return how what a page names differs from what is below ``root``.

    A row of its table is for one or several folders; what its text calls ``name/`` lies in them.
    """
    rows = [(_FOLDER.findall(folders), text) for folders, text in _ROW.findall(page)]
    named = [folder for folders, _ in rows for folder in folders]
    within = {f"{folders[0]}/{name}" for folders, text in rows for name in _FOLDER.findall(text)}
    tops = {path.relative_to(root).parts[0] for path in sources(root, TOPS)}
    return [
        *(f"{folder}/ is not named" for folder in sorted(tops - set(named))),
        *(f"{folder}/ is named twice" for folder in sorted(set(named)) if named.count(folder) > 1),
        *(
            f"{path} is not there"
            for path in sorted({*named, *within, *_PATH.findall(page)})
            if not (root / path).is_dir() and not (root / f"{path}.py").is_file()
        ),
    ]


def unknown_modules(page: str, root: Path) -> set[str]:
    """Return the modules that the way of a request passes and that are not below ``root``."""
    section = page.partition(_WAY)[2].partition("\n## ")[0]
    return set(_NAME.findall(section)) - {path.stem for path in sources(root, TOPS)}


def test_the_architecture_names_what_is_there() -> None:
    assert problems(PAGE.read_text(), ROOT) == []
    assert unknown_modules(PAGE.read_text(), ROOT) == set()


def test_a_module_that_no_request_passes_any_more_is_seen(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "guard.py").touch()
    page = f"`lost`\n{_WAY}\n`guard` and `gone`: `server/`, `Core`\n## More\n`other`"
    assert unknown_modules(page, tmp_path) == {"gone"}


def test_the_architecture_is_one_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= 90


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        pytest.param("| `runtime/` | all |", "server/ is not named", id="missing"),
        pytest.param("| `runtime/` | `server/` |", "server/ is not named", id="mentioned"),
        pytest.param(
            "| `runtime/`, `server/` | a |\n| `runtime/gone/` | b |",
            "runtime/gone is not there",
            id="gone",
        ),
        pytest.param(
            "| `runtime/` | a, `gone/` |\n| `server/` | b |",
            "runtime/gone is not there",
            id="gone-within",
        ),
        pytest.param(
            "| `runtime/` | a |\n| `server/`, `runtime/` | b |",
            "runtime/ is named twice",
            id="twice",
        ),
        pytest.param(
            "`runtime/engine/c` sends\n| `runtime/`, `server/` | a |",
            "runtime/engine/c is not there",
            id="module-gone",
        ),
        pytest.param(
            "`runtime/engine/b` sends\n| `runtime/` | `engine/` |\n| `server/` | b |",
            None,
            id="right",
        ),
    ],
)
def test_a_difference_is_seen(tmp_path: Path, page: str, problem: str | None) -> None:
    for name in ("runtime/a.py", "runtime/__init__.py", "runtime/engine/b.py", "server/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    seen = problems(page, tmp_path)
    assert problem in seen if problem else seen == []


def test_every_folder_has_its_sentence() -> None:
    folders = {path.parent for path in sources(ROOT, TOPS)}
    assert len(folders) > 40
    for folder in folders:
        assert module_page.first_paragraph(folder / "__init__.py"), folder


def test_the_page_of_modules_is_what_the_docstrings_say() -> None:
    said = module_page.PAGE.read_text("utf-8")
    assert said == module_page.page(), "run python -m tests.module_page"


def test_a_module_is_listed_under_its_folder(tmp_path: Path) -> None:
    for name, text in (
        ("runtime/__init__.py", '"""All of it.\n\nMore."""'),
        ("runtime/one.py", '"""Takes ``a | b``,\nin one line."""'),
        ("runtime/engine/two.py", '"""Two."""'),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    head, _, rest = module_page.page(tmp_path).partition("\n## ")
    assert head.startswith("# Modules\n")
    assert head.splitlines()[-4:] == [
        *("| folder | for |", "|---|---|"),
        "| [`runtime/`](#runtime) | All of it. |",
        "| [`runtime/engine/`](#runtimeengine) |  |",
    ]
    assert rest.splitlines() == [
        *("`runtime/`", "", "All of it.", "", "| module | |", "|---|---|"),
        r"| [one](../../runtime/one.py) | Takes `a \| b`, in one line. |",
        *("", "## `runtime/engine/`", "", "| module | |", "|---|---|"),
        "| [two](../../runtime/engine/two.py) | Two. |",
    ]


def reached(folder: Path, page: Path) -> set[Path]:
    """Return the pages below a folder to which links lead from a page, over one page or several."""
    found, ahead = {page}, [page]
    while ahead:
        here = ahead.pop()
        for target in linked(here):
            if target not in found and target.is_relative_to(folder) and target.is_file():
                found.add(target)
                ahead.append(target)
    return found


def linked(page: Path) -> Iterator[Path]:
    """Yield the pages to which a page has links."""
    for link in _LINK.findall(page.read_text()):
        if ":" not in link:
            yield (page.parent / link).resolve()


def test_the_index_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    index = docs / INDEX
    assert set(docs.rglob("*.md")) == reached(docs, index)
    # Results of single runs are listed on the page on benchmarks.
    direct = {*docs.glob("*.md"), *(docs / "internals").glob("*.md")}
    assert direct - {index} <= set(linked(index))
    assert tuple(re.findall(r"^## (.+)$", index.read_text(), re.MULTILINE)) == PARTS


def test_a_page_that_nothing_leads_to_is_seen(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[one](one.md#part), [out](https://a.b/c.md)")
    (tmp_path / "one.md").write_text("[two](sub/two.md)")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.md").write_text("[back](../README.md)")
    (tmp_path / "lost.md").write_text("[one](one.md)")
    found = reached(tmp_path, tmp_path / "README.md")
    assert {page.name for page in found} == {"README.md", "one.md", "two.md"}
