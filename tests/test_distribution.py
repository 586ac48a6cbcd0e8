"""Several processes run the tests: no module in two of them, nor real engines."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(5))
def test_engine(number):
    Path("ran", f"{Path(__file__).stem}-{number}").write_text(str(os.getpid()))
"""
REAL, OTHERS = ("test_real_tokens", "test_serve_real"), ("test_admin", "test_pool", "test_really")


def processes(folder: Path, *modules: str) -> set[str]:
    """Return the ids of the processes that tests of some modules ran in."""
    return {file.read_text() for module in modules for file in folder.glob(f"{module}-*")}


def test_modules_and_all_real_engines_stay_in_one_process(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ran.mkdir()
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    for module in (*REAL, *OTHERS):
        (tmp_path / f"{module}.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    command = ["pytest", "--numprocesses", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert len(list(ran.iterdir())) == 5 * len(REAL + OTHERS)
    assert len(processes(ran, *REAL)) == 1
    assert all(len(processes(ran, module)) == 1 for module in OTHERS)
    assert len(processes(ran, *REAL, *OTHERS)) == 2
