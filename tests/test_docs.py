"""The page on the architecture names every folder there is, and nothing that is gone."""

import re
from pathlib import Path

import pytest

from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TOPS = (*PRODUCT, "grafana")

_ROW = re.compile(r"^\| `([\w/]+)/` \|", re.MULTILINE)
_PATH = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w/]*\w)/?(?:\.py)?`")


def problems(page: str, root: Path) -> list[str]:
    """Return how what a page names differs from what is below ``root``."""
    rows = _ROW.findall(page)
    modules = {path.relative_to(root).with_suffix("").as_posix() for path in sources(root, TOPS)}
    folders = {module.rpartition("/")[0] for module in modules}
    return [
        *(f"{folder}/ is not named" for folder in sorted(folders - set(rows))),
        *(f"{folder}/ is named twice" for folder in sorted(set(rows)) if rows.count(folder) > 1),
        *(
            f"{path} is not there"
            for path in sorted({*rows, *_PATH.findall(page)})
            if path not in modules | folders
        ),
    ]


def test_every_folder_has_its_sentence() -> None:
    assert problems(PAGE.read_text(), ROOT) == []
    assert {"runtime", "runtime/engine/link", "loadgen/bench"} <= set(
        _ROW.findall(PAGE.read_text())
    )


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        pytest.param("| `runtime/` | all |", "runtime/engine/ is not named", id="missing"),
        pytest.param(
            "| `runtime/` | all, `runtime/engine` |", "runtime/engine/ is not named", id="mentioned"
        ),
        pytest.param(
            "| `runtime/` | a |\n| `runtime/engine/` | b |\n| `runtime/gone/` | c |",
            "runtime/gone is not there",
            id="gone",
        ),
        pytest.param(
            "| `runtime/` | a |\n| `runtime/engine/` | b |\n| `runtime/` | c |",
            "runtime/ is named twice",
            id="twice",
        ),
        pytest.param(
            "`runtime/engine/c` sends\n| `runtime/` | a |\n| `runtime/engine/` | b |",
            "runtime/engine/c is not there",
            id="module-gone",
        ),
        pytest.param(
            "`runtime/engine/b` sends\n| `runtime/` | a |\n| `runtime/engine/` | b |",
            None,
            id="right",
        ),
    ],
)
def test_a_difference_is_seen(tmp_path: Path, page: str, problem: str | None) -> None:
    for name in ("runtime/a.py", "runtime/__init__.py", "runtime/engine/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    seen = problems(page, tmp_path)
    assert problem in seen if problem else seen == []
