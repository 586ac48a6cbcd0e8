"""Several processes run the tests: no module in two of them, and real engines in three groups."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HALF, LONG, PROGRAMS, REAL_TOO, process_of
from tests.conftest import REAL as REAL_ENGINES

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


def run(folder: Path, *arguments: str) -> str:
    """Run pytest on modules of some names, and return what it says."""
    (folder / "ran").mkdir()
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    for module in (*REAL, *OTHERS):
        (folder / f"{module}.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nmarkers = real: x\n")
    command = ["pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take seconds to import
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(("wanted", "modules"), [("real", REAL), ("not real", OTHERS)])
def test_real_engines_are_marked_by_their_names(
    tmp_path: Path, wanted: str, modules: tuple[str, ...]
) -> None:
    run(tmp_path, "-m", wanted)
    names = {file.name.rpartition("-")[0] for file in (tmp_path / "ran").iterdir()}
    assert names == set(modules)


def test_real_engines_come_first(tmp_path: Path) -> None:
    """By their names others would: what takes longest is begun first."""
    said = run(tmp_path, "--collect-only", "--quiet").splitlines()
    names = [line.partition(".py::")[0] for line in said if "::" in line]
    assert list(dict.fromkeys(names)) == [*sorted(REAL), *sorted(OTHERS)]


def test_what_is_named_as_long_exists() -> None:
    root = Path(__file__).parents[1]
    modules = set(LONG) - {REAL_ENGINES, REAL_TOO, PROGRAMS}
    assert [name for name in modules if not (root / name).exists()] == []
    assert [begin for begin in (*HALF, PROGRAMS) if not [*root.glob(f"{begin}*")]] == []


def test_real_engines_have_two_processes_and_programs_one() -> None:
    engine = "tests/runtime/engine"
    modules = [f"{engine}/test_real_{name}.py" for name in ("memory", "tokens", "v2")]
    modules += ["tests/server/test_parity_real.py", f"{engine}/test_really.py"]
    found = [process_of(f"{module}::test_it") for module in modules]
    assert found == [REAL_ENGINES, REAL_TOO, PROGRAMS, REAL_TOO, modules[-1]]
    assert process_of(f"{modules[-1]}::test_real_one[x]") == REAL_ENGINES


def test_modules_and_all_real_engines_stay_in_one_process(tmp_path: Path) -> None:
    run(tmp_path, "--numprocesses", "2", "--dist", "loadscope")
    ran = tmp_path / "ran"
    assert len(list(ran.iterdir())) == 5 * len(REAL + OTHERS)
    assert len(processes(ran, *REAL)) == 1
    assert all(len(processes(ran, module)) == 1 for module in OTHERS)
    assert len(processes(ran, *REAL, *OTHERS)) == 2
