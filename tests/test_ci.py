"""CI has what tests are skipped without: it installs what is missing, and then runs every check."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / ".ci" / "run"
TOLD = '#!/bin/bash\necho "$(basename "$0") $*" >> "$TOLD"\n'


def commands_of(folder: Path, there: set[str], *, fails: str = "") -> tuple[int, list[str]]:
    """Run CI's command where only these programs are, and return its exit code and its commands.

    Args:
        folder: for the stand-ins of all programs that install or check something.
        there: other programs that the machine has already.
        fails: the stand-in that fails.
    """
    for name in ("make", "apt-get", *there):
        program = folder / name
        program.write_text(TOLD + ("exit 1\n" if name == fails else ""))
        program.chmod(0o755)
    for name in ("bash", "basename", "dirname", "env"):
        (folder / name).symlink_to(str(shutil.which(name)))
    told = folder / "told"
    environment = {**os.environ, "PATH": str(folder), "TOLD": str(told)}
    done = subprocess.run([str(RUN)], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, told.read_text().splitlines()


def installed(commands: list[str]) -> set[str]:
    """Return the packages that were installed."""
    calls = [line.split() for line in commands if line.startswith("apt-get install")]
    return {word for call in calls for word in call[2:] if not word.startswith("-")}


def test_what_tests_need_is_installed_before_they_run(tmp_path: Path) -> None:
    code, commands = commands_of(tmp_path, set())
    assert code == 0
    assert installed(commands) == {"prometheus", "chromium"}
    assert commands[-1] == "make test"
    assert commands.index("make setup") < commands.index("make test")


@pytest.mark.parametrize("missing", ["prometheus", "chromium"])
def test_what_is_there_is_not_installed(tmp_path: Path, missing: str) -> None:
    there = {"promtool", "chromium"} - {"promtool" if missing == "prometheus" else missing}
    assert installed(commands_of(tmp_path, there)[1]) == {missing}


def test_nothing_is_installed_where_nothing_is_missing(tmp_path: Path) -> None:
    _, commands = commands_of(tmp_path, {"promtool", "chromium"})
    assert commands == ["make setup", "make test"]


@pytest.mark.parametrize("program", ["apt-get", "make"])
def test_a_failure_fails_and_no_test_runs(tmp_path: Path, program: str) -> None:
    code, commands = commands_of(tmp_path, set(), fails=program)
    assert code != 0
    assert "make test" not in commands
