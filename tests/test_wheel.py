"""What a wheel installs: the packages under their names, their files, and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = sorted(path.name for path in (ROOT / "shoal").iterdir() if path.is_symlink())
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def run(command: list[str], folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the tree, and unpack it as an installer does."""
    tree, out, site = (tmp_path_factory.mktemp(name) for name in ("tree", "out", "site"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("shoal", *LINKS):
        shutil.copytree(
            ROOT / name,
            tree / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    run(["-c", BUILD, str(out)], tree)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_a_wheel_installs_one_package(installed: Path) -> None:
    (about,) = (path.name for path in installed.glob("shoal-*.dist-info"))
    assert {path.name for path in installed.iterdir()} == {"shoal", about}


def test_it_has_every_file_of_the_packages(installed: Path) -> None:
    package = installed / "shoal"
    there = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT)
        for name in LINKS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".pyc")
    }
    training = {path for path in wanted if path.is_relative_to("server/demo/training")}
    assert training, "the demo model's training is no part of serving"
    assert there == wanted - training | {Path("__init__.py")}
    demo, boards = Path("server/demo/checkpoint"), Path("grafana/dashboards")
    assert {demo / "model.safetensors", boards / "shoal-serving.json"} <= there


def test_it_runs_by_its_names(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = (
        "import shoal.server.options.serve_options as options\n"
        "print(options.__file__, options.DEMO_CHECKPOINT.is_dir())"
    )
    file, demo = run(["-c", code], installed, environment).split()
    assert Path(file).is_relative_to(installed)
    assert demo == "True"
    shown = run(["-m", "shoal.server.commands.cli", "--help"], installed, environment)
    assert "serve a model" in shown
