"""The set-up script finds pip on the index, and installs nothing but the pinned wheel."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "requirements" / "make_venv.py"
INDEX = "https://index.example/simple"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_venv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PIP_INDEX_URL", f"{INDEX}/")
    return module


def serve(module: ModuleType, monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes]) -> None:
    monkeypatch.setattr(module, "fetch", pages.__getitem__)


def test_wheel_is_found_through_a_relative_link(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (
        '<a href="../../files/pip-1.0-py3-none-any.whl">old</a>'
        f'<a href="../../files/{script.PIP_WHEEL}#sha256=00">pinned</a>'
    )
    serve(script, monkeypatch, {f"{INDEX}/pip/": page.encode()})
    assert script.find_wheel() == f"https://index.example/files/{script.PIP_WHEEL}#sha256=00"


def test_index_without_the_pinned_wheel_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(script, monkeypatch, {f"{INDEX}/pip/": b'<a href="pip-1.0-py3-none-any.whl">old</a>'})
    with pytest.raises(LookupError, match=f"{INDEX}/pip/ has no pip-"):
        script.find_wheel()


def test_other_content_than_the_pinned_is_not_installed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = f"{INDEX}/pip/{script.PIP_WHEEL}"
    page = f'<a href="{script.PIP_WHEEL}">pinned</a>'.encode()
    serve(script, monkeypatch, {f"{INDEX}/pip/": page, wheel: b"something else"})
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: pytest.fail("installed"))
    with pytest.raises(ValueError, match="does not match its pinned hash"):
        script.install_pip(Path(sys.executable))


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 13, 0)])
def test_other_pythons_are_refused(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    version: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(script.sys, "version_info", version)
    monkeypatch.setattr(script.sys, "argv", ["make_venv.py", str(tmp_path / "venv")])
    with pytest.raises(SystemExit, match=r"^Shoal needs Python 3\.11 or 3\.12"):
        script.main()
    assert not (tmp_path / "venv").exists()


def test_a_link_to_an_environment_of_others_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "venv").symlink_to("theirs")
    monkeypatch.setattr(script.sys, "argv", ["make_venv.py", str(tmp_path / "venv")])
    with pytest.raises(SystemExit, match="venv is a link"):
        script.main()
    assert (tmp_path / "theirs" / "file").exists()
