"""`make quick` runs tests that are there, and none that waits for vLLM."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VLLM = re.compile(r"""^\s*(?:from|import) (?:vllm|torch)\b|importorskip\(["']vllm""", re.MULTILINE)


def quick() -> tuple[list[Path], list[Path]]:
    """Return the paths that `make quick` runs, and those below them that it leaves out."""
    command = ["make", "--dry-run", "--always-make", "quick"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = said.replace("\\\n", " ").partition("-m pytest")[2].split()
    ignored = [ROOT / word.partition("=")[2] for word in words if word.startswith("--ignore=")]
    return [ROOT / word for word in words if word.startswith("tests/")], ignored


def modules(paths: Iterable[Path]) -> set[Path]:
    """Return the test modules that are, or are below, the paths."""
    return {
        module
        for path in paths
        for module in (path.rglob("test_*.py") if path.is_dir() else [path])
    }


def test_quick_names_what_is_there() -> None:
    chosen, ignored = quick()
    assert len(chosen) > 5
    assert [path for path in (*chosen, *ignored) if not path.exists()] == []
    assert modules(ignored) < modules(chosen)


def test_quick_imports_no_vllm() -> None:
    chosen, ignored = quick()
    named = {path for path in modules(chosen) if _VLLM.search(path.read_text())}
    assert named <= modules(ignored)
    assert named, "the search finds those that are left out"
